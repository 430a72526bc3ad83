"""Every objective against float64 numpy written from the formulas, by hand, and by numeric gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algorithms import CISPO, GMPO, GSPO, SAPO, SSPO, BatchTotals, Clip, reference_kl

MakeBatch = Callable[..., Any]
MAX_LEN = 13


# --- independent references ---------------------------------------------------------------------------------------


def aggregate(terms: np.ndarray, mask: np.ndarray, reduction: str) -> float:
    rows = [i for i in range(len(terms)) if mask[i].any()]
    if reduction == "token-mean":
        return sum(terms[i][mask[i]].sum() for i in rows) / mask.sum()
    if reduction == "sequence-mean":
        return float(np.mean([terms[i][mask[i]].mean() for i in rows]))
    return sum(terms[i][mask[i]].sum() for i in rows) / (len(rows) * MAX_LEN)


def clip_term(r: float, a: float, low: float, high: float, dual: float | None) -> float:
    term = min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return max(term, dual * a) if dual is not None and a < 0 else term


def token_loss(term: Callable[[float, float, float], float], reduction: str) -> Callable[..., float]:
    """``term(r, A, lp)`` for each token."""

    def loss(lp: np.ndarray, old: np.ndarray, a: np.ndarray, mask: np.ndarray, rollout: np.ndarray | None) -> float:
        terms = np.zeros_like(lp)
        for i, t in zip(*np.nonzero(mask), strict=True):
            weight = 1.0 if rollout is None else min(math.exp(old[i, t] - rollout[i, t]), 2.0)
            terms[i, t] = weight * term(math.exp(lp[i, t] - old[i, t]), a[i], lp[i, t])
        return -aggregate(terms, mask, reduction)

    return loss


def sequence_loss(term: Callable[[np.ndarray, float], float]) -> Callable[..., float]:
    """``term(ln r over the action tokens, A)`` for each sequence."""

    def loss(lp: np.ndarray, old: np.ndarray, a: np.ndarray, mask: np.ndarray, rollout: np.ndarray | None) -> float:
        terms = []
        for i in range(len(lp)):
            if not mask[i].any():
                continue
            weight = 1.0 if rollout is None else min(math.exp((old[i] - rollout[i])[mask[i]].mean()), 2.0)
            terms.append(weight * term((lp[i] - old[i])[mask[i]], a[i]))
        return -float(np.mean(terms))

    return loss


def gspo_term(low: float, high: float) -> Callable[[np.ndarray, float], float]:
    return lambda logs, a: clip_term(math.exp(logs.mean()), a, low, high, None)


def gmpo_term(e: float) -> Callable[[np.ndarray, float], float]:
    def term(logs: np.ndarray, a: float) -> float:
        clipped = np.clip(logs, -e, e)
        return math.exp((np.minimum(logs, clipped) if a > 0 else np.maximum(logs, clipped)).mean()) * a

    return term


def sapo_term(pos: float, neg: float) -> Callable[[float, float, float], float]:
    def term(r: float, a: float, _: float) -> float:
        tau = pos if a > 0 else neg
        return 4 / tau / (1 + math.exp(-tau * (r - 1))) * a

    return term


def gated_sapo_term(h: Callable[[float], float], pos: float, neg: float) -> Callable[[float, float, float], float]:
    def term(r: float, a: float, _: float) -> float:
        tau = pos if a > 0 else neg
        return (1 + h(tau * (r - 1)) / tau) * a

    return term


def sspo_term(log_gate: Callable[[np.ndarray, float], np.ndarray], pos: float, neg: float) -> Callable[[np.ndarray, float], float]:
    return lambda logs, a: math.exp(log_gate(logs, pos if a > 0 else neg).mean()) * a


def softsign(u: np.ndarray) -> np.ndarray:
    return u / (1 + np.abs(u))


CASES = {
    "clip": (Clip(), token_loss(lambda r, a, _: clip_term(r, a, 0.2, 0.28, None), "token-mean")),
    "clip dual 2": (Clip(dual=2.0), token_loss(lambda r, a, _: clip_term(r, a, 0.2, 0.28, 2.0), "token-mean")),
    "clip dual below the range": (Clip(0.2, 3.0, 1.5), token_loss(lambda r, a, _: clip_term(r, a, 0.2, 3.0, 1.5), "token-mean")),
    "grpo": (Clip(0.2, 0.2, reduction="sequence-mean"), token_loss(lambda r, a, _: clip_term(r, a, 0.2, 0.2, None), "sequence-mean")),
    "dr_grpo": (
        Clip(0.2, 0.2, reduction="fixed", max_len=MAX_LEN),
        token_loss(lambda r, a, _: clip_term(r, a, 0.2, 0.2, None), "fixed"),
    ),
    "cispo": (CISPO(1.5), token_loss(lambda r, a, lp: min(r, 1.5) * a * lp, "token-mean")),
    "gspo": (GSPO(), sequence_loss(gspo_term(3e-4, 4e-4))),
    "gspo wide": (GSPO(0.1, 0.2), sequence_loss(gspo_term(0.1, 0.2))),
    "gmpo": (GMPO(), sequence_loss(gmpo_term(0.4))),
    "sapo": (SAPO(), token_loss(sapo_term(1.0, 1.05), "sequence-mean")),
    "sapo arctan": (SAPO(0.7, 2.0, "arctan"), token_loss(gated_sapo_term(math.atan, 0.7, 2.0), "sequence-mean")),
    "sspo": (SSPO(), sequence_loss(sspo_term(lambda x, tau: np.arctan(tau * x) / tau, 1.0, 1.05))),
    "sspo softsign": (SSPO(0.5, 3.0, "softsign"), sequence_loss(sspo_term(lambda x, tau: softsign(tau * x) / tau, 0.5, 3.0))),
    "sspo ratio": (
        SSPO(domain="ratio"),
        sequence_loss(sspo_term(lambda x, tau: np.log(1 + np.arctan(tau * (np.exp(x) - 1)) / tau), 1.0, 1.05)),
    ),
    "sspo identity": (SSPO(kernel="identity"), sequence_loss(lambda logs, a: math.exp(logs.mean()) * a)),
}
EVERY = pytest.mark.parametrize("case", CASES)


@EVERY
@pytest.mark.parametrize("with_rollout", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_value_equals_the_formula(case: str, with_rollout: bool, seed: int, make_batch: MakeBatch) -> None:
    objective, expected = CASES[case]
    batch = make_batch(seed, with_empty_row=seed % 2 == 1)
    rollout = batch.rollout if with_rollout else None
    got = objective(batch.logprobs, batch.old, batch.advantages, batch.mask, rollout).loss
    arrays = [tensor.numpy() for tensor in (batch.logprobs, batch.old, batch.advantages, batch.mask)]
    assert float(got) == pytest.approx(expected(*arrays, None if rollout is None else rollout.numpy()), rel=1e-10, abs=1e-12)


@EVERY
@pytest.mark.parametrize("with_rollout", [False, True])
def test_gradient_equals_differences_of_the_formula(case: str, with_rollout: bool, make_batch: MakeBatch) -> None:
    objective, expected = CASES[case]
    batch = make_batch(11, n=4, t=5, with_empty_row=True)
    leaf = batch.leaf()
    objective(leaf, batch.old, batch.advantages, batch.mask, batch.rollout if with_rollout else None).loss.backward()
    old, a, mask = batch.old.numpy(), batch.advantages.numpy(), batch.mask.numpy()
    rollout = batch.rollout.numpy() if with_rollout else None
    if case == "cispo":  # its weight has no gradient: hold it at the point
        weights = np.minimum(np.exp(batch.logprobs.numpy() - old), 1.5)
        correction = 1.0 if rollout is None else np.minimum(np.exp(old - rollout), 2.0)
        by_hand = np.where(mask, -weights * correction * a[:, None] / mask.sum(), 0.0)
        np.testing.assert_allclose(leaf.grad.numpy(), by_hand, rtol=1e-12)
        return
    step = 1e-6
    numeric = np.zeros_like(old)
    for index in np.ndindex(old.shape):
        up, down = batch.logprobs.numpy().copy(), batch.logprobs.numpy().copy()
        up[index] += step
        down[index] -= step
        numeric[index] = (expected(up, old, a, mask, rollout) - expected(down, old, a, mask, rollout)) / (2 * step)
    np.testing.assert_allclose(leaf.grad.numpy(), numeric, rtol=1e-5, atol=1e-9)


# --- by hand ------------------------------------------------------------------------------------------------------


def one_token(ratio: float, advantage: float, rollout_ratio: float | None = None) -> tuple[torch.Tensor, ...]:
    """A batch of one token; ``rollout_ratio`` = exp(old - roll)."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    lp = old + math.log(ratio)
    rollout = () if rollout_ratio is None else (old - math.log(rollout_ratio),)
    return lp, old, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool), *rollout


@pytest.mark.parametrize(
    ("ratio", "advantage", "j"),
    [
        (1.5, 1.0, 1.28),  # gained enough
        (0.5, 1.0, 0.5),  # worse than before: no bound
        (0.5, -1.0, -0.8),  # shrunk enough
        (1.5, -1.0, -1.5),  # grown although bad: pushed back in full
        (3.0, -1.0, -2.0),  # but not beyond the dual clip
        (1.1, 2.0, 2.2),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, j: float) -> None:
    assert float(Clip(dual=2.0)(*one_token(ratio, advantage)).loss) == pytest.approx(-j)


def test_the_rollout_correction_multiplies_outside_the_clip() -> None:
    # r = 1.5 clips to 1.28; the correction 1.6 multiplies that, and a correction of 3 is truncated to 2.
    assert float(Clip()(*one_token(1.5, 1.0, 1.6)).loss) == pytest.approx(-1.28 * 1.6)
    assert float(Clip()(*one_token(1.5, 1.0, 3.0)).loss) == pytest.approx(-1.28 * 2)
    assert float(Clip(dual=2.0)(*one_token(3.0, -1.0, 0.5)).loss) == pytest.approx(2 * 0.5)
    assert float(Clip(correction_cap=5.0)(*one_token(1.0, 1.0, 3.0)).loss) == pytest.approx(-3)


def test_a_sequence_is_corrected_by_its_mean_log_weight() -> None:
    # Weights 8 and 1/2: the truncated token weights would average 1.25, the geometric mean is 2.
    old = torch.zeros(1, 2, dtype=torch.float64)
    rollout = -torch.tensor([[8.0, 0.5]], dtype=torch.float64).log()
    mask, one = torch.ones(1, 2), torch.ones(1, dtype=torch.float64)
    for objective in (GSPO(), GMPO(), SSPO()):
        assert float(objective(old, old, one, mask, rollout).loss) == pytest.approx(-2.0)
    assert float(Clip()(old, old, one, mask, rollout).loss) == pytest.approx(-1.25)


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    lp, old, advantage, mask = one_token(9.0, 2.0)
    lp.requires_grad_()
    result = CISPO(5.0)(lp, old, advantage, mask)
    result.loss.backward()
    assert float(lp.grad) == pytest.approx(-5.0 * 2.0)
    assert float(result.metrics["clip_high_fraction"]) == 1.0


def test_sspo_weighs_a_token_by_sequence_weight_times_attenuation_over_length() -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 5.0]], dtype=torch.float64)
    lp = x.clone().requires_grad_()
    SSPO(tau_pos=0.5)(lp, torch.zeros_like(x), torch.tensor([3.0], dtype=torch.float64), torch.ones(1, 4)).loss.backward()
    weight = math.exp((np.arctan(0.5 * x.numpy()) / 0.5).mean())
    np.testing.assert_allclose(lp.grad.numpy(), -3 * weight / (1 + (0.5 * x.numpy()) ** 2) / 4, rtol=1e-12)


def test_sapo_is_the_sigmoid_gate_plus_a_constant(make_batch: MakeBatch) -> None:
    # (4 / tau) sigmoid(tau (r - 1)) = f(r) + 2 / tau - 1: the difference between two policies is that of the gates.
    from headrace.algorithms import gate

    batch = make_batch(3)
    result = SAPO(1.3, 1.3)(batch.logprobs, batch.old, batch.advantages, batch.mask)
    f = gate(batch.logprobs - batch.old, 1.3, "sigmoid", "ratio").exp() + 2 / 1.3 - 1
    expected = -aggregate((f * batch.advantages[:, None]).numpy(), batch.mask.numpy(), "sequence-mean")
    assert float(result.loss) == pytest.approx(expected, rel=1e-12)


# --- KL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["token-mean", "sequence-mean", "fixed"])
def test_reference_kl_equals_the_formula_and_its_gradient(reduction: str, make_batch: MakeBatch) -> None:
    batch = make_batch(5, with_empty_row=True)
    gap = (batch.old - batch.logprobs).numpy()
    expected = aggregate(np.exp(gap) - gap - 1, batch.mask.numpy(), reduction)
    leaf = batch.leaf()

    def kl(lp: torch.Tensor) -> torch.Tensor:
        return reference_kl(lp, batch.old, batch.mask, reduction, max_len=MAX_LEN)

    assert float(kl(batch.logprobs)) == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(kl, leaf)
    assert float(reference_kl(batch.logprobs, batch.logprobs, batch.mask)) == 0.0


def test_reference_kl_splits_into_micro_batches_and_ignores_masked_values(make_batch: MakeBatch) -> None:
    batch = make_batch(6)
    totals = BatchTotals.of(batch.mask)
    whole = reference_kl(batch.logprobs, batch.old, batch.mask)
    dirty = batch.logprobs.masked_fill(~batch.mask, math.nan)
    parts = [reference_kl(dirty[i : i + 2], batch.old[i : i + 2], batch.mask[i : i + 2], totals=totals) for i in range(0, 7, 2)]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)
    with pytest.raises(ValueError, match="ref_logprobs_nt has shape"):
        reference_kl(batch.logprobs, batch.old[:2], batch.mask)


# --- metrics ------------------------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    ratios = torch.tensor([[1.5, 0.5, 1.0], [3.0, 0.5, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    zeros = torch.zeros_like(ratios)
    rollout = -torch.tensor([[4.0, 1.0, 1.0], [0.5, 1.0, 9.0]], dtype=torch.float64).log()
    metrics = Clip(dual=2.0)(ratios.log(), zeros, torch.tensor([1.0, -1.0], dtype=torch.float64), mask, rollout).metrics
    expected = {
        "ratio_mean": 6.5 / 5,
        "ratio_square_mean": (2.25 + 0.25 + 1 + 9 + 0.25) / 5,
        "ratio_max": 3.0,
        "approx_kl": sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.0, 3.0, 0.5)) / 5,
        "clip_low_fraction": 1 / 5,  # row 2, ratio .5
        "clip_high_fraction": 1 / 5,  # row 1, ratio 1.5
        "dual_clip_fraction": 1 / 5,  # row 2, ratio 3
        "rollout_correction_mean": (2 + 1 + 1 + 0.5 + 1) / 5,
        "rollout_truncated_fraction": 1 / 5,
    }
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


def test_a_sequence_metric_counts_once_per_action_token() -> None:
    logs = torch.tensor([[0.2, 0.2, 0.2], [0.0, 5.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    metrics = GSPO()(logs, torch.zeros_like(logs), torch.ones(2, dtype=torch.float64), mask).metrics
    assert float(metrics["ratio_mean"]) == pytest.approx((3 * math.exp(0.2) + 1) / 4)
    assert float(metrics["clip_high_fraction"]) == pytest.approx(3 / 4)
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(0.2))


# --- errors -------------------------------------------------------------------------------------------------------


def test_fixed_needs_its_constant_at_the_call() -> None:
    objective = Clip(reduction="fixed")
    with pytest.raises(ValueError, match="set max_len"):
        objective(*one_token(1.0, 1.0))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clip(low=1.5), "clip range"),
        (lambda: Clip(high=-0.1), "clip range"),
        (lambda: Clip(dual=0.5), "dual"),
        (lambda: Clip(reduction="mean"), "unknown reduction 'mean'; known: token-mean"),
        (lambda: Clip(correction_cap=0.0), "correction_cap"),
        (lambda: CISPO(high=0.0), "cap"),
        (lambda: GSPO(low=-1e-3), "clip range"),
        (lambda: GMPO(clip=0.0), "clip range"),
        (lambda: SAPO(tau_pos=0.0), "temperatures"),
        (lambda: SAPO(kernel="step"), "kernel"),
        (lambda: SSPO(tau_neg=-1.0), "temperatures"),
        (lambda: SSPO(domain="linear"), "domain"),
    ],
)
def test_settings_without_meaning_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_shapes_and_masks_that_do_not_fit_are_named(make_batch: MakeBatch) -> None:
    b = make_batch(0)
    objective = Clip()
    with pytest.raises(ValueError, match="old_logprobs_nt has shape"):
        objective(b.logprobs, b.old[:, :3], b.advantages, b.mask)
    with pytest.raises(ValueError, match="action_mask_nt has shape"):
        objective(b.logprobs, b.old, b.advantages, b.mask[:3])
    with pytest.raises(ValueError, match="rollout_logprobs_nt has shape"):
        objective(b.logprobs, b.old, b.advantages, b.mask, b.rollout[:3])
    with pytest.raises(ValueError, match="advantages_n has shape"):
        objective(b.logprobs, b.old, b.advantages[:3], b.mask)
    with pytest.raises(ValueError, match="must be \\[trajectories, tokens\\]"):
        objective(b.logprobs[0], b.old[0], b.advantages, b.mask[0])
    with pytest.raises(ValueError, match="0 and 1"):
        objective(b.logprobs, b.old, b.advantages, 0.5 * b.mask)


def test_an_advantage_that_would_poison_the_loss_is_named(make_batch: MakeBatch) -> None:
    b = make_batch(0, with_empty_row=True)
    advantages = b.advantages.clone()
    advantages[-1] = math.nan  # no action tokens: no harm
    clean = float(Clip()(b.logprobs, b.old, b.advantages, b.mask).loss)
    assert float(Clip()(b.logprobs, b.old, advantages, b.mask).loss) == clean
    advantages[2] = math.nan
    with pytest.raises(ValueError, match=r"advantages_n\[2\] is nan"):
        Clip()(b.logprobs, b.old, advantages, b.mask)
