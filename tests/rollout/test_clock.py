"""The end of a run's event loop, and where it may not begin."""

import asyncio
import contextlib
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
