"""Time and memory of normalization plus objective, forward and backward, with TRL's loss beside it where it has one.

    python benchmarks/objectives.py [--sequences 1024] [--tokens 4096] [--threads 2] [--repeats 5]

Times are medians. Memory is the growth of a process's peak resident size over what the inputs occupy, in units of one float32 tensor of
the batch's shape; it is taken in a child process whose allocator returns large blocks at once (Linux only: the peak is reset through
/proc/self/clear_refs).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms import CISPO, GMPO, GSPO, SAPO, SSPO, Clip, Objective, normalize

MAX_LEN = 4096
OBJECTIVES: dict[str, tuple[Objective, str]] = {
    "clip, dual (spo++)": (Clip(dual=2.0), "action-token"),
    "clip (dapo)": (Clip(), "group"),
    "clip (grpo)": (Clip(0.2, 0.2, reduction="sequence-mean"), "group"),
    "clip (dr_grpo)": (Clip(0.2, 0.2, reduction="fixed", max_len=MAX_LEN), "group-mean"),
    "cispo": (CISPO(), "group"),
    "gspo": (GSPO(), "group"),
    "gmpo": (GMPO(), "group"),
    "sapo": (SAPO(), "group"),
    "sspo": (SSPO(), "group"),
    "sspo, ratio domain": (SSPO(domain="ratio"), "group"),
}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "clip (dapo)": {"loss_type": "dapo", "high": 0.28},
    "clip (grpo)": {"loss_type": "grpo"},
    "clip (dr_grpo)": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "high": 5.0},
    "gspo": {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
    "gmpo": {"loss_type": "grpo", "low": 0.4, "high": 0.4},
    "sapo": {"loss_type": "sapo"},
}


@dataclass
class Batch:
    """Inputs as a learner has them, with one group of 8 siblings per prompt."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    mask: Tensor
    outcomes: Tensor
    groups: Tensor


def make_batch(n: int, t: int) -> Batch:
    torch.manual_seed(0)
    old = torch.randn(n, t).mul_(0.5).sub_(1.0)
    logprobs = torch.randn(n, t).mul_(0.1).add_(old).requires_grad_()
    rollout = torch.randn(n, t).mul_(0.02).add_(old)
    lengths = torch.randint(t // 4, t + 1, (n, 1))
    return Batch(logprobs, old, rollout, torch.arange(t) < lengths, torch.randint(0, 2, (n,)).float(), torch.arange(n) // 8)


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yields a function: bytes by which the peak resident size has exceeded the starting size so far."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    start = _status("VmRSS")
    yield lambda: max(_status("VmHWM") - start, 0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_time(forward: Callable[[], Tensor], leaf: Tensor, repeats: int) -> tuple[float, float]:
    """Median seconds of forward plus backward: wall clock and CPU."""
    walls, cpus = [], []
    for _ in range(repeats + 1):
        leaf.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        forward().backward()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls[1:]), statistics.median(cpus[1:])  # the first run pays for warming up


def measure_memory(forward: Callable[[], Tensor], leaf: Tensor) -> tuple[float, float]:
    """Peak extra memory after forward and after backward, in float tensors of the leaf's shape."""
    forward().backward()  # what is loaded or cached once is not the batch's memory
    leaf.grad = None
    with peak_memory() as peak:
        loss = forward()
        after_forward = peak()
        loss.backward()
        return after_forward / (4 * leaf.numel()), peak() / (4 * leaf.numel())


def headrace_forward(batch: Batch, objective: Objective, measure_name: str) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        advantages = normalize(batch.outcomes, batch.mask.sum(1), measure_name, batch.groups)
        return objective(batch.logprobs, batch.old, advantages, batch.mask, batch.rollout).loss

    return forward


def trl_forward(batch: Batch, name: str) -> Callable[[], Tensor] | None:
    """TRL's own loss method on the same tensors: a stand-in trainer returns the log-probabilities instead of a model's."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.gmpo import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
    except ImportError:
        return None
    settings = TRL_SETTINGS[name]
    mask = batch.mask.long()
    entropies = torch.zeros_like(batch.old)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, entropies, None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        epsilon_high=settings.get("high", 0.2),
        epsilon_low=settings.get("low", 0.2),
        importance_sampling_level=settings.get("level", "token"),
        loss_type=settings["loss_type"],
        max_completion_length=MAX_LEN,
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
    )
    trainer = GMPOTrainer if name == "gmpo" else GRPOTrainer

    def forward() -> Tensor:
        grouped = batch.outcomes.view(-1, 8)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
        inputs = {
            "prompt_ids": mask[:, :0],
            "prompt_mask": mask[:, :0],
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": batch.old,
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": (batch.old - batch.rollout).exp().clamp(max=2.0),
        }
        loss = trainer._compute_loss(stand_in, None, inputs)
        assert isinstance(loss, Tensor)
        return loss

    return forward


Key = tuple[str, str]


def each(batch: Batch, own_only: bool = False) -> Iterator[tuple[Key, Callable[[], Tensor]]]:
    """Every (name, whose) with its forward function."""
    for name, (objective, measure_name) in OBJECTIVES.items():
        yield (name, "headrace"), headrace_forward(batch, objective, measure_name)
        theirs = trl_forward(batch, name) if name in TRL_SETTINGS and not own_only else None
        if theirs is not None:
            yield (name, "trl"), theirs


def memory_in_a_child(n: int, t: int, own_only: bool = False) -> dict[Key, tuple[float, float]]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 20)}
    command = [sys.executable, __file__, "--memory-child", "--sequences", str(n), "--tokens", str(t), *["--own-only"] * own_only]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {(name, whose): (forward, backward) for name, whose, forward, backward in json.loads(output)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--own-only", action="store_true", help="leave TRL out")
    parser.add_argument("--memory-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.memory_child else arguments.threads)
    n, t = arguments.sequences, arguments.tokens
    batch = make_batch(n, t)
    if arguments.memory_child:
        print(json.dumps([[*key, *measure_memory(forward, batch.logprobs)] for key, forward in each(batch, arguments.own_only)]))
        return 0
    times = {key: measure_time(forward, batch.logprobs, arguments.repeats) for key, forward in each(batch, arguments.own_only)}
    return report(times, memory_in_a_child(n, t, arguments.own_only), n, t, arguments.threads)


def report(times: dict[Key, tuple[float, float]], memory: dict[Key, tuple[float, float]], n: int, t: int, threads: int) -> int:
    print(f"{n} x {t} tokens, float32, {threads} threads, torch {torch.__version__}")
    print(
        "seconds of forward + backward (wall, CPU); peak extra memory in float tensors of the batch's shape (forward, then with backward)\n"
    )
    print("| objective | wall | CPU | forward | backward | TRL wall | TRL CPU | TRL forward | TRL backward |")
    print("| --- " * 9 + "|")
    over = []
    for name in OBJECTIVES:
        cells = []
        for key in ((name, "headrace"), (name, "trl")):
            cells += [f"{x:.2f}" for x in (*times[key], *memory[key])] if key in times else ["-"] * 4
        print("| " + " | ".join([name, *cells]) + " |")
        key = (name, "headrace")
        # On a machine of its own the wall clock is below CPU seconds; on a shared one it says how busy the others are.
        if min(times[key]) > 2 or memory[key][0] > 4 or memory[key][1] > 8:
            over.append(name)
    if over and (n, t) == (1024, 4096):
        print(f"\nover the limits (2 s, 4 and 8 tensors): {', '.join(over)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
