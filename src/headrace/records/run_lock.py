"""One writer per run: a lock that dies with its process."""

from __future__ import annotations

import os
import socket
import sqlite3
from pathlib import Path

from headrace.records.errors import RunError


class RunLock:
    """Exclusive from construction to ``release`` or the end of the process, however it ends.

    A write transaction held open on an SQLite file of its own: SQLite's file locks work on every platform, exclude a
    second holder in the same process too, and are not inherited by forked workers.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=0.0, isolation_level=None)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("CREATE TABLE IF NOT EXISTS holder (pid INTEGER, host TEXT)")
            self._connection.execute("DELETE FROM holder")
            self._connection.execute("INSERT INTO holder VALUES (?, ?)", (os.getpid(), socket.gethostname()))
            self._connection.execute("COMMIT")
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            who = self._holder()
            self._connection.close()
            if "locked" not in str(error):
                raise RunError(f"cannot lock {path}: {error}") from error
            raise RunError(f"{who} is already training in {path.parent}: wait for it, stop it, or choose another folder") from error

    def _holder(self) -> str:
        try:
            row = self._connection.execute("SELECT pid, host FROM holder").fetchone()
        except sqlite3.Error:
            row = None
        return f"process {row[0]} on {row[1]}" if row else "another process"

    def release(self) -> None:
        self._connection.close()
