"""Real and simulated time.

Every wait of a run goes through the running event loop's clock, so a simulated loop is enough to put a whole run into
simulated time: ``run(main, simulated=True)`` runs it on an event loop whose clock stands still while anything is ready
and jumps to the next timer when every task waits. Real computation takes no simulated time by itself; whoever computes
charges its cost from a ``CostModel`` by awaiting ``charge``. While a thread works for the loop (a world's grader, its
tool) the clock stands still too: no deadline passes meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)
PATIENCE = 120.0
"""Real seconds for which simulated time stands still for threads that give no sign; after that deadlines pass."""
GRACE = 5.0
"""Seconds that cancelled tasks have at the end of a run."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What computation costs in simulated seconds; all zero in real time."""

    decode_token: float = 0.0
    prefill_token: float = 0.0
    generation_step: float = 0.0
    train_token: float = 0.0
    update: float = 0.0
    publication: float = 0.0
    environment_step: float = 0.0


class StuckError(RuntimeError):
    """Every task waits and no timer is set: in simulated time nothing can ever happen again."""


class _SimulatedSelector(selectors.BaseSelector):
    """A selector that never sleeps: where the loop would sleep until the next timer, the clock jumps there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads_at_work = 0
        self._inner = selectors.SelectSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if not ready and self.threads_at_work and (timeout is None or timeout > 0):
            ready = self._inner.select(PATIENCE)
        if ready:
            return ready
        if timeout is None:
            raise StuckError("simulated time: every task waits and no timer is set")
        if timeout > 0:
            self.now += timeout
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` is simulated seconds since its start."""

    def __init__(self) -> None:
        self._simulated = _SimulatedSelector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._simulated.threads_at_work += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: object) -> None:
        self._simulated.threads_at_work -= 1

    def restart(self) -> None:
        self._simulated.now = 0.0


def run(main: Coroutine[Any, Any, T], *, simulated: bool = False) -> T:
    """Run ``main`` to its end in real or simulated time, on an event loop of its own.

    What is left in the end is cancelled and waited for no longer than ``GRACE`` seconds: a world that swallows its
    cancellation, or blocks a thread, must not keep a finished run from ending.
    """
    if inside_a_loop():
        main.close()
        raise RuntimeError("an event loop is already running on this thread")
    runner = asyncio.Runner(loop_factory=SimulatedLoop if simulated else asyncio.new_event_loop)
    try:
        return runner.run(main)
    finally:
        _close(runner.get_loop())


def inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _close(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    try:
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=GRACE))
        for task in left:
            if not task.done():
                _log.warning("%s did not end when it was cancelled and is left behind", task.get_name())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def is_simulated() -> bool:
    return isinstance(asyncio.get_running_loop(), SimulatedLoop)


def restart() -> None:
    """Set a simulated clock back to zero while nothing waits for a time, so that what follows has the same times to the bit
    whatever came before; a real clock goes on."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, SimulatedLoop):
        loop.restart()


def now() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


async def charge(seconds: float) -> None:
    """Let ``seconds`` pass in simulated time; in real time computation has already taken its own time, so nothing is added."""
    if seconds > 0 and is_simulated():
        await asyncio.sleep(seconds)
    else:
        await asyncio.sleep(0)
