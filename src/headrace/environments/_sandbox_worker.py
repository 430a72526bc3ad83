"""The process inside the jail: it limits itself, then runs one JSON request a line and answers with one JSON line.

Run by file path, it imports nothing of the project. Everything before the first request is trusted; nothing after it is.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import io
import json
import os
import platform
import random
import resource
import signal
import struct
import sys
import traceback
from typing import Any

# System calls that code in the jail does without: starting processes or threads, tracing, sockets, mounts, namespaces, kernel
# keys, and memory that no address-space limit counts. Number on (x86_64, aarch64), from the kernel's tables; -1: not there.
_CALLS = {
    "fork": (57, -1), "vfork": (58, -1), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203),
    "mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "unshare": (272, 97), "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "mq_open": (240, 180), "init_module": (175, 105), "finit_module": (313, 273),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CLONE3 = 435  # answered "no such call", so that the C library falls back to clone, which is refused properly
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38


class TimeUp(BaseException):
    """Raised in the running code by the alarm."""


class TooMuchOutput(BaseException):
    """Raised by printing."""


class BoundedOutput(io.TextIOBase):
    def __init__(self, most: int) -> None:
        self.parts: list[str] = []
        self.left = most

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.parts.append(text[: max(self.left, 0)])
        self.left -= len(text)
        if self.left < 0:
            raise TooMuchOutput
        return len(text)


def _statement(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def seccomp_program(architecture: int, blocked: tuple[int, ...]) -> bytes:
    """A classic BPF filter: kill on a foreign architecture, refuse the blocked calls, allow the rest."""
    load, jump_equal, jump_at_least, give = 0x20, 0x15, 0x35, 0x06
    program = [_statement(load, 4), _statement(jump_equal, architecture, 1, 0), _statement(give, _KILL), _statement(load, 0)]
    program += [_statement(jump_at_least, 0x40000000, 0, 1), _statement(give, _ERRNO | _EPERM)]
    program += [_statement(jump_equal, _CLONE3, 0, 1), _statement(give, _ERRNO | _ENOSYS)]
    for number in blocked:
        program += [_statement(jump_equal, number, 0, 1), _statement(give, _ERRNO | _EPERM)]
    return b"".join([*program, _statement(give, _ALLOW)])


def install_seccomp() -> bool:
    """Refuse the blocked system calls from here on, for good; ``False`` where this machine's table is not known."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    architecture, column = _ARCHITECTURES[platform.machine()]
    program = seccomp_program(architecture, tuple(numbers[column] for numbers in _CALLS.values() if numbers[column] >= 0))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges = libc.prctl(38, 1, 0, 0, 0) == 0
    return no_new_privileges and bool(libc.prctl(22, 2, header, 0, 0) == 0)


def limit_self(memory_bytes: int) -> None:
    os.nice(5)
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 16 * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))


def run(code: str, scope: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Execute ``code`` in ``scope``: what it printed, the text of its last expression, the frames and message of its exception."""
    printed = BoundedOutput(request["flood_chars"])
    reply: dict[str, Any] = {"value": "", "message": None, "frames": [], "limit": None}
    name = f"<call {request['call']}>"
    sys.stdout = sys.stderr = printed
    try:
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
            scope["_"] = value
            reply["value"] = "" if value is None else repr(value)[: request["output_chars"] + 1]
    except TimeUp:
        reply["limit"] = "time"
    except TooMuchOutput:
        reply["limit"] = "output"
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply["message"], reply["frames"] = describe(error, name)
        reply["limit"] = "memory" if isinstance(error, MemoryError) else None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    reply["printed"] = "".join(printed.parts)
    return reply


def describe(error: BaseException, name: str) -> tuple[str, list[tuple[int, str, bool]]]:
    """The exception's last line, cut, and its frames that lie in sandboxed code."""
    try:
        message = "".join(traceback.format_exception_only(error))
        message = message if len(message) <= 2000 else f"{message[:1000]}...{message[-1000:]}"
    except BaseException:
        message = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__, limit=-50)
    found = [(frame.lineno or 0, frame.name, frame.filename == name) for frame in frames if frame.filename.startswith("<call ")]
    if isinstance(error, SyntaxError) and error.filename == name:
        return f"SyntaxError: {error.msg}", [*found, (error.lineno or 0, "<module>", True)]
    return message, found


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)

    def alarm(signum: int, frame: object) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, alarm)
    limit_self(settings["memory_mb"] * 2**20)
    filtered = install_seccomp()
    random.seed(settings["seed"])
    replies.write(json.dumps({"ready": True, "filtered": filtered}) + "\n")
    replies.flush()
    scope: dict[str, Any] = {"__name__": "__main__"}
    for line in requests:
        request = json.loads(line)
        try:
            reply = run(request["code"], scope, request)
        except (TimeUp, MemoryError):
            reply = {"value": "", "printed": "", "message": None, "frames": [], "limit": "time"}
        replies.write(json.dumps(reply) + "\n")
        with contextlib.suppress(TimeUp):
            replies.flush()


if __name__ == "__main__":
    main()
