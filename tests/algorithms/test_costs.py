"""Time and memory at the size that the benchmark measures: 1,024 trajectories of 4,096 tokens."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms import EventTimeMemory

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "objectives.py"
SHAPE = (1024, 4096)


@pytest.fixture(scope="module", name="benchmark")
def load_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_objectives", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_every_objective_stays_far_below_its_limits_of_time_and_memory(benchmark: Any) -> None:
    """CPU time, since a test machine is shared; memory in a child process, as the benchmark takes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batch = benchmark.make_batch(*SHAPE)
        for name, (objective, measure) in benchmark.OBJECTIVES.items():
            _, seconds = benchmark.measure_time(benchmark.headrace_forward(batch, objective, measure), batch.logprobs, repeats=1)
            assert seconds < 2, f"{name}: {seconds:.2f} CPU seconds"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc, which only Linux has")
def test_peak_memory_is_below_four_tensors_forward_and_eight_with_backward(benchmark: Any) -> None:
    for (name, _), (forward, backward) in benchmark.memory_in_a_child(*SHAPE, own_only=True).items():
        assert forward < 4, f"{name}: {forward:.1f} tensors in the forward pass"
        assert backward < 8, f"{name}: {backward:.1f} tensors with the backward pass"


def test_a_record_and_a_read_take_microseconds_at_a_hundred_thousand_tasks() -> None:
    memory = EventTimeMemory()
    names = [f"task-{i}" for i in range(100_000)]
    start = time.process_time()
    for event in range(200_000):
        memory.record(names[event % 100_000], 1.0, version=event // 100_000, event=event)
    recorded = time.process_time()
    for name in names:
        memory.read(name, 5)
    read = time.process_time()
    assert (recorded - start) / 200_000 < 50e-6
    assert (read - recorded) / 100_000 < 50e-6
