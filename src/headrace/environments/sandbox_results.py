"""What a run of sandboxed Python gives back, its limits, and how it is shortened for a model to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Limit = Literal["time", "memory", "output", "state", "code", "crash", "busy"]


class SandboxUnavailable(RuntimeError, ValueError):
    """The chosen way of running Python does not exist on this machine; the message says what to do.

    A ``ValueError`` too: options that cannot be met here are wrong options.
    """


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``output``: what was printed, then the value of a last expression. ``error``: a short traceback, or which limit was hit.

    Both can be there: text printed before an exception. ``limit`` names the limit that ended the call, if one did.
    ``seconds`` is wall-clock time and therefore not reproducible; it is never shown to a model.
    """

    output: str
    error: str | None
    limit: Limit | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Output and error as one text; empty if there is neither."""
        return "\n".join(part for part in (self.output, self.error) if part)

    def took(self, seconds: float) -> ToolResult:
        return replace(self, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Limits:
    """``seconds`` of one call; ``memory_mb`` of its heap; characters of output, error and code; ``state_mb`` of kept variables."""

    seconds: float = 5.0
    memory_mb: int = 128
    output_chars: int = 2_000
    error_chars: int = 600
    code_chars: int = 20_000
    state_mb: int = 16

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "output_chars", "error_chars", "code_chars", "state_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"the Python tool's {name} must be above 0, not {getattr(self, name)!r}")

    def sentence(self, limit: Limit, aftermath: str) -> str:
        reason = {
            "time": f"TimeoutError: stopped after {self.seconds:g} s.",
            "memory": f"MemoryError: stopped at {self.memory_mb} MB.",
            "output": "OutputError: stopped, too much was printed.",
            "state": f"MemoryError: the variables take more than {self.state_mb} MB.",
            "code": f"CodeError: the code is longer than {self.code_chars} characters.",
            "crash": "CrashError: the Python process died.",
            "busy": "BusyError: no Python process was free.",
        }[limit]
        return f"{reason} {aftermath}"


def shorten(text: str, limit: int) -> str:
    """``text`` cut to ``limit`` characters in its middle, saying how much is missing."""
    if len(text) <= limit:
        return text
    note = f"\n... [{len(text) - limit} characters left out] ...\n"
    kept = max(limit - len(note), 0)
    head = (kept + 1) // 2
    return (text[:head] + note + text[len(text) - (kept - head) :])[: max(limit, len(note))]


def short_traceback(frames: Sequence[tuple[int, str | None, bool]], message: str, code: str, most: int = 3) -> str:
    """The innermost frames, one line each, and the exception.

    A frame is (line number, function, whether it lies in ``code`` rather than in an earlier call).
    """
    lines = code.splitlines()
    shown = [f"... {len(frames) - most} more" if len(frames) > most else ""]
    for number, function, in_code in frames[-most:]:
        source = lines[number - 1].strip()[:80] if in_code and 0 < number <= len(lines) else ""
        where = f"line {number}" + (f" in {function}" if function and function != "<module>" else "")
        shown.append(f"{where}: {source}" if source else where)
    return "\n".join([line for line in shown if line] + [message.strip()])
