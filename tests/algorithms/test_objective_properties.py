"""What holds for every objective: masks, padding, order, splits, precision, on-policy gradients, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.algorithms import (
    CISPO,
    GMPO,
    GSPO,
    KERNELS,
    RECIPES,
    SAPO,
    SSPO,
    BatchTotals,
    Clip,
    Objective,
    combine_metrics,
    row_chunks,
)

from_fixture = Callable[..., Any]
MAX_LEN = 20
OBJECTIVES: dict[str, Objective] = {
    "clip": Clip(),
    "clip dual": Clip(dual=2.0),
    "clip sequence-mean": Clip(0.2, 0.2, reduction="sequence-mean"),
    "clip fixed": Clip(0.2, 0.2, reduction="fixed", max_len=MAX_LEN),
    "cispo": CISPO(1.2),
    "gspo": GSPO(0.05, 0.1),
    "gmpo": GMPO(0.2),
    "sapo": SAPO(),
    "sapo softsign": SAPO(kernel="softsign"),
    "sspo": SSPO(),
    **{f"sspo {kernel} {domain}": SSPO(kernel=kernel, domain=domain) for kernel in KERNELS for domain in ("log", "ratio")},
}
EVERY = pytest.mark.parametrize("name", OBJECTIVES)


def loss_and_gradient(objective: Objective, batch: Any, **changes: Any) -> tuple[Tensor, Tensor]:
    leaf = changes.pop("logprobs", batch.logprobs).detach().clone().requires_grad_()
    parts = {"old": batch.old, "advantages": batch.advantages, "mask": batch.mask, "rollout": batch.rollout, "totals": None, **changes}
    loss = objective(leaf, parts["old"], parts["advantages"], parts["mask"], parts["rollout"], totals=parts["totals"]).loss
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def split(batch: Any, sizes: list[int]) -> Iterator[Any]:
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        yield replace(batch, **{name: getattr(batch, name)[rows] for name in ("logprobs", "old", "rollout", "advantages", "mask")})
        start += size


# --- masks and padding --------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30, -200.0])
def test_what_lies_under_the_mask_never_matters(name: str, junk: float, make_batch: from_fixture) -> None:
    # Fault 10: a mask applied after exp.
    batch = make_batch(1, with_empty_row=True)
    hidden = ~batch.mask
    clean = loss_and_gradient(OBJECTIVES[name], batch)
    for field in ("logprobs", "old", "rollout"):
        dirty = getattr(batch, field).masked_fill(hidden, junk)
        loss, gradient = loss_and_gradient(OBJECTIVES[name], batch, **{field: dirty})
        assert torch.equal(loss, clean[0])
        assert torch.equal(gradient, clean[1])
        assert bool((gradient[hidden] == 0).all())


def test_a_masked_log_ratio_of_200_leaves_no_trace() -> None:
    # Fault 10 as reported: log-ratios 0 and 200, mask 1 and 0.
    for objective in OBJECTIVES.values():
        lp = torch.tensor([[0.0, 200.0]], requires_grad=True)
        result = objective(lp, torch.zeros(1, 2), torch.ones(1), torch.tensor([[1, 0]]))
        result.loss.backward()
        assert math.isfinite(result.loss.item())
        assert bool(torch.isfinite(lp.grad).all())
        assert float(lp.grad[0, 1]) == 0.0
        assert float(result.metrics["ratio_max"]) == 1.0


@EVERY
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_bools_and_numbers_mean_the_same(name: str, dtype: torch.dtype, make_batch: from_fixture) -> None:
    batch = make_batch(2)
    expected = loss_and_gradient(OBJECTIVES[name], batch)
    got = loss_and_gradient(OBJECTIVES[name], batch, mask=batch.mask.to(dtype))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@EVERY
def test_padding_changes_nothing(name: str, make_batch: from_fixture) -> None:
    batch = make_batch(3)

    def pad(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (2, 9), value=value)

    expected = loss_and_gradient(OBJECTIVES[name], batch)
    padded = {field: pad(getattr(batch, field), math.nan) for field in ("logprobs", "old", "rollout")}
    loss, gradient = loss_and_gradient(OBJECTIVES[name], batch, mask=pad(batch.mask.double(), 0), **padded)
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, pad(expected[1], 0), rtol=1e-12, atol=1e-14)


@EVERY
def test_an_empty_completion_contributes_nothing(name: str, make_batch: from_fixture) -> None:
    # Fault 5: reward 10 on an all-zero mask. The row counts in no denominator either.
    batch = make_batch(4, n=6, with_empty_row=True)
    advantages = batch.advantages.clone()
    advantages[-1] = 10.0
    loss, gradient = loss_and_gradient(OBJECTIVES[name], batch, advantages=advantages)
    without = loss_and_gradient(OBJECTIVES[name], next(split(batch, [5])))
    torch.testing.assert_close(loss, without[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient[:5], without[1], rtol=1e-12, atol=1e-14)
    assert bool((gradient[5] == 0).all())


@EVERY
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_a_batch_without_action_tokens_has_loss_zero_and_a_gradient_of_zeros(name: str, shape: tuple[int, int]) -> None:
    # Fault 6, second half.
    lp = torch.full(shape, math.nan).requires_grad_()
    result = OBJECTIVES[name](lp, torch.zeros(shape), torch.ones(shape[0]), torch.zeros(shape), torch.zeros(shape))
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    assert bool((lp.grad == 0).all())
    assert all(math.isfinite(float(value)) for value in result.metrics.values())


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "clip fixed"])
def test_numerator_and_denominator_share_the_mask(name: str) -> None:
    # Fault 6, first half: two equal completions, one of them masked as truncated: the loss is that of the other, not half of it.
    lp, old = torch.full((2, 3), -0.7, dtype=torch.float64), torch.full((2, 3), -0.75, dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    both = OBJECTIVES[name](lp, old, ones, torch.ones(2, 3)).loss
    one = OBJECTIVES[name](lp, old, ones, torch.tensor([[1, 1, 1], [0, 0, 0]])).loss
    assert float(one) == pytest.approx(float(both), rel=1e-14)


def test_metrics_see_action_tokens_only(make_batch: from_fixture) -> None:
    # Fault 28.
    batch = make_batch(5)
    for objective in OBJECTIVES.values():
        clean = objective(batch.logprobs, batch.old, batch.advantages, batch.mask, batch.rollout).metrics
        dirty = objective(
            batch.logprobs.masked_fill(~batch.mask, 50.0),
            batch.old.masked_fill(~batch.mask, -50.0),
            batch.advantages,
            batch.mask,
            batch.rollout.masked_fill(~batch.mask, -90.0),
        ).metrics
        assert dirty == clean


# --- order and splits ---------------------------------------------------------------------------------------------


@EVERY
def test_the_order_of_the_batch_does_not_matter(name: str, make_batch: from_fixture) -> None:
    batch = make_batch(6)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    straight = loss_and_gradient(OBJECTIVES[name], batch)
    fields = {field: getattr(batch, field)[order] for field in ("logprobs", "old", "rollout", "advantages", "mask")}
    shuffled = loss_and_gradient(OBJECTIVES[name], replace(batch, **fields))
    torch.testing.assert_close(shuffled[0], straight[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shuffled[1], straight[1][order], rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("sizes", [[8], [4, 4], [2, 2, 2, 2], [1, 5, 0, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_batches_add_up_to_the_step(name: str, sizes: list[int], dtype: torch.dtype, make_batch: from_fixture) -> None:
    # Fault 27: 1, 2 or 4 micro-batches, or as many ranks.
    batch = make_batch(7, n=8, dtype=dtype, with_empty_row=True)
    whole = loss_and_gradient(OBJECTIVES[name], batch)
    totals = sum((BatchTotals.of(part.mask) for part in split(batch, sizes)), BatchTotals(0, 0))
    assert totals == BatchTotals.of(batch.mask)
    results = [loss_and_gradient(OBJECTIVES[name], part, totals=totals) for part in split(batch, sizes)]
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(torch.stack([loss for loss, _ in results]).sum(), whole[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results]), whole[1], rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(OBJECTIVES)), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 10**6), st.booleans())
def test_any_split_of_any_batch_adds_up(name: str, sizes: list[int], seed: int, with_empty_row: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    shape = (n, 5)
    lp, old = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.5
    if with_empty_row and n:
        mask[0] = False
    objective = OBJECTIVES[name]
    totals = BatchTotals.of(mask)
    whole = objective(lp, old, advantages, mask)
    parts, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        parts.append((objective(lp[rows], old[rows], advantages[rows], mask[rows], totals=totals), int(mask[rows].sum())))
        start += size
    assert float(sum(part.loss for part, _ in parts)) == pytest.approx(float(whole.loss), rel=1e-10, abs=1e-12)
    combined = combine_metrics([(part.metrics, tokens) for part, tokens in parts])
    if totals.tokens:
        assert combined == pytest.approx({key: float(value) for key, value in whole.metrics.items()}, rel=1e-9, abs=1e-12)


@EVERY
def test_evaluation_in_row_chunks_equals_evaluation_at_once(name: str, make_batch: from_fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(8)
    at_once = loss_and_gradient(OBJECTIVES[name], batch)
    metrics = OBJECTIVES[name](batch.logprobs, batch.old, batch.advantages, batch.mask, batch.rollout).metrics
    monkeypatch.setitem(row_chunks._CHUNK_ELEMENTS, "cpu", 1)
    chunked = loss_and_gradient(OBJECTIVES[name], batch)
    torch.testing.assert_close(chunked, at_once, rtol=1e-13, atol=1e-15)
    again = OBJECTIVES[name](batch.logprobs, batch.old, batch.advantages, batch.mask, batch.rollout).metrics
    torch.testing.assert_close(again, metrics, rtol=1e-13, atol=1e-15)


def test_the_gradient_scales_with_what_comes_after_the_loss(make_batch: from_fixture) -> None:
    batch = make_batch(9)
    _, gradient = loss_and_gradient(Clip(), batch)
    leaf = batch.leaf()
    (3 * Clip()(leaf, batch.old, batch.advantages, batch.mask, batch.rollout).loss + leaf.sum() * 0).backward()
    torch.testing.assert_close(leaf.grad, 3 * gradient)


def test_no_gradient_is_computed_where_none_is_wanted(make_batch: from_fixture) -> None:
    batch = make_batch(9)
    assert not Clip()(batch.logprobs, batch.old, batch.advantages, batch.mask).loss.requires_grad
    with torch.no_grad():
        assert not Clip()(batch.leaf(), batch.old, batch.advantages, batch.mask).loss.requires_grad


def test_only_the_policy_receives_a_gradient(make_batch: from_fixture) -> None:
    batch = make_batch(10)
    others = [tensor.clone().requires_grad_() for tensor in (batch.old, batch.advantages, batch.rollout)]
    for objective in OBJECTIVES.values():
        objective(batch.leaf(), others[0], others[1], batch.mask, others[2]).loss.backward()
    assert all(tensor.grad is None for tensor in others)


# --- on-policy ----------------------------------------------------------------------------------------------------


@EVERY
def test_on_policy_every_objective_is_the_plain_policy_gradient(name: str, make_batch: from_fixture) -> None:
    batch = make_batch(12, spread=0.0)
    objective = OBJECTIVES[name]
    _, gradient = loss_and_gradient(objective, batch, rollout=None)
    lengths = batch.mask.sum(1, keepdim=True, dtype=torch.float64)
    weight = {
        "token-mean": 1 / lengths.sum(),
        "sequence-mean": 1 / (len(lengths) * lengths),
        "fixed": 1 / (len(lengths) * MAX_LEN),
    }[objective.reduction]
    expected = -batch.advantages[:, None] * batch.mask * weight
    torch.testing.assert_close(gradient, expected.to(gradient.dtype), rtol=1e-10, atol=1e-14)


# --- precision ----------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0, 25.0, -25.0])
def test_log_ratios_up_to_80_stay_finite(name: str, dtype: torch.dtype, advantage: float) -> None:
    logs = torch.linspace(-80, 80, 2001).repeat(3, 1)
    logs[1] = 80.0
    logs[2] = -80.0
    lp = (logs - 100).to(dtype).requires_grad_()
    old = torch.full_like(lp, -100.0).detach()
    rollout = old + logs.flip(1).to(dtype)
    for correction in (None, rollout, old - 80):
        lp.grad = None
        result = OBJECTIVES[name](lp, old, torch.full((3,), advantage, dtype=dtype), torch.ones_like(logs), correction)
        result.loss.backward()
        assert math.isfinite(result.loss.item())
        assert bool(torch.isfinite(lp.grad).all())
        assert result.loss.dtype == torch.float32
        assert lp.grad.dtype == dtype
        assert all(math.isfinite(float(value)) for value in result.metrics.values())


@EVERY
def test_beyond_80_the_weight_saturates_instead_of_overflowing(name: str) -> None:
    lp = torch.tensor([[500.0, 0.0, -500.0]], requires_grad=True)
    for advantage in (1.0, -1.0):
        lp.grad = None
        result = OBJECTIVES[name](lp, torch.zeros(1, 3), torch.tensor([advantage]), torch.ones(1, 3))
        result.loss.backward()
        assert math.isfinite(result.loss.item())
        assert bool(torch.isfinite(lp.grad).all())


@EVERY
def test_bfloat16_inputs_are_computed_in_float32(name: str, make_batch: from_fixture) -> None:
    batch = make_batch(13, dtype=torch.bfloat16)
    wide = replace(batch, **{field: getattr(batch, field).float() for field in ("logprobs", "old", "rollout", "advantages")})
    narrow_loss, narrow_gradient = loss_and_gradient(OBJECTIVES[name], batch)
    loss, gradient = loss_and_gradient(OBJECTIVES[name], wide)
    assert torch.equal(narrow_loss, loss)
    assert torch.equal(narrow_gradient, gradient.to(torch.bfloat16))


def test_a_float32_step_of_many_tokens_keeps_its_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    lp = torch.randn(64, 2000, generator=generator) * 0.1
    old, advantages = lp + 0.1 * torch.randn(64, 2000, generator=generator), torch.randn(64, generator=generator)
    for objective in OBJECTIVES.values():
        narrow = objective(lp, old, advantages, torch.ones(64, 2000)).loss
        wide = objective(lp.double(), old.double(), advantages.double(), torch.ones(64, 2000)).loss
        assert float(narrow) == pytest.approx(float(wide), rel=2e-5, abs=1e-7)


def test_every_recipe_has_an_objective_that_runs(make_batch: from_fixture) -> None:
    batch = make_batch(14)
    for row in RECIPES.values():
        objective = row.with_max_len(MAX_LEN).objective
        assert math.isfinite(float(objective(batch.logprobs, batch.old, batch.advantages, batch.mask, batch.rollout).loss))
