"""The run on disk: an append-only event log in one SQLite file, with the finished attempts beside it.

``RunReader`` reads a run at any time, live ones included. ``RunStore`` is the one writer.

What is promised: every append is one transaction in write-ahead mode, so whatever ends the process, kill -9 included,
every append that returned is in the log and none is there in part. After a power failure the log is still sound, but its
last moments may be missing (``synchronous = NORMAL``: no disk flush per event).

Tables, for anyone's SQL: ``events(position, kind, clock, dispatch, body)`` with a JSON body, ``trajectories`` keyed by the
position of their receipt, and one view per kind of event (``dispatches``, ``receipts``, ...) with the body's fields as
columns. The log keeps what a restore took back; ``headrace.records.ledger`` says which events count.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import RunFailed
from headrace.records.codec import (
    FIELDS,
    TRAJECTORY_COLUMNS,
    StoredTrajectory,
    decode_event,
    decode_trajectory,
    encode_event,
    encode_trajectory,
    event_dispatch,
    event_kind,
)
from headrace.records.errors import RunError
from headrace.records.ledger import Ledger, LedgerError, effective_spans
from headrace.records.run_lock import RunLock
from headrace.rollout.trajectory import Dispatch, Event, Receipt, Restored, Trajectory

__all__ = ["RUN_FILE", "RunError", "RunReader", "RunStore", "is_run"]

RUN_FILE = "run.sqlite"
LOCK_FILE = "run.lock"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x48445243  # "HDRC", in the file's header: tells a run from any other SQLite file
_ASIDE = re.compile(r"\.(policy|config\.toml|metrics\.jsonl|evaluations\.jsonl)\..+")
_PAGE = 2048  # events per read; a long read transaction would keep a live run's write-ahead file growing
_VIEWS = {
    "prior": "priors",
    "dispatch": "dispatches",
    "receipt": "receipts",
    "drop": "drops",
    "consumption": "consumptions",
    "publication": "publications",
    "restored": "restores",
}


def is_run(folder: str | Path) -> bool:
    """Whether the folder holds a run (of this or another schema version)."""
    path = Path(folder) / RUN_FILE
    if not path.is_file() or path.stat().st_size == 0:
        return False
    try:
        connection = _connect_read_only(path)
        try:
            return bool(_pragma(connection, "application_id") == _APPLICATION_ID)
        finally:
            connection.close()
    except sqlite3.Error:
        return False


class RunReader:
    """Read access to a run's log and trajectories. Never waits for a writer. Belongs to the thread that opened it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / RUN_FILE
        if not self._path.is_file():
            raise RunError(f"no run in {self.folder}: {RUN_FILE} is missing")
        with self._sound():
            self._connection = self._connect()
            self._check_schema()

    def __len__(self) -> int:
        """Events in the log: the position that the next event gets."""
        with self._sound():
            return int(self._connection.execute("SELECT coalesce(max(position) + 1, 0) FROM events").fetchone()[0])

    def events(self, start: int = 0) -> Iterator[tuple[int, Event]]:
        """(position, event) from ``start`` to what is the end of the log now, restored-over events included."""
        for position, _, event in self.timed_events(start):
            yield position, event

    def timed_events(self, start: int = 0) -> Iterator[tuple[int, float, Event]]:
        """(position, clock seconds, event), as ``events``."""
        stop = len(self)
        while start < stop:
            with self._sound():
                page = self._connection.execute(
                    "SELECT position, clock, kind, body FROM events WHERE position >= ? AND position < ? ORDER BY position LIMIT ?",
                    (start, stop, _PAGE),
                ).fetchall()
            if not page or page[0][0] != start or page[-1][0] != start + len(page) - 1:
                raise RunError(f"{self._path} is damaged: events are missing from position {start} on")
            for position, seconds, kind, body in page:
                yield position, seconds, self._decode(position, kind, body)
            start += len(page)

    def effective_spans(self) -> tuple[range, ...]:
        """The positions that count now, as ascending ranges (see ``headrace.records.ledger``)."""
        length = len(self)
        with self._sound():
            rows = self._connection.execute(
                "SELECT position, body FROM events WHERE kind = 'restored' AND position < ?", (length,)
            ).fetchall()
        restores: list[tuple[int, int]] = []
        for position, body in rows:
            event = self._decode(position, "restored", body)
            if isinstance(event, Restored):
                restores.append((position, event.log_position))
        return effective_spans(length, restores)

    def trajectory(self, dispatch: int) -> Trajectory:
        """The finished attempt with this dispatch number, as its receipt that counts left it."""
        spans = self.effective_spans()
        columns = ", ".join(TRAJECTORY_COLUMNS)
        with self._sound():
            rows = self._connection.execute(
                f"SELECT position, {columns} FROM trajectories WHERE dispatch = ? ORDER BY position DESC", (dispatch,)
            ).fetchall()
        for position, *values in rows:
            if any(position in span for span in spans):
                try:
                    return decode_trajectory(StoredTrajectory(*values), self._dispatch(dispatch, spans))
                except ValueError as error:
                    raise RunError(f"{self._path} is damaged: the trajectory of dispatch {dispatch} cannot be read: {error}") from error
        raise RunError(f"no trajectory of dispatch {dispatch} in {self.folder}: it has no receipt")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _dispatch(self, number: int, spans: Sequence[range]) -> Dispatch:
        with self._sound():
            rows = self._connection.execute(
                "SELECT position, body FROM events WHERE dispatch = ? AND kind = 'dispatch' ORDER BY position DESC", (number,)
            ).fetchall()
        for position, body in rows:
            event = self._decode(position, "dispatch", body)
            if isinstance(event, Dispatch) and any(position in span for span in spans):
                return event
        raise RunError(f"{self._path} is damaged: dispatch {number} has a trajectory but was never made")

    def _decode(self, position: int, kind: str, body: str) -> Event:
        try:
            return decode_event(kind, body)
        except ValueError as error:
            raise RunError(f"{self._path} is damaged at position {position}: {error}") from error

    def _check_schema(self) -> None:
        if _pragma(self._connection, "application_id") != _APPLICATION_ID:
            raise RunError(f"{self._path} is not the log of a Headrace run: choose another folder")
        found = _pragma(self._connection, "user_version")
        if found != SCHEMA_VERSION:
            raise RunError(
                f"{self._path} has schema version {found}, but this program reads {SCHEMA_VERSION}: use the version that wrote it"
            )

    def _connect(self) -> sqlite3.Connection:
        return _connect_read_only(self._path)

    def _sound(self) -> AbstractContextManager[None]:
        return _sound(self._path)


class RunStore(RunReader):
    """The one writer of a run: ``RunStore.create`` starts a run, ``RunStore.resume`` goes on with one.

    ``clock`` gives each event's time in seconds, real or simulated, counted from wherever the caller likes.
    Events are refused with ``LedgerError`` where they contradict the log (see ``Ledger``).
    """

    def __init__(self, folder: str | Path, *, clock: Callable[[], float]) -> None:
        """Use ``create`` or ``resume``."""
        self._clock = clock
        self._length = 0
        self._ledger = Ledger()
        self._lock = RunLock(Path(folder) / LOCK_FILE)
        try:
            super().__init__(folder)
            self._reload()
            _clear_away(self.folder)
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def create(cls, folder: str | Path, *, clock: Callable[[], float]) -> Self:
        """Start a run in ``folder``, made if missing. ``RunError`` if it already holds one or cannot be written."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = RunLock(folder / LOCK_FILE)
        except (OSError, sqlite3.Error) as error:
            raise RunError(f"cannot write to {folder}: {error}") from error
        try:
            _create_file(folder / RUN_FILE)
        finally:
            lock.release()
        return cls(folder, clock=clock)

    @classmethod
    def resume(cls, folder: str | Path, *, clock: Callable[[], float]) -> Self:
        """Go on with the run in ``folder``. ``RunError`` if there is none or another process trains in it."""
        if not (Path(folder) / RUN_FILE).is_file():
            raise RunError(f"no run in {folder}: {RUN_FILE} is missing")
        return cls(folder, clock=clock)

    def append(self, event: Event) -> int:
        """Log one event; returns its position."""
        return self._write([event])

    def append_all(self, events: Sequence[Event]) -> int:
        """Log several events in one transaction, all or none (a batch's consumptions with its publication); returns the first position."""
        if len(events) > 1 and any(isinstance(event, Restored) for event in events):
            raise LedgerError("a restore changes what counts: append it alone")
        return self._write(events)

    def append_receipt(self, receipt: Receipt, trajectory: Trajectory) -> int:
        """Log a receipt together with the attempt it is about, both or neither."""
        if receipt.dispatch != trajectory.dispatch.number:
            raise LedgerError(
                f"a receipt of dispatch {receipt.dispatch} cannot carry the trajectory of dispatch {trajectory.dispatch.number}"
            )
        return self._write([receipt], encode_trajectory(trajectory))

    def close(self) -> None:
        super().close()
        self._lock.release()

    def __len__(self) -> int:
        return self._length

    def _connect(self) -> sqlite3.Connection:
        return _connect(self._path)

    def _write(self, events: Sequence[Event], trajectory: StoredTrajectory | None = None) -> int:
        if not events:
            return self._length
        first, seconds = self._length, float(self._clock())
        rows = [(first + i, event_kind(e), seconds, event_dispatch(e), encode_event(e)) for i, e in enumerate(events)]
        try:
            for i, event in enumerate(events):
                self._admit(event, first + i)
            with self._written():
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
                if trajectory is not None:
                    marks = ", ".join("?" * (2 + len(TRAJECTORY_COLUMNS)))
                    self._connection.execute(f"INSERT INTO trajectories VALUES ({marks})", (first, rows[0][3], *astuple(trajectory)))
                self._connection.execute("COMMIT")
            self._length = first + len(rows)
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._reload()
            raise
        if isinstance(events[0], Restored):
            self._reload()
        return first

    @contextmanager
    def _written(self) -> Iterator[None]:
        """A log that can no longer be written ends the run; what it holds so far can be resumed."""
        try:
            yield
        except sqlite3.Error as error:
            raise RunFailed(f"cannot write to {self._path}: {error}; the run can be resumed once it can be written again") from error

    def _admit(self, event: Event, position: int) -> None:
        if isinstance(event, Restored) and not 0 <= event.log_position <= position:
            raise LedgerError(f"a restore at position {position} cannot go back to log position {event.log_position}")
        self._ledger.admit(event)

    def _reload(self) -> None:
        self._length = super().__len__()
        try:
            self._ledger = Ledger.of(self.events())
        except LedgerError as error:
            raise RunError(f"{self._path} is damaged: {error}") from error


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """SQLite's errors become a ``RunError`` that names the file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunError(f"cannot use {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise RunError(f"{path} is damaged or not the log of a run: {error}") from error


def _clear_away(folder: Path) -> None:
    """What killed processes wrote aside and never renamed; whoever holds the lock is the only one who writes these."""
    for path in folder.iterdir():
        if _ASIDE.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    # A file in write-ahead mode needs its side files even for reading; where the folder is read-only and no writer has
    # left any, the file is complete by itself and "immutable" says so.
    uri = path.resolve().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=30.0, isolation_level=None)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        connection = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    return connection


def _create_file(path: Path) -> None:
    """Made aside and renamed, so that a file of this name is a whole log from its first moment on."""
    if path.exists() and path.stat().st_size > 0:
        raise RunError(f"{path.parent} already holds a run: resume it or choose another folder ({path.name} is there)")
    aside = path.with_name(f".{path.name}.new")
    connection: sqlite3.Connection | None = None
    try:
        aside.unlink(missing_ok=True)
        connection = _connect(aside)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _schema():
            connection.execute(statement)
        connection.execute("COMMIT")
        connection.close()  # the last connection writes its WAL into the file
        aside.replace(path)
    except (sqlite3.DatabaseError, OSError) as error:
        raise RunError(f"cannot start a run in {path.parent}: {path.name}: {error}") from error
    finally:
        if connection is not None:
            connection.close()


def _schema() -> Iterable[str]:
    types = {"outcome": "REAL", "success": "INTEGER", "reason": "TEXT", "unmatched_actions": "INTEGER"}
    types |= {"generation_seconds": "REAL", "environment_seconds": "REAL"}
    columns = ", ".join(f"{name} {types.get(name, 'BLOB')}" for name in TRAJECTORY_COLUMNS)
    yield "CREATE TABLE events (position INTEGER PRIMARY KEY, kind TEXT NOT NULL, clock REAL NOT NULL, dispatch INTEGER, body TEXT)"
    yield "CREATE INDEX events_of_a_dispatch ON events (dispatch) WHERE dispatch IS NOT NULL"
    yield "CREATE INDEX events_restored ON events (position) WHERE kind = 'restored'"
    yield f"CREATE TABLE trajectories (position INTEGER PRIMARY KEY REFERENCES events, dispatch INTEGER NOT NULL, {columns})"
    yield "CREATE INDEX trajectories_of_a_dispatch ON trajectories (dispatch)"
    for kind, view in _VIEWS.items():
        fields = ", ".join(f"""json_extract(body, '$.{name}') AS "{name}" """ for name in FIELDS[kind])
        yield f"CREATE VIEW {view} AS SELECT position, clock, {fields} FROM events WHERE kind = '{kind}'"
    yield f"PRAGMA application_id = {_APPLICATION_ID}"
    yield f"PRAGMA user_version = {SCHEMA_VERSION}"


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]
