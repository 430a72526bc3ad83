"""Scores of packed rows against plain forward passes of each row alone: values and gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.training import forward
from headrace.training.attention import PACKED_ATTENTION
from headrace.training.packing import pack
from headrace.training.policy import Policy

PACKED = ["Llama", "Llama/tied", "Qwen2", "Qwen2/window", "Qwen3", "Gemma3Text", "Granite"]
PADDED = ["Qwen3_5Text", "Lfm2", "Gemma2"]


def rows(tiny: Any, lengths: tuple[int, ...] = (33, 12, 21, 12, 6)) -> list[Any]:
    generator = random.Random(0)
    return [tiny.row(generator, length) for length in lengths]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_scores_and_gradients(tiny: Any, policy: Policy, reference: nn.Module) -> None:
    texts = rows(tiny)
    batch = pack([[text] for text in texts])
    scores_nt = batch.spread(policy.score(batch.rows).logprobs_m)
    expected = tiny.plain_logprobs(reference, texts)
    torch.testing.assert_close(scores_nt[batch.mask_nt], expected, rtol=2e-5, atol=2e-5)
    weights = torch.linspace(-1, 1, expected.numel())
    (scores_nt[batch.mask_nt] * weights).sum().backward()
    (expected * weights).sum().backward()
    want, have = gradients(reference), gradients(policy.model)
    assert have.keys() == want.keys()
    for name, gradient in want.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(have[name], gradient, rtol=1e-4, atol=3e-5 * scale, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_equal_rows_alone(tiny: Any, kind: str) -> None:
    policy = Policy(tiny.model(kind), None)
    assert (policy.describe().layout, policy.describe().head) == ("packed", "chunked")
    assert_same_scores_and_gradients(tiny, policy, tiny.model(kind))


@pytest.mark.parametrize("kind", PADDED)
def test_models_that_packing_would_mix_take_padded_rows_and_equal_rows_alone(tiny: Any, kind: str) -> None:
    policy = Policy(tiny.model(kind), None)
    assert (policy.describe().layout, policy.describe().head) == ("padded", "chunked")
    assert_same_scores_and_gradients(tiny, policy, tiny.model(kind))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2/window"])
def test_ragged_blocks_equal_rows_alone(tiny: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = forward.attention.row_layout
    monkeypatch.setattr(forward.attention, "row_layout", lambda lengths, slack, device: layout(lengths, slack=0.5, device=device))
    assert_same_scores_and_gradients(tiny, Policy(tiny.model(kind), None), tiny.model(kind))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3_5Text"])
def test_gradient_checkpointing_changes_neither_scores_nor_gradients(tiny: Any, kind: str) -> None:
    policy = Policy(tiny.model(kind), None, gradient_checkpointing=True)
    policy.training_mode(True)
    assert policy.model.training
    assert_same_scores_and_gradients(tiny, policy, tiny.model(kind))


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Granite"])
def test_entropy_is_that_of_the_distribution_each_token_was_drawn_from(tiny: Any, kind: str) -> None:
    model = tiny.model(kind)
    text = rows(tiny, (15,))[0]
    batch = pack([[text]])
    logprobs = model(input_ids=torch.tensor([text.token_ids])).logits[0].float().log_softmax(-1)
    places = [position for position, action in enumerate(text.action_mask) if action]
    expected = torch.stack([-(logprobs[place - 1].exp() * logprobs[place - 1]).sum() for place in places])
    scores = Policy(tiny.model(kind), None).score(batch.rows, entropy=True)
    torch.testing.assert_close(scores.entropies_m, expected, rtol=1e-4, atol=1e-5)


def test_a_head_that_scales_in_an_unknown_way_is_noticed_and_taken_whole(tiny: Any) -> None:
    model, reference = tiny.model("Llama"), tiny.model("Llama")
    for each in (model, reference):
        each.forward = _scaled_logits(each.forward)
    policy = Policy(model, None)
    assert policy.describe().head == "whole"
    assert_same_scores_and_gradients(tiny, policy, reference)


def _scaled_logits(plain: Any) -> Any:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits * 1.7
        return output

    return scaled


def test_a_model_that_looks_ahead_is_refused(tiny: Any) -> None:
    model = tiny.model("Llama")
    plain = model.model.norm.forward
    model.model.norm.forward = lambda hidden: plain(hidden + hidden.roll(-1, dims=1))
    with pytest.raises(UserError, match="cannot be trained here"):
        Policy(model, None)


@torch.no_grad()
def test_a_leak_too_small_to_show_in_scores_still_keeps_rows_apart(tiny: Any) -> None:
    """A causal layer that mixes positions a little: right for rows alone, and packed rows would see each other."""
    model = tiny.model("Llama")
    plain = model.model.norm.forward
    model.model.norm.forward = lambda hidden: plain(hidden) + 3e-6 * hidden.cumsum(1)
    policy = Policy(model, None)
    probe, reference = policy._forward._probe()
    assert policy._forward._take_attention(PACKED_ATTENTION) and policy._forward._agrees(probe, reference, "packed", "chunked")
    assert policy.describe().layout == "padded"


def test_bfloat16_models_are_packed_too_and_score_in_float32(tiny: Any) -> None:
    policy = Policy(tiny.model("Qwen2").bfloat16(), None)
    assert policy.describe().layout == "packed"
    texts = rows(tiny)
    batch = pack([[text] for text in texts])
    scores_m = policy.score(batch.rows).logprobs_m
    assert scores_m.dtype == torch.float32
    expected = tiny.plain_logprobs(tiny.model("Qwen2"), texts)
    assert (batch.spread(scores_m)[batch.mask_nt] - expected).abs().mean() < 0.1


def test_dropout_of_the_model_is_switched_off(tiny: Any) -> None:
    model = tiny.model("Llama", attention_dropout=0.5)
    policy = Policy(model, None, gradient_checkpointing=True)
    policy.training_mode(True)
    batch = pack([[text] for text in rows(tiny)])
    assert torch.equal(policy.score(batch.rows).logprobs_m, policy.score(batch.rows).logprobs_m)


def test_the_model_stays_an_ordinary_one_outside_packed_rows(tiny: Any) -> None:
    policy, plain = Policy(tiny.model("Llama"), None), tiny.model("Llama")
    assert policy.model.config._attn_implementation == PACKED_ATTENTION
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    ours, theirs = policy.model(ids, attention_mask=mask).logits, plain(ids, attention_mask=mask).logits
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])
    assert (
        policy.model.generate(ids[:1], max_new_tokens=3, do_sample=False).tolist()
        == plain.generate(ids[:1], max_new_tokens=3, do_sample=False).tolist()
    )
