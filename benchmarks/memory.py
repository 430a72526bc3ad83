"""A memory of a million tasks and ten million outcomes: microseconds per read and record, bytes per outcome, seconds to save and load.

    python benchmarks/memory.py [--tasks 1000000] [--outcomes 10000000] [--saved 1000000]

Times are CPU time of one thread. Saving and loading go through JSON text on disk, for a memory with ``--saved`` retained outcomes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from headrace.algorithms import EventTimeMemory, prior_from_rollouts

SAMPLE = 200_000


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS (Linux only)")


def fill(memory: EventTimeMemory, names: list[str], outcomes: int, window: int) -> float:
    """Record ``outcomes`` in rounds over the tasks, with receipts out of order within ``window`` versions; CPU seconds."""
    rng = random.Random(0)
    n = len(names)
    # Drawn before, so that the clock sees the memory alone.
    lags = [rng.randrange(window) for _ in range(8191)]
    start = time.process_time()
    for event in range(outcomes):
        task = event % n
        version = event // n + lags[event % 8191]
        memory.record(names[task], float(event & 1), version=version, event=event)
    return time.process_time() - start


def microseconds(seconds: float, count: int) -> str:
    return f"{1e6 * seconds / count:.2f} us"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--outcomes", type=int, default=10_000_000)
    parser.add_argument("--saved", type=int, default=1_000_000)
    arguments = parser.parse_args()
    limits = [run_large(arguments.tasks, arguments.outcomes), run_busy(20_000), run_save(arguments.saved)]
    return 0 if all(limits) else 1


def run_large(tasks: int, outcomes: int) -> bool:
    names = [f"task-{i}" for i in range(tasks)]
    before = resident()
    memory = EventTimeMemory()
    start = time.process_time()
    for i, name in enumerate(names):
        memory.seed(name, prior_from_rollouts(i % 9, 8))
    seeded = time.process_time() - start
    recorded = fill(memory, names, outcomes, window=3)
    size = resident() - before
    newest = outcomes // tasks + 3
    rng = random.Random(1)
    asked = [names[rng.randrange(tasks)] for _ in range(SAMPLE)]
    start = time.process_time()
    for name in asked:
        memory.read(name, newest)
    read = time.process_time() - start
    print(f"{tasks:,} tasks, {outcomes:,} outcomes, {outcomes / tasks:.0f} retained per task")
    print(f"  seed    {microseconds(seeded, tasks)}")
    print(f"  record  {microseconds(recorded, outcomes)}")
    print(f"  read    {microseconds(read, SAMPLE)}")
    print(f"  size    {size / 2**30:.2f} GiB, {size / outcomes:.0f} bytes per outcome")
    return recorded / outcomes < 1e-5 and read / SAMPLE < 1e-4


def run_busy(publications: int) -> bool:
    """One task attempted at every version: it retains as many outcomes as can still count."""
    memory = EventTimeMemory()
    recorded = read = 0.0
    for version in range(publications):
        start = time.process_time()
        memory.record("task", 1.0, version=version, event=version)
        middle = time.process_time()
        memory.read("task", version)
        recorded, read = recorded + middle - start, read + time.process_time() - middle
    retained = len(memory.state_dict()["tasks"]["task"][1])
    print(f"one task, {publications:,} publications, {retained} retained")
    print(f"  record  {microseconds(recorded, publications)}")
    print(f"  read    {microseconds(read, publications)}")
    return recorded / publications < 1e-4 and read / publications < 1e-3


def run_save(retained: int) -> bool:
    tasks = max(retained // 10, 1)
    memory = EventTimeMemory()
    fill(memory, [f"task-{i}" for i in range(tasks)], retained, window=3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.json"
        start = time.process_time()
        path.write_text(json.dumps(memory.state_dict()))
        saved = time.process_time() - start
        start = time.process_time()
        restored = EventTimeMemory()
        restored.load_state_dict(json.loads(path.read_text()))
        loaded = time.process_time() - start
        size = path.stat().st_size
    same = restored.read("task-0", 100) == memory.read("task-0", 100) and len(restored) == tasks
    print(f"{retained:,} retained outcomes of {tasks:,} tasks")
    print(f"  save    {saved:.2f} s, {size / 2**20:.1f} MiB of JSON")
    print(f"  load    {loaded:.2f} s, {'same values' if same else 'DIFFERENT VALUES'}")
    return saved + loaded < 10 and same


if __name__ == "__main__":
    sys.exit(main())
