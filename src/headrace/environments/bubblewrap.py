"""CPython in a bubblewrap jail, one process per episode. ``python_sandbox`` says what the jail covers and what it does not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.environments._daemon_threads import DaemonThreads
from headrace.environments._line_process import ChildDied, ChildTooSlow, LineProcess
from headrace.environments.sandbox_results import Limit, Limits, SandboxUnavailable, ToolResult, short_traceback, shorten

_WORKER = "/worker.py"
_SCRATCH_BYTES = 64 * 2**20
_FLOOD_CHARS = 256 * 1024
_START_SECONDS = 30.0
_GRACE_SECONDS = 1.0  # after the alarm inside, before the jail is killed
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_VARIABLES = (("PATH", "/usr/bin"), ("HOME", "/tmp"), ("LANG", "C.UTF-8"), ("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"))
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

_threads = DaemonThreads(min(32, 4 * (os.cpu_count() or 1)), "headrace-python-jail")
# Jails die with the thread that started them (the kernel's parent-death signal), so one lasting thread starts all of them.
_starter = DaemonThreads(1, "headrace-python-jail-starter")


def jail_command(program: str, *arguments: str) -> list[str]:
    """The command line that runs ``program`` in an empty machine with a read-only system and this environment's Python."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable(
            'python = "cpython" needs the program bwrap, which is not installed: install the package bubblewrap, or use python = "monty".'
        )
    command = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--uid", "65534", "--gid", "65534", "--hostname", "jail"]
    for name, value in _VARIABLES:
        command += ["--setenv", name, value]
    for path in (*_SYSTEM, *sorted({sys.base_prefix, sys.prefix})):
        if os.path.lexists(path):
            command += ["--ro-bind", path, path]
    for device in _DEVICES:
        command += ["--dev-bind-try", device, device]
    command += ["--proc", "/proc", "--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--ro-bind", str(Path(__file__).with_name("_sandbox_worker.py")), _WORKER, "--remount-ro", "/"]
    return [*command, "--", program, *arguments]


@lru_cache(maxsize=1)
def require_bubblewrap() -> None:
    """Raise ``SandboxUnavailable``, with what to do, unless a jail can be started on this machine."""
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable('python = "cpython" needs Linux: use python = "monty" here.')
    command = jail_command(sys.executable, "-I", "-S", "-c", "print('ready')")
    try:
        trial = subprocess.run(command, capture_output=True, text=True, timeout=_START_SECONDS, env={}, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f'bwrap does not run here ({error}): use python = "monty".') from None
    if trial.stdout.strip() != "ready":
        why = (trial.stderr.strip().splitlines() or ["no message"])[-1]
        raise SandboxUnavailable(
            f'bwrap cannot make a jail here ({why}); it needs permission for user namespaces. Use python = "monty", or allow them.'
        )


class JailProcess(LineProcess):
    """bwrap with the jail's first process as its child.

    Killing that child ends everything in the jail, and bwrap reaps it and ends too. Killing bwrap first would leave the
    child's remains to the machine's first process, which in containers often does not collect them.
    """

    def signal_kill(self) -> None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with contextlib.suppress(OSError, ValueError):
            for child in children.read_text().split() if self.alive() else ():
                os.kill(int(child), signal.SIGKILL)
            if self.ends_within(2.0):
                return
        super().signal_kill()


class JailEpisode:
    """One jail, started at the first call and killed whole at the end, or when a call has to be stopped."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self._limits, self._seed = limits, seed
        self._lock = threading.Lock()
        self._child: JailProcess | None = None
        self._calls = 0
        self._closed = False

    @property
    def threads(self) -> Executor:
        return _threads

    def close(self) -> None:
        """Kill the jail. A call in progress on another thread ends at once, as a crash."""
        self._closed = True
        child = self._child
        if child is not None:
            child.signal_kill()
        with self._lock:
            if self._child is not None:
                self._child.kill()
            self._child = None

    def run(self, code: str) -> ToolResult:
        with self._lock:
            started = time.monotonic()
            try:
                reply = self._ask(code)
                result = self._result(reply, code)
            except ChildTooSlow:
                result = self._lost("time")
            except (ChildDied, TimeoutError, KeyError, TypeError, ValueError):  # the reply may come from the jailed code itself
                result = self._lost("crash")
            return result.took(time.monotonic() - started)

    def _ask(self, code: str) -> Any:
        if self._closed:
            raise ChildDied("the episode is over")
        if self._child is None:
            self._child = _starter.submit(JailProcess, jail_command(sys.executable, "-I", "-B", _WORKER)).result(_START_SECONDS)
            self._child.request({"memory_mb": self._limits.memory_mb, "seed": self._seed}, _START_SECONDS)
        self._calls += 1
        limits = self._limits
        request = {"code": code, "call": self._calls, "seconds": limits.seconds, "output_chars": limits.output_chars}
        return self._child.request(request | {"flood_chars": _FLOOD_CHARS}, limits.seconds + _GRACE_SECONDS)

    def _result(self, reply: Any, code: str) -> ToolResult:
        printed, value, message, limit = str(reply["printed"]), str(reply["value"]), reply["message"], reply["limit"]
        output = shorten("\n".join(part for part in (printed.rstrip("\n"), value) if part), self._limits.output_chars)
        if limit in ("time", "output", "memory"):
            return ToolResult(output, self._limits.sentence(limit, "What was assigned before is kept."), limit=limit)
        if message is None:
            return ToolResult(output, None)
        frames = [(int(line), str(function), bool(in_code)) for line, function, in_code in reply["frames"]]
        return ToolResult(output, shorten(short_traceback(frames, str(message), code), self._limits.error_chars))

    def _lost(self, limit: Limit) -> ToolResult:
        if self._child is not None:
            self._child.kill()
            self._child = None
        return ToolResult("", self._limits.sentence(limit, "All variables are lost."), limit=limit)
