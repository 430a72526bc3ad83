"""A loss of your own, in one file of your own: Simple Policy Optimization (arXiv 2401.16025).

Instead of clipping, each token pays a quadratic price for leaving the trust region:

    l = r A - |A| / (2 eps) (r - 1)^2

whose gradient ``A r (1 - sign(A) (r - 1) / eps)`` vanishes exactly at the edge, r = 1 + eps for A > 0 and r = 1 - eps for A < 0.

Everything that a loss must get right besides its formula (padding, NaN under the mask, bfloat16, micro-batches that add up,
rollout correction, metrics) comes from the base class: only the term is written here. Name the objective in a configuration as
``examples/own_loss.py:objective``. An objective can also be any function with the same signature, ``plain_objective`` below,
which needs nothing from Headrace but the reductions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.algorithms import BatchTotals, Objective, ObjectiveResult, Rows, Terms, reduce_tokens


@dataclass(frozen=True)
class QuadraticPenalty(Objective):
    """``r A - |A| / (2 eps) (r - 1)^2``, token-mean."""

    eps: float = 0.2

    def terms(self, rows: Rows) -> Terms:
        ratio_nt, advantages_n1 = torch.exp(rows.log_ratio_nt), rows.advantages_n1
        penalty_nt = advantages_n1.abs() / (2 * self.eps) * (ratio_nt - 1).square()
        outside_nt = (ratio_nt - 1).abs() > self.eps
        return Terms(ratio_nt * advantages_n1 - penalty_nt, ratio_nt, {"outside_fraction": outside_nt})


objective = QuadraticPenalty()


def plain_objective(
    logprobs_nt: Tensor,
    old_logprobs_nt: Tensor,
    advantages_n: Tensor,
    action_mask_nt: Tensor,
    rollout_logprobs_nt: Tensor | None = None,
    *,
    totals: BatchTotals | None = None,
) -> ObjectiveResult:
    """The same loss as a plain function, without rollout correction."""
    mask_nt = action_mask_nt.bool()
    log_ratio_nt = torch.where(mask_nt, logprobs_nt.float() - old_logprobs_nt.float(), 0.0)  # before any exp
    ratio_nt, advantages_n1 = log_ratio_nt.exp(), advantages_n.float().unsqueeze(1)
    terms_nt = ratio_nt * advantages_n1 - advantages_n1.abs() / 0.4 * (ratio_nt - 1).square()
    loss = -reduce_tokens(terms_nt, mask_nt, "token-mean", totals=totals)
    return ObjectiveResult(loss, {"ratio_mean": reduce_tokens(ratio_nt.detach(), mask_nt)})
