"""The end of a run's event loop, and where it may not begin."""

import asyncio
import contextlib
import threading
import time

import pytest

from headrace.rollout import clock


@pytest.mark.parametrize("simulated", [False, True])
def test_a_task_that_swallows_its_cancellation_does_not_keep_a_run_from_ending(simulated, monkeypatch):
    monkeypatch.setattr(clock, "GRACE", 0.1)

    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    async def main():
        kept.append(asyncio.ensure_future(stubborn()))
        await asyncio.sleep(0)
        return "done"

    kept = []
    began = time.monotonic()
    assert clock.run(main(), simulated=simulated) == "done"
    assert time.monotonic() - began < 10


def test_a_blocked_thread_does_not_keep_a_run_from_ending():
    import threading

    release = threading.Event()

    async def main():
        blocked = asyncio.ensure_future(asyncio.to_thread(release.wait))
        await asyncio.sleep(0.01)
        blocked.cancel()
        return "done"

    try:
        assert clock.run(main()) == "done"
    finally:
        release.set()


def test_inside_a_running_loop_it_is_refused():
    async def inner():
        return 1

    async def main():
        with pytest.raises(RuntimeError, match="already running"):
            clock.run(inner())

    asyncio.run(main())


def test_simulated_time_stands_still_while_a_thread_works():
    async def main():
        loop = asyncio.get_running_loop()
        other = asyncio.create_task(asyncio.sleep(5.0))
        async with asyncio.timeout(1.0):
            await asyncio.to_thread(time.sleep, 0.05)
        took = loop.time()
        await other
        return took, loop.time()

    assert clock.run(main(), simulated=True) == (0.0, 5.0)


def test_a_thread_that_gives_no_sign_does_not_hold_simulated_time_for_ever(monkeypatch):
    monkeypatch.setattr(clock, "PATIENCE", 0.05)
    free = threading.Event()

    async def main():
        try:
            async with asyncio.timeout(60.0):
                await asyncio.to_thread(free.wait, 20.0)
        except TimeoutError:
            return asyncio.get_running_loop().time()
        finally:
            free.set()

    assert clock.run(main(), simulated=True) == 60.0
