"""The parts that a loss of one's own is built from."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.algorithms import REDUCTIONS, BatchTotals, reduce_sequences, reduce_tokens

TERMS = torch.tensor([[1.0, 2.0, 6.0], [4.0, math.nan, math.nan], [math.nan, math.inf, -math.inf]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


def test_reductions_by_hand() -> None:
    assert float(reduce_tokens(TERMS, MASK)) == 13 / 4
    assert float(reduce_tokens(TERMS, MASK, "sequence-mean")) == (3 + 4) / 2
    assert float(reduce_tokens(TERMS, MASK, "fixed", max_len=5)) == pytest.approx(13 / (2 * 5))
    assert float(reduce_sequences(torch.tensor([3.0, 5.0, math.nan]), MASK)) == 4


def test_totals_count_trajectories_that_have_action_tokens() -> None:
    assert BatchTotals.of(MASK) == BatchTotals(sequences=2, tokens=4)
    assert BatchTotals(2, 4) + BatchTotals(1, 3) == BatchTotals(3, 7)
    with pytest.raises(ValueError, match="negative"):
        BatchTotals(-1, 0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parts_add_up_under_the_totals_of_the_step(reduction: str) -> None:
    totals = BatchTotals.of(MASK)
    whole = reduce_tokens(TERMS, MASK, reduction, max_len=7)
    parts = [reduce_tokens(TERMS[i : i + 1], MASK[i : i + 1], reduction, totals=totals, max_len=7) for i in range(3)]
    assert float(sum(parts)) == pytest.approx(float(whole))
    sequences = torch.tensor([3.0, 5.0, math.nan])
    split = [reduce_sequences(sequences[i : i + 1], MASK[i : i + 1], totals=totals) for i in range(3)]
    assert float(sum(split)) == 4


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_are_differentiable_also_where_nothing_counts(reduction: str) -> None:
    terms = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reduce_tokens(x, MASK[:2], reduction, max_len=9), terms)
    nothing = reduce_tokens(terms, torch.zeros(2, 3), reduction, max_len=9)
    assert nothing.item() == 0.0
    (gradient,) = torch.autograd.grad(nothing, terms)
    assert bool((gradient == 0).all())


def test_bfloat16_terms_reduce_in_float32() -> None:
    terms = torch.full((4, 1000), 1.0, dtype=torch.bfloat16)
    value = reduce_tokens(terms, torch.ones(4, 1000))
    assert value.dtype == torch.float32
    assert float(value) == 1.0


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'sum'; known: token-mean, sequence-mean, fixed"):
        reduce_tokens(TERMS, MASK, "sum")
    for max_len in (None, 0):
        with pytest.raises(ValueError, match="set max_len to a positive number"):
            reduce_tokens(TERMS, MASK, "fixed", max_len=max_len)
