"""Python in pydantic-monty's worker processes: a few processes shared by any number of episodes.

An episode holds no process between its calls. Its variables are kept as the bytes of a session dump, loaded into any free
worker for the next call. A call that breaks a limit is undone: the next one starts from the dump before it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, ClassVar

from headrace.environments._daemon_threads import DaemonThreads
from headrace.environments._last_expression import show_last_expression
from headrace.environments.sandbox_results import Limit, Limits, SandboxUnavailable, ToolResult, short_traceback, shorten

_RECURSION = 300  # frames of sandbox code
_GRACE_SECONDS = 1.0
_FLOOD_BYTES = 256 * 1024  # printed text beyond this ends the call
_SESSIONS_PER_WORKER = 500  # then the process is replaced, so that nothing can build up in it
_VALUE = "_"


class MontyPool:
    """The worker processes of this process, made on first use and shared by all sandboxes with the same time limit."""

    _pools: ClassVar[dict[tuple[int, float, int], MontyPool]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def shared(cls, seconds: float, workers: int) -> MontyPool:
        key = (os.getpid(), seconds, workers)
        with cls._lock:
            if key not in cls._pools:
                cls._pools[key] = cls(seconds, workers)
                atexit.register(cls._pools[key].close)
            return cls._pools[key]

    def __init__(self, seconds: float, workers: int) -> None:
        try:
            import pydantic_monty
        except ImportError:
            raise SandboxUnavailable(
                "The Python tool runs in pydantic-monty, which is not installed: run `pip install 'headrace[math]'`."
            ) from None
        self.library: Any = pydantic_monty
        self._owner = os.getpid()
        self._prepared: set[int] = set()
        self.threads = DaemonThreads(workers, "headrace-python-tool")
        self._pool = pydantic_monty.Monty(
            min_processes=0,
            max_processes=workers,
            checkout_timeout=120.0,
            request_timeout=seconds + 30.0,
            max_checkouts_per_worker=_SESSIONS_PER_WORKER,
            feed_duration_limit_grace=_GRACE_SECONDS,
        )
        self._pool.__enter__()

    def close(self) -> None:
        """End the workers, those in the middle of a call too: the library's own ending would wait for them."""
        if os.getpid() == self._owner:  # a forked child must not stop its parent's workers
            for pid in self._prepared:
                if _is_child(pid):
                    _kill(pid)
            self._pool.__exit__(None, None, None)

    def checkout(self, limits: Limits, seed: int) -> Any:
        return self._pool.checkout(
            limits={
                "max_feed_duration_secs": limits.seconds,
                "max_memory": limits.memory_mb * 2**20,
                "max_recursion_depth": _RECURSION,
            },
            os_policy={"sleep": "zero", "random_start": {"seed": seed}},
            assert_message_annotations=False,
        )

    def prepare(self, pid: int | None, limits: Limits) -> None:
        """Once per worker process: low priority, so that it never slows the trainer, and a hard limit on its address space."""
        if pid is None or pid in self._prepared or sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 5)
            ceiling = (1024 + 4 * limits.memory_mb) * 2**20
            resource.prlimit(pid, resource.RLIMIT_AS, (ceiling, ceiling))
        self._prepared.add(pid)


class MontyEpisode:
    """One episode's Python; see the module's docstring."""

    def __init__(self, limits: Limits, seed: int, workers: int) -> None:
        self._limits, self._seed = limits, seed
        self._pool = MontyPool.shared(limits.seconds, workers)
        self._state: bytes | None = None

    @property
    def threads(self) -> Executor:
        return self._pool.threads

    def close(self) -> None:
        self._state = None

    def run(self, code: str) -> ToolResult:
        started = time.monotonic()
        library = self._pool.library
        printed = library.CollectString(max_bytes=_FLOOD_BYTES)
        try:
            with self._pool.checkout(self._limits, self._seed) as session:
                result = self._run_in(session, code, printed)
        except TimeoutError:
            result = ToolResult("", self._limits.sentence("busy", "This call did not run; try again."), limit="busy")
        except library.MontyCrashedError as crash:
            result = self._undone("time" if crash.timed_out else "crash", printed.output)
        except library.MontyError:
            result = self._undone("crash", printed.output)
        return result.took(time.monotonic() - started)

    def _run_in(self, session: Any, code: str, printed: Any) -> ToolResult:
        pid = session.worker_pid
        self._pool.prepare(pid, self._limits)
        if self._state is not None:
            session.load_session(self._state)
        value, error = "", None
        try:
            value = session.feed_run(self._with_value_shown(code), print_callback=printed) or ""
        except (self._pool.library.MontyRuntimeError, self._pool.library.MontySyntaxError) as failure:
            limit = _broken_limit(failure)
            if limit is not None:
                _kill(pid)
                return self._undone(limit, printed.output)
            error = shorten(_describe(failure, code), self._limits.error_chars)
        state = session.dump()
        if len(state) > self._limits.state_mb * 2**20:
            return self._undone("state", printed.output)
        self._state = state
        output = "\n".join(part for part in (printed.output.rstrip("\n"), value) if part)
        return ToolResult(shorten(output, self._limits.output_chars), error)

    def _with_value_shown(self, code: str) -> str:
        """The value is turned into text, and cut, inside the sandbox: a small program can build a value of exponential size."""
        shown = f'None if {_VALUE} is None else f"{{{_VALUE}!r:.{self._limits.output_chars + 1}}}"'
        return show_last_expression(code, _VALUE, shown)

    def _undone(self, limit: Limit, printed: str) -> ToolResult:
        sentence = self._limits.sentence(limit, "Variables are as before this call.")
        return ToolResult(shorten(printed, self._limits.output_chars), sentence, limit=limit)


def _broken_limit(failure: Any) -> Limit | None:
    """Which resource limit a Monty error reports; ``None`` for an ordinary exception of the code."""
    inner, text = failure.exception(), str(failure)
    if isinstance(inner, TimeoutError) and "time limit" in text:
        return "time"
    if isinstance(inner, MemoryError) and ("limit" in text):
        return "output" if f"> {_FLOOD_BYTES} bytes" in text else "memory"
    return None


def _describe(failure: Any, code: str) -> str:
    frames: Sequence[Any] = failure.traceback() if hasattr(failure, "traceback") else ()
    message = failure.display("type-msg") if hasattr(failure, "traceback") else str(failure)
    here = frames[0].filename if frames else ""
    return short_traceback([(frame.line, frame.function_name, frame.filename == here) for frame in frames], message, code)


def _is_child(pid: int) -> bool:
    """Whether the process is (still) one of ours: ids of processes that have ended are used again."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1]) == os.getpid()
    except (OSError, ValueError, IndexError):
        return False


def _kill(pid: int | None) -> None:
    """A worker that hit a limit is not used again: with it go its heap and whatever it was doing."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
