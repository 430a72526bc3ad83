"""Normalization under every measure, and the faults that trainers have had here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.algorithms import GROUP_MEASURES, MEASURES, actor_residual, length_covariance, normalize, normalize_with_counts

EPSILON = 1e-8


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reference(raw: np.ndarray, lengths: np.ndarray, measure: str, groups: np.ndarray) -> np.ndarray:
    """Each measure from its row of the table, cell by cell."""
    out = np.zeros_like(raw)
    cells = [np.arange(len(raw))] if measure not in GROUP_MEASURES else [np.flatnonzero(groups == g) for g in np.unique(groups)]
    for cell in cells:
        a, n = raw[cell], len(cell)
        weight = lengths[cell] if measure == "action-token" else np.ones(n)
        if measure == "none":
            out[cell] = a
            continue
        if n == 1 or np.ptp(a) == 0 or weight.sum() <= 1:
            continue
        if measure == "leave-one-out":
            out[cell] = [a[j] - np.delete(a, j).mean() for j in range(n)]
        elif measure == "group-mean":
            out[cell] = a - a.mean()
        else:
            mu = (weight * a).sum() / weight.sum()
            sigma = math.sqrt((weight * (a - mu) ** 2).sum() / (weight.sum() - 1))
            out[cell] = (a - mu) / (sigma + EPSILON)
    return out


# --- by hand ------------------------------------------------------------------------------------------------------


def test_trajectory_measure_by_hand() -> None:
    # mean .25, deviations .75 -.25 -.25 -.25, variance .75 / 3
    expected = [0.75 / 0.5, -0.5, -0.5, -0.5]
    assert normalize(f64(1, 0, 0, 0), torch.tensor([9, 1, 1, 1]), "trajectory").tolist() == pytest.approx(expected, rel=1e-7)


def test_action_token_measure_by_hand() -> None:
    # tokens 2 and 6: mean (2*1 + 6*0) / 8 = .25; variance (2*.5625 + 6*.0625) / 7 = 1.5 / 7
    sigma = math.sqrt(1.5 / 7)
    got = normalize(f64(1, 0), torch.tensor([2, 6]), "action-token")
    assert got.tolist() == pytest.approx([0.75 / sigma, -0.25 / sigma], rel=1e-7)


def test_group_measures_by_hand() -> None:
    raw, lengths, groups = f64(1, 5, 0, 7), torch.ones(4), torch.tensor([4, -2, 4, -2])  # ids in any order
    assert normalize(raw, lengths, "group-mean", groups).tolist() == [0.5, -1.0, -0.5, 1.0]
    assert normalize(raw, lengths, "leave-one-out", groups).tolist() == [1.0, -2.0, -1.0, 2.0]
    half = math.sqrt(0.5)
    assert normalize(raw, lengths, "group", groups).tolist() == pytest.approx([half, -half, -half, half], rel=1e-7)


def test_no_measure_leaves_advantages_as_they_are() -> None:
    raw = torch.tensor([0.3, -2.0])
    assert torch.equal(normalize(raw, torch.tensor([1, 5]), "none"), raw)


# --- properties ---------------------------------------------------------------------------------------------------

rows = st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 200), st.integers(0, 3)), min_size=1, max_size=24)


def unpack(data: list[tuple[float, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    raw, lengths, groups = zip(*data, strict=True)
    return f64(*raw), torch.tensor(lengths), torch.tensor(groups)


@settings(max_examples=150, deadline=None)
@given(rows, st.sampled_from(MEASURES))
def test_every_measure_equals_its_reference(data: list[tuple[float, int, int]], measure: str) -> None:
    raw, lengths, groups = unpack(data)
    got = normalize(raw, lengths, measure, groups)
    expected = reference(raw.numpy(), lengths.numpy().astype(float), measure, groups.numpy())
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(rows)
def test_the_action_token_measure_centres_what_the_actor_sees(data: list[tuple[float, int, int]]) -> None:
    raw, lengths, _ = unpack(data)
    normalized = normalize(raw, lengths, "action-token")
    assert abs(float((lengths * normalized).sum())) <= 1e-9 * float(lengths.sum()) * max(1.0, float(normalized.abs().max()))
    assert float(actor_residual(normalized, lengths)) == pytest.approx(0, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(rows)
def test_the_residual_of_the_trajectory_measure_is_the_covariance_with_length(data: list[tuple[float, int, int]]) -> None:
    raw, lengths, _ = unpack(data)
    normalized = normalize(raw, lengths, "trajectory")
    covariance = np.cov(lengths.numpy().astype(float), normalized.numpy(), ddof=0)[0, 1] if len(data) > 1 else 0.0
    assert float(actor_residual(normalized, lengths)) == pytest.approx(covariance / lengths.numpy().mean(), abs=1e-9)
    assert float(length_covariance(normalized, lengths)) == pytest.approx(covariance, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(rows, st.sampled_from(MEASURES), st.randoms(use_true_random=False))
def test_the_order_of_the_batch_does_not_matter(data: list[tuple[float, int, int]], measure: str, shuffler: object) -> None:
    raw, lengths, groups = unpack(data)
    order = torch.tensor(sorted(range(len(data)), key=lambda _: shuffler.random()))  # type: ignore[attr-defined]
    straight = normalize(raw, lengths, measure, groups)
    shuffled = normalize(raw[order], lengths[order], measure, groups[order])
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-6, atol=1e-9)


@settings(max_examples=100, deadline=None)
@given(rows, st.sampled_from(["trajectory", "action-token", "group"]))
def test_whitening_has_unit_spread_under_its_own_measure(data: list[tuple[float, int, int]], measure: str) -> None:
    raw, lengths, groups = unpack(data)
    groups = torch.zeros_like(groups)
    assume(float(raw.max() - raw.min()) > 1e-3 and len(data) > 1)
    out = normalize(raw, lengths, measure, groups)
    weight = lengths.double() if measure == "action-token" else torch.ones(len(data), dtype=torch.float64)
    mean = (weight * out).sum() / weight.sum()
    assert float((weight * (out - mean) ** 2).sum() / (weight.sum() - 1)) == pytest.approx(1, abs=1e-4)


# --- faults -------------------------------------------------------------------------------------------------------


def test_seven_equal_rewards_and_a_zero_are_not_degenerate_and_equal_ones_give_exactly_zero() -> None:
    # Fault 1: a spread made of rounding residue.
    raw = torch.tensor([0.35] * 7 + [0.0])
    got = normalize(raw, torch.ones(8), "group", torch.zeros(8, dtype=torch.int64))
    expected = reference(raw.double().numpy(), np.ones(8), "group", np.zeros(8))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    for measure in set(MEASURES) - {"none"}:
        for value in (0.35, 0.1, -1 / 3, 1e-30, 1e30):
            equal = torch.full((7,), value)
            zeros = normalize(equal, torch.tensor([3, 1, 4, 1, 5, 9, 2]), measure, torch.zeros(7, dtype=torch.int64))
            assert torch.equal(zeros, torch.zeros(7)), (measure, value)


def test_a_small_spread_on_a_large_offset_is_kept() -> None:
    raw = torch.tensor([1000.0, 1000.25, 1000.5, 1000.75])  # E[x^2] - E[x]^2 in float32 is noise here
    got = normalize(raw, torch.ones(4), "trajectory")
    expected = reference(raw.double().numpy(), np.ones(4), "trajectory", np.zeros(4))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


def test_a_group_is_judged_on_its_own_spread_and_stays_whole() -> None:
    # Fault 2: rewards 1, 0, 0, 0 with leave-one-out: the three zeros have equal siblings but different baselines from the one.
    raw, groups = f64(1, 0, 0, 0, 0.5, 0.5, 0.5, 0.5), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    report = normalize_with_counts(raw, torch.ones(8), "leave-one-out", groups)
    assert report.advantages_n.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0])
    assert (report.cells, report.degenerate, report.excluded) == (2, 1, 0)


@pytest.mark.parametrize("measure", sorted(GROUP_MEASURES))
def test_a_group_of_one_survivor_gets_zero(measure: str) -> None:
    report = normalize_with_counts(f64(1, 1, 0), torch.ones(3), measure, torch.tensor([0, 1, 1]))
    assert float(report.advantages_n[0]) == 0.0
    assert float(report.advantages_n[1]) > 0
    assert report.degenerate == 1


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("missing", [math.nan, math.inf])
def test_an_unscored_sample_leaves_every_statistic(measure: str, missing: float) -> None:
    # Fault 4: siblings are as if it had never been there, and it is counted.
    raw, lengths, groups = f64(1, 0, missing, 0.5), torch.tensor([3, 2, 5, 4]), torch.zeros(4, dtype=torch.int64)
    report = normalize_with_counts(raw, lengths, measure, groups)
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(report.advantages_n[kept], normalize(raw[kept], lengths[kept], measure, groups[kept]))
    assert float(report.advantages_n[2]) == 0.0
    assert report.excluded == 1


@pytest.mark.parametrize("measure", MEASURES)
def test_an_empty_completion_leaves_every_statistic(measure: str) -> None:
    # Fault 5: an all-zero action mask with reward 10.
    raw, lengths, groups = f64(1, 0, 10, 0.5), torch.tensor([3, 2, 0, 4]), torch.zeros(4, dtype=torch.int64)
    report = normalize_with_counts(raw, lengths, measure, groups)
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(report.advantages_n[kept], normalize(raw[kept], lengths[kept], measure, groups[kept]))
    assert float(report.advantages_n[2]) == 0.0
    assert report.excluded == 1


@pytest.mark.parametrize("measure", sorted(set(MEASURES) - {"none"}))
@pytest.mark.parametrize(("raw", "lengths"), [([0.7], [5]), ([0.7, 0.7], [5, 3]), ([0.7], [1]), ([], [])])
def test_degenerate_batches_give_zero_and_are_counted(measure: str, raw: list[float], lengths: list[int]) -> None:
    groups = torch.zeros(len(raw), dtype=torch.int64)
    report = normalize_with_counts(f64(*raw), torch.tensor(lengths), measure, groups)
    assert report.advantages_n.tolist() == [0.0] * len(raw)
    assert report.degenerate == report.cells == min(len(raw), 1)


# --- types and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_is_kept_and_statistics_are_exact(dtype: torch.dtype) -> None:
    raw = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=dtype)
    got = normalize(raw, torch.tensor([1, 200, 3, 4], dtype=torch.int32), "action-token")
    assert got.dtype == dtype
    expected = reference(raw.double().numpy(), np.array([1.0, 200, 3, 4]), "action-token", np.zeros(4))
    assert torch.equal(got, torch.tensor(expected).to(dtype))
    assert actor_residual(got, torch.tensor([1, 200, 3, 4])).dtype in (torch.float32, torch.float64)


def test_the_result_carries_no_gradient() -> None:
    raw = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not normalize(raw, torch.ones(2), "trajectory").requires_grad


def test_the_residual_of_nothing_is_zero() -> None:
    assert float(actor_residual(torch.zeros(0), torch.zeros(0))) == 0.0
    assert float(actor_residual(torch.tensor([math.nan]), torch.tensor([0]))) == 0.0
    assert float(length_covariance(torch.zeros(0), torch.zeros(0))) == 0.0


def test_bad_input_is_named() -> None:
    raw, lengths = f64(1, 0), torch.ones(2)
    with pytest.raises(ValueError, match="unknown measure 'tokens'; known: trajectory"):
        normalize(raw, lengths, "tokens")
    with pytest.raises(ValueError, match="needs groups_n"):
        normalize(raw, lengths, "group")
    with pytest.raises(ValueError, match="groups_n must be 2"):
        normalize(raw, lengths, "group", torch.tensor([1]))
    with pytest.raises(ValueError, match="groups_n must be 2 integer"):
        normalize(raw, lengths, "group", torch.tensor([1.5, 2.0]))
    with pytest.raises(ValueError, match="action_tokens_n has shape"):
        normalize(raw, torch.ones(3), "trajectory")
    with pytest.raises(ValueError, match="floating-point"):
        normalize(torch.tensor([1, 0]), lengths, "trajectory")
    with pytest.raises(ValueError, match="negative"):
        normalize(raw, torch.tensor([1, -1]), "trajectory")
