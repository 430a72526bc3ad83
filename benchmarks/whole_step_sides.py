"""The trainers that ``whole_step.py`` compares; each runs in a process of its own and measures itself."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUP, LEARNING_RATE, WEIGHT_DECAY, BETAS = 8, 1e-6, 0.01, (0.9, 0.95)
STREAM_TASKS = 4
"""Times the samples of a step: single attempts are drawn among tasks that have none under way."""
WORLD = f"{Path(__file__).with_name('sums.py')}:world"


@dataclass(frozen=True)
class Setting:
    folder: str
    dtype: str
    samples: int
    steps: int
    rows: int
    """Samples in one forward and backward pass."""
    row_tokens: int
    """Of a prompt and a right reply."""
    reply_tokens: int
    """The limit."""


@dataclass(frozen=True)
class Measured:
    """One trainer, once. Memory in MiB; tokens and reward are means over the samples of the timed steps; ``generating`` is the share
    of wall time before a step's last sample is there (its world and reward included)."""

    imports: float
    loaded: float
    peak: float
    samples_per_second: float
    samples_per_cpu_second: float
    context_tokens: float
    reply_tokens: float
    reward: float
    generating: float


@dataclass
class Gauge:
    """Clocks and memory of this process and its children, read at the end of every step."""

    samples: int
    imports: float = 0.0
    loaded: float = 0.0
    peak: float = 0.0
    ends: list[tuple[float, float]] = field(default_factory=list)
    context_tokens: list[float] = field(default_factory=list)
    reply_tokens: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time() + sum(map(_cpu_seconds, _children()))))
        self.peak = sum(_memory("VmHWM", pid) for pid in ("self", *_children()))

    def result(self) -> Measured:
        (began, began_cpu), (ended, ended_cpu) = self.ends[0], self.ends[-1]
        samples = self.samples * (len(self.ends) - 1)
        means = (statistics.mean(values[1:]) for values in (self.context_tokens, self.reply_tokens, self.rewards))
        share = sum(self.generating[1:]) / (ended - began)
        return Measured(self.imports, self.loaded, self.peak, samples / (ended - began), samples / (ended_cpu - began_cpu), *means, share)


def _memory(what: str, pid: str = "self") -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/{pid}/status has no {what}")


def _children() -> list[str]:
    return [pid for thread in Path("/proc/self/task").iterdir() for pid in (thread / "children").read_text().split()]


def _cpu_seconds(pid: str) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


# --- Headrace ------------------------------------------------------------------------------------------------------------


def headrace_configuration(setting: Setting, stream: bool) -> dict[str, Any]:
    groups = setting.samples // GROUP
    return {
        "recipe": "spo++" if stream else "grpo",
        "environment": {"name": WORLD, "tasks": setting.samples * STREAM_TASKS if stream else groups},
        "policy": {"model": setting.folder, "dtype": setting.dtype, "device": "cpu"},
        "values": {"rollouts": 0},
        "engine": {"placement": "process" if stream else "local"},
        "rollout": {
            "batch_size": setting.samples,
            "concurrency": setting.samples,
            "max_staleness": 1 if stream else 0,
            "context_limit": setting.row_tokens + setting.reply_tokens,
            "reply_tokens": setting.reply_tokens,
        },
        "learner": {
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "betas": BETAS,
            "max_tokens": setting.rows * setting.row_tokens,
        },
        "evaluation": {"attempts": 0},
        "run": {"updates": setting.steps + 1, "checkpoint_every": setting.steps + 1, "threads": 1},
    }


def by_headrace(setting: Setting, stream: bool) -> Measured:
    from headrace.config import parse
    from headrace.records.metrics import UpdateMetrics
    from headrace.training.observer import Silent
    from headrace.training.run import train

    gauge = Gauge(setting.samples, imports=_memory("VmRSS"))

    class Watch(Silent):
        def note(self, text: str) -> None:
            if text.startswith("policy:"):
                gauge.loaded = _memory("VmRSS")

        def update(self, metrics: UpdateMetrics) -> None:
            gauge.step()
            gauge.context_tokens.append(metrics.trained_tokens / metrics.attempts + 1)  # the last is not fed
            gauge.reply_tokens.append(metrics.sampled_tokens / metrics.attempts)
            gauge.rewards.append(metrics.reward)
            gauge.generating.append(metrics.waiting_seconds)

    with tempfile.TemporaryDirectory() as scratch:
        train(parse(headrace_configuration(setting, stream)), out=Path(scratch) / "run", observer=Watch())
    return gauge.result()


# --- TRL -----------------------------------------------------------------------------------------------------------------


def trl_arguments(setting: Setting, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": setting.dtype == "bfloat16",
        "max_steps": setting.steps + 1,
        "per_device_train_batch_size": setting.rows,
        "gradient_accumulation_steps": setting.samples // setting.rows,
        "num_generations": GROUP,
        "max_completion_length": setting.reply_tokens,
        "loss_type": "grpo",
        "beta": 0.0,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "activation_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def by_trl(setting: Setting, autocast: bool) -> Measured:
    import sums
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.disable_progress_bar()
    gauge = Gauge(setting.samples, imports=_memory("VmRSS"))
    dtype = torch.float32 if autocast else getattr(torch, setting.dtype)
    model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(setting.folder)
    gauge.loaded = _memory("VmRSS")

    def reward(completions: Any, completion_ids: Any, terms: Any, **_: Any) -> list[float]:
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        replies = [message[0]["content"] for message in completions]
        return [sums.outcome(those, reply) if whole else 0.0 for those, reply, whole in zip(terms, replies, ended, strict=True)]

    generate: Any = model.generate

    def timed(*positional: Any, **named: Any) -> Any:
        began = time.perf_counter()
        replies = generate(*positional, **named)
        gauge.generating.append(time.perf_counter() - began)
        return replies

    model.generate = timed  # type: ignore[method-assign]

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gauge.step()

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(**trl_arguments(setting, scratch)),
            train_dataset=Dataset.from_list(sums.rows(setting.samples // GROUP)),
            processing_class=tokenizer,
            callbacks=[Watch()],
        )
        trainer.train()
    seen = 0.0
    for row in trainer.state.log_history[: setting.steps + 1]:
        gauge.context_tokens.append((row["num_tokens"] - seen) / setting.samples)
        gauge.reply_tokens.append(row["completions/mean_length"])
        gauge.rewards.append(row["reward"])
        seen = row["num_tokens"]
    return gauge.result()


SIDES: Mapping[str, Callable[[Setting], Measured]] = {
    "headrace": lambda setting: by_headrace(setting, stream=False),
    "headrace stream": lambda setting: by_headrace(setting, stream=True),
    "trl": lambda setting: by_trl(setting, autocast=False),
    "trl autocast": lambda setting: by_trl(setting, autocast=True),
}


def run_side(side: str, setting: Setting) -> Measured:
    return SIDES[side](setting)
