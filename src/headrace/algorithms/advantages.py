"""From raw advantages to what the actor sees: normalization under a stated measure.

A raw advantage is ``A_i = R_i - v_i``, or ``A_i = R_i`` for group methods. Every action token of trajectory i gets the same
normalized value ``(A_i - mu) / (sigma + 1e-8)``. The *measure* says how trajectories are weighted in mu and sigma:

| measure | mu | sigma^2 |
| --- | --- | --- |
| ``trajectory`` (SPO, arXiv 2509.13232) | mean of A | sum (A - mu)^2 / (n - 1) |
| ``action-token`` (SPO++, arXiv 2608.24870) | sum L A / sum L | sum L (A - mu)^2 / (sum L - 1) |
| ``group`` (GRPO, arXiv 2402.03300) | mean of the group | sum over the group (A - mu)^2 / (G - 1) |
| ``group-mean`` (Dr. GRPO, arXiv 2503.20783) | mean of the group | none: divided by 1 |
| ``leave-one-out`` (RLOO, arXiv 2402.14740) | mean of the others of the group | none |
| ``none`` | 0 | none |

Public trainers add 1e-4 (TRL) or 1e-6 (verl) to a group's standard deviation; here it is 1e-8 in every measure. Statistics are
two-pass in float64, over everything passed in: one call covers the whole update, all ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Measure = Literal["trajectory", "action-token", "group", "group-mean", "leave-one-out", "none"]
MEASURES: tuple[str, ...] = get_args(Measure)
GROUP_MEASURES = frozenset({"group", "group-mean", "leave-one-out"})
EPSILON = 1e-8


@dataclass(frozen=True)
class Normalized:
    """Normalized advantages and what had to be set aside.

    ``cells`` is the number of sets that a statistic was taken over: groups for group measures, 1 for the batch, 0 for ``none``.
    ``degenerate`` of them had one member, one action token or zero spread, so that all their advantages are exactly 0.
    ``excluded`` trajectories had no action token or no finite advantage: they are in no statistic, and their advantage is 0.
    """

    advantages_n: Tensor
    cells: int
    degenerate: int
    excluded: int


def normalize(advantages_n: Tensor, action_tokens_n: Tensor, measure: str, groups_n: Tensor | None = None) -> Tensor:
    """Normalize raw advantages under ``measure`` (the table above).

    ``advantages_n``: floating point [n]. ``action_tokens_n``: [n], the number L_i of trained tokens by the loss mask.
    ``groups_n``: [n] integer ids in any order, needed by the group measures. Returns [n] with the dtype and device of
    ``advantages_n``, detached.

    Degenerate batches and groups (one member, zero spread, one action token) give exactly 0, never NaN. Trajectories with L_i = 0
    or a non-finite advantage are left out of every statistic and get 0. Raises ValueError for an unknown measure, missing groups
    or shapes that differ.
    """
    return normalize_with_counts(advantages_n, action_tokens_n, measure, groups_n).advantages_n


def normalize_with_counts(advantages_n: Tensor, action_tokens_n: Tensor, measure: str, groups_n: Tensor | None = None) -> Normalized:
    """:func:`normalize`, with the counts that every run reports."""
    lengths_n = torch.as_tensor(action_tokens_n)
    groups_n = None if groups_n is None else torch.as_tensor(groups_n)
    _check(advantages_n, lengths_n, measure, groups_n)
    # A few thousand numbers: float64 on the CPU is exact enough, the same on every device, and costs nothing.
    raw_n = advantages_n.detach().to("cpu", torch.float64)
    weights_n = lengths_n.to("cpu", torch.float64)
    used_n = (weights_n > 0) & torch.isfinite(raw_n)
    out_n = torch.zeros_like(raw_n)
    cells, degenerate = 0, 0
    if measure == "none":
        out_n[used_n] = raw_n[used_n]
    elif bool(used_n.any()):
        cell_n = torch.zeros(len(raw_n), dtype=torch.int64) if groups_n is None or measure not in GROUP_MEASURES else groups_n.to("cpu")
        out_n[used_n], cells, degenerate = _normalize_cells(raw_n[used_n], weights_n[used_n], cell_n[used_n], measure)
    result_n = out_n.to(advantages_n.device, advantages_n.dtype)
    return Normalized(result_n, cells, degenerate, int((~used_n).sum()))


def _normalize_cells(raw_n: Tensor, lengths_n: Tensor, cell_n: Tensor, measure: str) -> tuple[Tensor, int, int]:
    """Normalize within each cell (the batch or a group); also the number of cells and of degenerate ones."""
    ids, index_n = torch.unique(cell_n, return_inverse=True)

    def total(values_n: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.float64).index_add_(0, index_n, values_n)

    weights_n = lengths_n if measure == "action-token" else torch.ones_like(lengths_n)
    mass_c = total(weights_n)
    mean_c = total(weights_n * raw_n) / mass_c
    high_c = torch.full_like(mass_c, -torch.inf).scatter_reduce_(0, index_n, raw_n, "amax")
    low_c = torch.full_like(mass_c, torch.inf).scatter_reduce_(0, index_n, raw_n, "amin")
    # Equal values are compared as such: their mean may differ from them by a rounding, which a division would blow up.
    degenerate_c = (high_c == low_c) | (mass_c <= 1)
    spare_c = (mass_c - 1).clamp(min=1)
    centred_n = raw_n - mean_c[index_n]
    if measure == "leave-one-out":
        out_n = centred_n * (mass_c / spare_c)[index_n]
    elif measure == "group-mean":
        out_n = centred_n
    else:
        sigma_c = (total(weights_n * centred_n.square()) / spare_c).sqrt()
        out_n = centred_n / (sigma_c + EPSILON)[index_n]
    return out_n.masked_fill(degenerate_c[index_n], 0.0), len(ids), int(degenerate_c.sum())


def actor_residual(advantages_n: Tensor, action_tokens_n: Tensor) -> Tensor:
    """The mean advantage over action tokens, ``sum_i L_i A_i / sum_i L_i``: what a token-mean loss sees as its baseline error.

    Exactly what the action-token measure makes 0; under the trajectory measure it equals ``Cov_n(L, A) / mean(L)``. Report it in
    every run. Returns a scalar of float32 or better; 0 without action tokens.
    """
    weights_n = torch.as_tensor(action_tokens_n).to(advantages_n.device, torch.float64)
    weighted_n = torch.where(weights_n > 0, weights_n * advantages_n.to(torch.float64), 0.0)
    dtype = torch.promote_types(advantages_n.dtype, torch.float32)
    return (weighted_n.sum() / weights_n.sum().clamp(min=1)).to(dtype)


def length_covariance(advantages_n: Tensor, action_tokens_n: Tensor) -> Tensor:
    """``Cov_n(L, A)`` with divisor n: whether longer attempts are the worse ones.

    Returns a scalar of float32 or better; 0 for an empty batch.
    """
    lengths_n = torch.as_tensor(action_tokens_n).to(advantages_n.device, torch.float64)
    raw_n = advantages_n.to(torch.float64)
    n = max(len(raw_n), 1)
    covariance = ((lengths_n - lengths_n.sum() / n) * (raw_n - raw_n.sum() / n)).sum() / n
    return covariance.to(torch.promote_types(advantages_n.dtype, torch.float32))


def _check(advantages_n: Tensor, lengths_n: Tensor, measure: str, groups_n: Tensor | None) -> None:
    if measure not in MEASURES:
        raise ValueError(f"unknown measure {measure!r}; known: {', '.join(MEASURES)}")
    if advantages_n.dim() != 1 or not advantages_n.is_floating_point():
        raise ValueError(f"advantages must be a floating-point vector, got {advantages_n.dtype} of shape {tuple(advantages_n.shape)}")
    if lengths_n.shape != advantages_n.shape:
        raise ValueError(f"action_tokens_n has shape {tuple(lengths_n.shape)}, but advantages_n has {tuple(advantages_n.shape)}")
    if bool((lengths_n < 0).any()):
        raise ValueError("action_tokens_n counts tokens: it must not be negative")
    if measure in GROUP_MEASURES:
        if groups_n is None:
            raise ValueError(f"measure {measure!r} needs groups_n, the group id of each trajectory")
        if groups_n.shape != advantages_n.shape or groups_n.is_floating_point():
            raise ValueError(f"groups_n must be {len(advantages_n)} integer ids, got {groups_n.dtype} of shape {tuple(groups_n.shape)}")
