"""The learner: tokens per second of scoring and of whole updates, packed against padded batches with full logits.

    python benchmarks/learner.py [--model FOLDER] [--dtype float32|bfloat16] [--threads 1 2] [--attempts 128] [--repeats 3]

Without ``--model`` a decoder of the quickstart's size (4 layers, width 128, 4 heads, 2 key-value heads, feed-forward 384) with random
weights and 150 tokens. Attempts have 100 to 640 context tokens (log-normal, median 245), a quarter of them action tokens in turns of six.
Times are the best of the repeats, in CPU seconds of the process (all threads) and in wall seconds; tokens are context tokens.
The padded baseline is what a plain trainer does: batches of 8 by length, padded on the right, full logits at every position, a float32
log-softmax.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.algorithms import recipe
from headrace.rollout.trajectory import Dispatch, TokenRow, Trajectory
from headrace.training.credit import credit
from headrace.training.learner import Learner, LearnerSettings
from headrace.training.packing import micro_batches
from headrace.training.policy import DTYPES, Policy

BASELINE_ROWS = 8


def tiny_policy() -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=150,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Policy(LlamaForCausalLM(config), None, name="tiny (random weights)")


def attempts(count: int, vocabulary: int) -> list[Trajectory]:
    generator = random.Random(0)
    found = []
    for number in range(count):
        length = int(min(640, max(100, generator.lognormvariate(5.5, 0.5))))
        mask = tuple(position >= 80 and (position - 80) % 19 < 6 for position in range(length))
        row = TokenRow(
            tuple(generator.randrange(vocabulary) for _ in range(length)),
            mask,
            tuple(-math.log(vocabulary) if action else 0.0 for action in mask),
            tuple(0 if action else -1 for action in mask),
        )
        outcome = float(generator.random() < 0.4)
        found.append(
            Trajectory(Dispatch(number, f"task-{number}", "", 0, 1.0, 1.5, None, number), (row,), (), outcome, outcome == 1.0, "done")
        )
    return found


def padded_baseline(policy: Policy, batch: Sequence[Trajectory]) -> None:
    rows = sorted((attempt.rows[0] for attempt in batch), key=lambda row: len(row.token_ids))
    for start in range(0, len(rows), BASELINE_ROWS):
        part = rows[start : start + BASELINE_ROWS]
        width = max(len(row.token_ids) for row in part)
        ids = torch.tensor([row.token_ids + (0,) * (width - len(row.token_ids)) for row in part])
        real = torch.tensor([[1] * len(row.token_ids) + [0] * (width - len(row.token_ids)) for row in part])
        action = torch.tensor([list(row.action_mask) + [False] * (width - len(row.action_mask)) for row in part])
        logits = policy.model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1].float()
        logprobs: Tensor = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        logprobs[action[:, 1:]].sum().backward()


def best(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """CPU and wall seconds of the fastest run, after one to warm up."""
    work()
    cpu, wall = [], []
    for _ in range(repeats):
        began, began_wall = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - began_wall)
    return min(cpu), min(wall)


def measure(policy: Policy, batch: Sequence[Trajectory], repeats: int, max_tokens: int) -> None:
    tokens = sum(attempt.context_tokens for attempt in batch)
    packs = [pack.rows for pack in micro_batches([attempt.rows for attempt in batch], max_tokens)]

    def gradients() -> None:
        for rows in packs:
            policy.score(rows).logprobs_m.sum().backward()
        policy.model.zero_grad()

    def scores() -> None:
        for rows in packs:
            policy.measure(rows, max_tokens=max_tokens)

    def plain() -> None:
        policy.model.set_attn_implementation("sdpa")
        padded_baseline(policy, batch)
        policy.model.zero_grad()
        policy.model.set_attn_implementation(usual)

    def update(minibatches: int, autocast: bool) -> Callable[[], object]:
        settings = LearnerSettings(learning_rate=1e-6, minibatches=minibatches, max_tokens=max_tokens, autocast=autocast)
        learner = Learner(policy, recipe("spo++"), settings)
        return lambda: learner.update(0, batch, credit(batch, learner.recipe))

    usual = policy.model.config._attn_implementation
    works: dict[str, Callable[[], object]] = {
        "padded, full logits: forward and backward": plain,
        "packed: forward and backward": gradients,
        "packed: forward": scores,
        "update, 1 mini-batch": update(1, False),
        "update, 4 mini-batches": update(4, False),
    }
    if policy.dtype == torch.float32:
        works["update, 4 mini-batches, bfloat16 autocast"] = update(4, True)
    for name, work in works.items():
        cpu, wall = best(work, repeats)
        print(f"  {name:44s} {cpu:7.2f} CPU s {wall:7.2f} s {tokens / cpu:9,.0f} tokens per CPU s {tokens / wall:9,.0f} per s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder or name (default: a random model of the quickstart's size)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--attempts", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    policy = Policy.load(options.model, dtype=options.dtype) if options.model else tiny_policy()
    batch = attempts(options.attempts, policy.describe().vocabulary)
    actions = sum(attempt.action_tokens for attempt in batch)
    print(policy.describe())
    print(f"{len(batch)} attempts, {sum(attempt.context_tokens for attempt in batch):,} context tokens, {actions:,} action tokens")
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(f"{threads} thread{'s' if threads > 1 else ''}")
        measure(policy, batch, options.repeats, options.max_tokens)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
