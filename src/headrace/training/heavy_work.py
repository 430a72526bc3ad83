"""Where a run's heavy work is done, and what becomes of the memory that it took.

glibc keeps memory that a thread freed for later use by that thread. Updates that wander over a pool's threads would leave
their peak behind once for each thread (with a model of 135 million parameters: gigabytes an hour). So one thread does all of
them, and what an earlier phase left behind on another thread is given back before training begins.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkThread:
    """One thread that works beside the event loop; it starts with the first work and must be closed."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"headrace-{name}")

    async def run(self, work: Callable[[], T]) -> T:
        """``work()``, after all earlier work. Cancelled, it is still waited for: whoever goes on must find nobody at work."""
        future = asyncio.wrap_future(self._thread.submit(work))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait((future,))
            raise

    def close(self) -> None:
        self._thread.shutdown()


def give_back_memory() -> None:
    """Return freed memory to the system where the C library can (glibc's ``malloc_trim``); elsewhere nothing happens."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
