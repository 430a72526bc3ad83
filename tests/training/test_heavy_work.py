"""Heavy work stays on one thread, is waited for, and leaves no memory behind."""

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.training.heavy_work import WorkThread, give_back_memory


def test_all_work_is_done_by_one_thread_in_order():
    async def main():
        thread = WorkThread("test")
        done = []
        works = [lambda n=n: (done.append(n), threading.get_ident())[1] for n in range(20)]
        idents = await asyncio.gather(*(thread.run(work) for work in works))
        thread.close()
        return done, set(idents)

    done, idents = asyncio.run(main())
    assert done == list(range(20)) and len(idents) == 1 and threading.get_ident() not in idents


def test_an_error_of_the_work_reaches_whoever_waits():
    async def main():
        thread = WorkThread("test")
        try:
            await thread.run(lambda: 1 // 0)
        finally:
            thread.close()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_cancelled_work_is_waited_for():
    ended = []

    async def main():
        thread = WorkThread("test")
        task = asyncio.create_task(thread.run(lambda: (time.sleep(0.2), ended.append(True))))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]
        thread.close()

    asyncio.run(main())


def resident_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_freed_memory_goes_back_to_the_system():
    small = [torch.ones(20_000) for _ in range(2_500)]  # 200 MB in pieces that the C library keeps
    pins = [torch.ones(16) for _ in range(100)]
    full = resident_megabytes()
    small.clear()
    give_back_memory()
    assert len(pins) == 100 and resident_megabytes() < full - 150
