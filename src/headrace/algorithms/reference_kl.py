"""KL to a reference policy, off by default in every recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from .objective_base import LOG_RATIO_LIMIT
from .reductions import BatchTotals, action_lengths, check_reduction, divide, row_numerators
from .row_chunks import Sums, sum_over_rows


def reference_kl(
    logprobs_nt: Tensor,
    ref_logprobs_nt: Tensor,
    action_mask_nt: Tensor,
    reduction: str = "token-mean",
    *,
    totals: BatchTotals | None = None,
    max_len: int | None = None,
) -> Tensor:
    """The k3 estimate of KL(policy || reference): ``exp(ref - lp) - (ref - lp) - 1`` per token, never negative (GRPO, 2402.03300).

    Shapes [n, t]; mask of bool or 0/1 numbers; reduction, ``totals`` and ``max_len`` as for the objective it is added to, with a
    coefficient of your own. Not multiplied by the rollout correction. Differentiable once with respect to ``logprobs_nt``; a
    scalar of float32 or better. Raises ValueError for shapes that differ.
    """
    check_reduction(reduction)
    for name, tensor in (("ref_logprobs_nt", ref_logprobs_nt), ("action_mask_nt", action_mask_nt)):
        if tensor.shape != logprobs_nt.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but logprobs_nt has {tuple(logprobs_nt.shape)}")
    dtype = torch.promote_types(torch.promote_types(logprobs_nt.dtype, ref_logprobs_nt.dtype), torch.float32)
    lengths_n = action_lengths(action_mask_nt.bool())

    def evaluate(leaf_nt: Tensor, part: slice) -> tuple[Tensor, Sums]:
        mask_nt = action_mask_nt[part].bool()
        reference_nt = torch.where(mask_nt, ref_logprobs_nt[part].detach().to(dtype), 0.0)
        gap_nt = (reference_nt - torch.where(mask_nt, leaf_nt, 0.0)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return row_numerators(torch.expm1(gap_nt) - gap_nt, mask_nt, lengths_n[part], reduction), {}

    numerator, _ = sum_over_rows(logprobs_nt, evaluate, dtype)
    return divide(numerator, reduction, totals or BatchTotals.of_lengths(lengths_n), max_len).to(dtype)
