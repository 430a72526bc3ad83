"""A child process that answers one JSON line with one JSON line, by a deadline or not at all.

The child runs in its own session with an almost empty environment, so that nothing of the parent's leaks into it, and
its whole process group can be killed. Whatever goes wrong, the child is dead and reaped when ``request`` raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

MAX_REPLY_BYTES = 4 * 1024 * 1024


class ChildDied(Exception):
    """The child ended, or answered with something that is no line of JSON."""


class ChildTooSlow(Exception):
    """The child did not answer by the deadline and was killed."""


class LineProcess:
    """One child; not thread-safe: its owner hands it to one caller at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the child to end by itself."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def request(self, message: Any, seconds: float) -> Any:
        """Send ``message``, return the reply. Raises ``ChildTooSlow`` after ``seconds`` and ``ChildDied`` at its end."""
        deadline = time.monotonic() + seconds
        try:
            self._write((json.dumps(message) + "\n").encode(), deadline)
            return json.loads(self._read_line(deadline))
        except (OSError, ValueError) as error:
            self.kill()
            raise ChildDied(f"the process ended with status {self._process.returncode}") from error
        except BaseException:
            self.kill()
            raise

    def _wait_for(self, fd: int, writing: bool, deadline: float) -> None:
        left = deadline - time.monotonic()
        poller = select.poll()
        poller.register(fd, select.POLLOUT if writing else select.POLLIN)
        if left <= 0 or not poller.poll(left * 1000):
            raise ChildTooSlow

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait_for(self._stdin, True, deadline)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._stdin, view) :]

    def _read_line(self, deadline: float) -> bytes:
        received = bytearray()
        while not received.endswith(b"\n"):
            self._wait_for(self._stdout, False, deadline)
            try:
                chunk = os.read(self._stdout, 1 << 16)
            except BlockingIOError:
                continue
            received += chunk
            if not chunk or len(received) > MAX_REPLY_BYTES:
                raise OSError("no complete reply")
        return bytes(received)

    def signal_kill(self) -> None:
        """Kill the child's whole process group without reaping it; safe while another thread waits in ``request``."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the child's whole process group and reap the child."""
        self.signal_kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
