"""What a log may hold: which events count after a restore, and the exactly-once rules among those that do.

Pure functions and one small state over events; no file is touched here. The store refuses events by these rules, and
replay checks a finished log by the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Event, Prior, Publication, Receipt, Restored

K = TypeVar("K", int, str)


class LedgerError(ValueError):
    """An event contradicts the events before it."""


def effective_spans(length: int, restores: Iterable[tuple[int, int]]) -> tuple[range, ...]:
    """The positions of a log of ``length`` events that count, as ascending ranges.

    ``restores`` are pairs (position of a ``Restored`` event, its ``log_position``). With E(n) the events that count among
    the first n: ``E(n + 1) = E(n) + [n]``, but ``E(n + 1) = E(p) + [n]`` where event n restores position p. So a restored
    run goes on from exactly the history that its checkpoint knew, also when an earlier restore is itself taken back.
    """
    targets = {position: target for position, target in restores if position < length}
    spans: list[range] = []
    stop = length
    for position in sorted(targets, reverse=True):
        if position >= stop:
            continue
        target = targets[position]
        if not 0 <= target <= position:
            raise LedgerError(f"the restore at position {position} names log position {target}, which does not lie before it")
        spans.append(range(position, stop))
        stop = target
    if stop:
        spans.append(range(stop))
    return tuple(reversed(spans))


def effective(events: Iterable[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
    """The events that count, in order: without what lies between a ``Restored``'s log position and it.

    ``events`` is a whole log, as (position, event) from position 0 without holes.
    """
    log: Sequence[tuple[int, Event]] = list(events)
    for expected, (position, _) in enumerate(log):
        if position != expected:
            raise LedgerError(f"a log is read from its start: expected position {expected}, found {position}")
    restores = [(position, event.log_position) for position, event in log if isinstance(event, Restored)]
    for span in effective_spans(len(log), restores):
        yield from log[span.start : span.stop]


@dataclass(slots=True)
class Ledger:
    """Exactly-once rules over the events that count. ``admit`` refuses an event without changing anything, or takes it in.

    - a dispatch number is used once, under a version that is published;
    - a dispatch is received at most once, and dropped or consumed at most once, never both;
    - a consumption follows a receipt;
    - a task has at most one prior;
    - published versions count 1, 2, 3, ...
    """

    version: int = 0
    priors: set[str] = field(default_factory=set)
    dispatched: set[int] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    consumed: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, events: Iterable[tuple[int, Event]]) -> Ledger:
        """The ledger of a whole log; ``LedgerError`` names the first position that breaks a rule."""
        ledger = cls()
        for position, event in effective(events):
            try:
                ledger.admit(event)
            except LedgerError as error:
                raise LedgerError(f"position {position}: {error}") from None
        return ledger

    def admit(self, event: Event) -> None:
        match event:
            case Prior():
                self._once(event.task, self.priors, f"task {event.task!r} already has a prior")
            case Dispatch():
                if not 0 <= event.version <= self.version:
                    raise LedgerError(f"dispatch {event.number} names version {event.version}, but the newest published is {self.version}")
                self._once(event.number, self.dispatched, f"dispatch {event.number} was already made")
            case Receipt():
                self._open(event.dispatch, "received")
                self._once(event.dispatch, self.received, f"dispatch {event.dispatch} was already received")
            case Drop():
                self._open(event.dispatch, "dropped")
                self.dropped.add(event.dispatch)
            case Consumption():
                self._open(event.dispatch, "consumed")
                if event.dispatch not in self.received:
                    raise LedgerError(f"dispatch {event.dispatch} cannot be consumed: it has no receipt")
                self.consumed.add(event.dispatch)
            case Publication():
                if event.version != self.version + 1:
                    raise LedgerError(f"version {event.version} cannot be published after version {self.version}")
                self.version = event.version
            case Restored():
                pass

    def _once(self, key: K, seen: set[K], complaint: str) -> None:
        if key in seen:
            raise LedgerError(complaint)
        seen.add(key)

    def _open(self, dispatch: int, verb: str) -> None:
        if dispatch not in self.dispatched:
            raise LedgerError(f"dispatch {dispatch} cannot be {verb}: it was never made")
        if dispatch in self.consumed:
            raise LedgerError(f"dispatch {dispatch} cannot be {verb}: it was already consumed")
        if dispatch in self.dropped:
            raise LedgerError(f"dispatch {dispatch} cannot be {verb}: it was already dropped")
