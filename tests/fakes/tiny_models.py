"""Tiny random models and made-up trajectories."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from headrace.rollout.trajectory import Dispatch, TokenRow, Trajectory

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama/tied": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen2/window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 0.3},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 8},
    "Granite": {"logits_scaling": 0.25},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3_5Text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
}


def tiny_model(kind: str, seed: int = 0, **extra: Any) -> transformers.PreTrainedModel:
    """A random model of a real architecture, with weights large enough that tokens matter."""
    config = getattr(transformers, kind.split("/")[0] + "Config")(**{**_SIZES, **_EXTRA[kind], "initializer_range": 0.2, **extra})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config)


def random_row(generator: random.Random, length: int, *, actions: Sequence[tuple[int, int]] | None = None) -> TokenRow:
    """``actions``: (start, stop) spans of action tokens; by default every token from the third on with probability 0.4."""
    mask = [actions is None and position > 2 and generator.random() < 0.4 for position in range(length)]
    for start, stop in actions or ():
        mask[start:stop] = [True] * (stop - start)
    if actions is None and length > 3:
        mask[length // 2] = True
    return TokenRow(
        token_ids=tuple(generator.randrange(VOCABULARY) for _ in range(length)),
        action_mask=tuple(mask),
        logprobs=tuple(-generator.random() if action else 0.0 for action in mask),
        versions=tuple(0 if action else -1 for action in mask),
    )


def trajectory(
    number: int,
    rows: Sequence[TokenRow],
    *,
    outcome: float = 1.0,
    value: tuple[float, float] | None = (1.0, 1.0),
    task: str | None = None,
    group: int | None = None,
) -> Trajectory:
    alpha, beta = value if value is not None else (None, None)
    dispatch = Dispatch(number, task or f"task-{number}", "kind", 0, alpha, beta, group, number)
    return Trajectory(dispatch, tuple(rows), (), outcome, outcome == 1.0, "done")


def random_batch(seed: int, count: int = 8, *, longest: int = 40, rows_each: int = 1) -> list[Trajectory]:
    generator = random.Random(seed)
    return [
        trajectory(
            number,
            [random_row(generator, generator.randrange(5, longest)) for _ in range(rows_each)],
            outcome=float(generator.random() < 0.5),
            value=(generator.uniform(0.5, 3), generator.uniform(0.5, 3)),
            group=number // 4,
        )
        for number in range(count)
    ]


def plain_logprobs(model: transformers.PreTrainedModel, rows: Sequence[TokenRow]) -> Tensor:
    """Log-probabilities of the action tokens the slow and obvious way: one row at a time, full logits."""
    found = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        places = [position for position, action in enumerate(row.action_mask) if action]
        found += [logprobs[position - 1, row.token_ids[position]] for position in places]
    return torch.stack(found)


class Tiny:
    """What tests of the learner side need, in one fixture."""

    vocabulary = VOCABULARY
    model: Callable[..., transformers.PreTrainedModel] = staticmethod(tiny_model)
    row: Callable[..., TokenRow] = staticmethod(random_row)
    trajectory: Callable[..., Trajectory] = staticmethod(trajectory)
    batch: Callable[..., list[Trajectory]] = staticmethod(random_batch)
    plain_logprobs: Callable[..., Tensor] = staticmethod(plain_logprobs)
