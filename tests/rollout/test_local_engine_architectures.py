"""Tiny random models of the architectures that people use: the engine's log-probabilities are those of a plain forward."""

import asyncio
import random
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from headrace.rollout.clock import run
from headrace.rollout.engine import Request
from headrace.rollout.local_engine import LocalEngine
from headrace.rollout.runners import plain_logits

VOCABULARY = 61
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LINEAR = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
FAST = {"native", "paged"}
FASTEST = {"fused", "paged"}
ARCHITECTURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Llama": ({}, FASTEST),
    "Qwen2": ({}, FASTEST),
    "Qwen3": ({"head_dim": 16}, FASTEST),
    "Mistral": ({"sliding_window": 30, "head_dim": 8}, FASTEST),
    "Gemma3": ({"head_dim": 16, "sliding_window": 30, "layer_types": ["sliding_attention", "full_attention"] * 2}, FAST),
    "SmolLM3": ({"no_rope_layers": [1, 0, 1, 1]}, FAST),
    "Olmo2": ({}, FAST),
    "Phi3": ({}, FAST),
    "Gemma2": ({"head_dim": 16, "sliding_window": 30}, {"episode"}),
    "GptOss": ({"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 30}, {"episode"}),
    "Qwen3Next": (LINEAR | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}, {"hybrid"}),
    "Lfm2": ({"full_attn_idxs": [1, 3], "conv_L_cache": 3}, {"hybrid"}),
    "Qwen3_5": (LINEAR, {"hybrid"}),
}


def tiny(name: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    prefix = {"Gemma3": "Gemma3Text", "Qwen3_5": "Qwen3_5Text"}.get(name, name)
    config = getattr(transformers, f"{prefix}Config")(**(COMMON | options))
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "conv" not in parameter_name:
            parameter.data.mul_(8.0)
    return model.train(False)


async def converse(engine: LocalEngine, dispatch: int) -> tuple[list[int], list[tuple[int, float]]]:
    rng = random.Random(dispatch)
    context = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 7, 66]))]
    sampled: list[tuple[int, float]] = []
    for turn in range(3):
        done = await engine.generate(Request(dispatch, turn, tuple(context), 0, rng.randrange(1, 6), dispatch))
        sampled += [(len(context) + i, logprob) for i, logprob in enumerate(done.logprobs)]
        context += [*done.token_ids, *(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 26])))]
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    await engine.end(dispatch)
    return context, sampled


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_equal_a_plain_forward(name: str) -> None:
    torch.set_num_threads(1)
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    options, expected_paths = ARCHITECTURES[name]
    model = tiny(name, options)
    engine = LocalEngine(model, stop_token_ids=[5], slots=3, context_limit=300, tick_tokens=48)
    assert engine.path in expected_paths, engine.refused_paths

    async def main() -> list[tuple[list[int], list[tuple[int, float]]]]:
        return await asyncio.gather(*(converse(engine, dispatch) for dispatch in range(5)))

    for context, sampled in run(main()):
        expected = plain_logits(model, context).log_softmax(-1)
        worst = max(abs(float(expected[position - 1, context[position]]) - logprob) for position, logprob in sampled)
        assert worst < 1e-4
        assert float(expected.exp().max()) > 0.1  # peaked enough for mistakes to show
