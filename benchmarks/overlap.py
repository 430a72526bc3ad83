"""Engine and learner on two cores: what each loses when the other works too.

    python benchmarks/overlap.py [--smollm2] [--dtype float32|bfloat16] [--seconds 15] [--repeats 3] [--json FILE]

One thread each. The engine samples ragged conversations without end (those of ``engine.py``), the learner updates on one batch
without end (that of ``learner.py``). Four settings take turns: the engine in a process of its own alone, the learner alone,
both at once, and both at once with the engine in the learner's process. Sampled and trained tokens per second of wall time;
medians over repeats. It needs a machine with two idle cores: what else runs takes its share from both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from engine import ragged_conversation, ragged_conversations, smollm2, tiny_policy
from learner import attempts
from spread import Spread

from headrace.algorithms import recipe
from headrace.rollout.engine import Engine
from headrace.rollout.local_engine import LocalEngine
from headrace.rollout.process_engine import ProcessEngine
from headrace.training.credit import credit
from headrace.training.learner import Learner, LearnerSettings
from headrace.training.policy import Policy

CONTEXT = 900


@dataclass(frozen=True)
class Rates:
    """Tokens per second of wall time; 0 where that side did not work."""

    sampled: float
    trained: float


@dataclass(frozen=True)
class Sides:
    """What works, ready and warm."""

    engine: Engine
    learner: Learner
    batch: Any
    vocabulary: int
    concurrency: int


async def learning(sides: Sides, until: float) -> float:
    """Tokens per second over the updates until ``until``."""
    tokens, began = 0, time.monotonic()
    while time.monotonic() < until:
        await asyncio.to_thread(update, sides)
        tokens += sum(attempt.context_tokens for attempt in sides.batch)
    return tokens / (time.monotonic() - began)


def update(sides: Sides) -> None:
    sides.learner.update(0, sides.batch, credit(sides.batch, sides.learner.recipe))


async def rates(sides: Sides, numbers: Iterator[int], seconds: float, *, generate: bool, learn: bool) -> Rates:
    counted = [0]
    talks = ragged_conversations(sides.engine, sides.vocabulary, numbers, sides.concurrency, counted) if generate else None
    task = asyncio.create_task(talks) if talks is not None else None
    if task is not None:
        await asyncio.sleep(min(3.0, seconds / 3))  # until all conversations are under way
    began, before = time.monotonic(), counted[0]
    trained = 0.0
    if learn:
        trained = await learning(sides, began + seconds)
    else:
        await asyncio.sleep(seconds)
    sampled = (counted[0] - before) / (time.monotonic() - began) if task is not None else 0.0
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return Rates(sampled, trained)


async def measure(apart: Sides, together: Sides, seconds: float, repeats: int) -> dict[str, list[Rates]]:
    found: dict[str, list[Rates]] = {"engine alone": [], "learner alone": [], "both, two processes": [], "both, one process": []}
    numbers = iter(range(10**9))
    update(apart)
    for sides in (apart, together):
        await ragged_conversation(sides.engine, sides.vocabulary, next(numbers), [0])
    for _ in range(repeats):
        found["engine alone"].append(await rates(apart, numbers, seconds, generate=True, learn=False))
        found["learner alone"].append(await rates(apart, numbers, seconds, generate=False, learn=True))
        found["both, two processes"].append(await rates(apart, numbers, seconds, generate=True, learn=True))
        found["both, one process"].append(await rates(together, numbers, seconds, generate=True, learn=True))
    await apart.engine.close()
    await together.engine.close()
    return found


def show(found: dict[str, list[Rates]]) -> None:
    alone = Rates(
        Spread.of([rate.sampled for rate in found["engine alone"]]).median,
        Spread.of([rate.trained for rate in found["learner alone"]]).median,
    )
    print("| setting | sampled tokens/s | of alone | trained tokens/s | of alone |\n| --- | --- | --- | --- | --- |")
    for name, repeats in found.items():
        sampled, trained = Spread.of([rate.sampled for rate in repeats]), Spread.of([rate.trained for rate in repeats])
        left = f"{sampled.show()} | {sampled.median / alone.sampled:.2f}" if sampled.median else "- | -"
        right = f"{trained.show()} | {trained.median / alone.trained:.2f}" if trained.median else "- | -"
        print(f"| {name} | {left} | {right} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct in place of the tiny policy")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    model = smollm2(dtype) if arguments.smollm2 else tiny_policy(dtype)
    concurrency = 16 if arguments.smollm2 else 64
    options: dict[str, Any] = {"stop_token_ids": [], "slots": concurrency, "context_limit": CONTEXT}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        policy = Policy(model, None, name="benchmark")
        batch = attempts(8 if arguments.smollm2 else 32, model.config.vocab_size)
        learner = Learner(policy, recipe("spo++"), LearnerSettings(learning_rate=1e-6, max_tokens=4096))
        rest = (learner, batch, model.config.vocab_size, concurrency)
        apart = Sides(ProcessEngine(folder, threads=1, dtype=arguments.dtype, **options), *rest)
        together = Sides(LocalEngine(model, **options), *rest)
        name = "SmolLM2-135M-Instruct" if arguments.smollm2 else "tiny policy"
        print(f"{name}, {arguments.dtype}, {concurrency} conversations, one thread each, {arguments.seconds:g} s a setting\n", flush=True)
        found = asyncio.run(measure(apart, together, arguments.seconds, arguments.repeats))
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: [asdict(rate) for rate in all_] for name, all_ in found.items()}, indent=1))


if __name__ == "__main__":
    main()
