"""The Python tool: code written by a model runs here, away from the trainer.

Two ways of running it, both with limits on time, memory and output, both keeping variables within an episode:

**"monty"** (default). A Python interpreter written for this purpose (pydantic-monty), in a few worker processes shared by
all episodes. It has no file system, network, environment, processes or C extensions to begin with, so there is nothing to
escape into; a worker that crashes, hangs or outgrows its limits is killed and replaced. It covers functions, simple
classes, comprehensions, exceptions, big integers, and of the library: math, itertools, functools, collections, re, json,
random, decimal, datetime, bisect, dataclasses, typing, hashlib, base64, csv. It does not cover: numpy, sympy, fractions,
statistics and other modules; ``yield``, ``del``, class inheritance, ``from x import *``, ``pow(a, -1, m)``. A call that
breaks a limit is undone: variables are as before it. ``random`` is seeded; ``time.sleep`` returns at once.

**"cpython"**. The full CPython of this environment, with numpy and sympy if they are installed, in a bubblewrap jail of
its own per episode: own process, network, user and mount namespaces, nothing visible but the read-only system and Python,
64 MB of scratch space in /tmp, an empty environment, no new processes or threads. It needs Linux, the program ``bwrap``
(Debian package bubblewrap) and permission to make user namespaces; where one is missing it is refused with a sentence.
It does not protect against holes in the kernel. A call that has to be killed loses the variables, and says so.

Neither limits how much of a core a call uses within its time; both run at low priority, behind the trainer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Literal, Protocol

from headrace.environments.sandbox_results import Limits, SandboxUnavailable, ToolResult

__all__ = ["Limits", "PythonSandbox", "SandboxUnavailable", "ToolResult"]

QUEUE_SECONDS = 60.0  # a call that has waited this long for a free process is refused


class Episode(Protocol):
    """One episode's Python, with its variables. ``threads`` are those on which waiting for it may block."""

    @property
    def threads(self) -> Executor: ...

    def run(self, code: str) -> ToolResult: ...

    def close(self) -> None: ...


class PythonSandbox:
    """Python with variables that last until ``reset``. ``run`` never raises for anything the code does.

    One sandbox serves one episode at a time (calls of one sandbox are not concurrent); any number of sandboxes may run at
    once. ``workers`` is how many processes the default backend shares among all of them.
    """

    def __init__(
        self,
        backend: Literal["monty", "cpython"] = "monty",
        *,
        seconds: float = 5.0,
        memory_mb: int | None = None,
        output_chars: int = 2_000,
        error_chars: int = 600,
        code_chars: int = 20_000,
        state_mb: int = 16,
        seed: int = 0,
        workers: int | None = None,
    ) -> None:
        default_memory = 128 if backend == "monty" else 1_024
        self.limits = Limits(seconds, default_memory if memory_mb is None else memory_mb, output_chars, error_chars, code_chars, state_mb)
        self._start = _starter(backend, self.limits, seed, workers or min(4, os.cpu_count() or 1))
        self._episode = self._start()

    def run(self, code: str) -> ToolResult:
        """Run ``code`` and wait for it."""
        refusal = self._refuse(code)
        return refusal or self._episode.run(code)

    async def run_async(self, code: str) -> ToolResult:
        """``run`` without blocking the event loop."""
        refusal = self._refuse(code)
        if refusal:
            return refusal
        episode, queued = self._episode, time.monotonic()  # a reset while this waits must not hand it the next episode's variables

        def run_queued() -> ToolResult:
            waited = time.monotonic() - queued
            if waited > QUEUE_SECONDS:
                return ToolResult("", self.limits.sentence("busy", "This call did not run; try again."), limit="busy", seconds=waited)
            return episode.run(code)

        return await asyncio.get_running_loop().run_in_executor(episode.threads, run_queued)

    def _refuse(self, code: str) -> ToolResult | None:
        if len(code) > self.limits.code_chars:
            return ToolResult("", self.limits.sentence("code", "It did not run."), limit="code")
        try:
            code.encode()
        except UnicodeEncodeError:
            return ToolResult("", "SyntaxError: the code contains characters that are not text.")
        return None

    def reset(self) -> None:
        """Forget all variables: the next call starts a new episode."""
        self._episode.close()
        self._episode = self._start()

    def close(self) -> None:
        """Give back what the sandbox holds."""
        self._episode.close()

    def __enter__(self) -> PythonSandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _starter(backend: str, limits: Limits, seed: int, workers: int) -> Callable[[], Episode]:
    if backend == "monty":
        from headrace.environments._monty_backend import MontyEpisode

        return lambda: MontyEpisode(limits, seed, workers)
    if backend == "cpython":
        from headrace.environments.bubblewrap import JailEpisode, require_bubblewrap

        require_bubblewrap()
        return lambda: JailEpisode(limits, seed)
    raise ValueError(f'the Python tool runs in "monty" or "cpython", not in {backend!r}')
