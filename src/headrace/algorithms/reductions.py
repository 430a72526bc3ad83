"""How terms become one number: the only module of the algorithms that divides by a count of tokens or sequences.

With the mask ``m_it`` (1 on action tokens), ``L_i = sum_t m_it`` and terms ``l_it`` (or ``l_i`` of a whole sequence):

| reduction | value |
| --- | --- |
| ``token-mean`` | sum_it m_it l_it / sum_it m_it |
| ``sequence-mean`` | mean_i (sum_t m_it l_it / L_i) |
| ``fixed`` | sum_it m_it l_it / (n * max_len), max_len a configured constant, never the padded width |
| sequence terms | mean_i l_i |

Rows with L_i = 0 contribute nothing and are not counted in n; a batch that is all masked gives 0, still differentiable. What lies
under the mask never matters. Sums run in float64, so that a batch and its micro-batches agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Reduction = Literal["token-mean", "sequence-mean", "fixed"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


@dataclass(frozen=True)
class BatchTotals:
    """Counts of one whole optimizer step, over all its micro-batches and ranks.

    ``sequences``: trajectories with at least one action token; ``tokens``: action tokens. Given to an objective for each
    micro-batch, they make the micro-batch losses *add up* to the loss of the step. Where a framework averages gradients over
    ranks, multiply each loss by the number of ranks.
    """

    sequences: int
    tokens: int

    def __post_init__(self) -> None:
        if self.sequences < 0 or self.tokens < 0:
            raise ValueError(f"totals must not be negative, got {self.sequences} sequences and {self.tokens} tokens")

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(self.sequences + other.sequences, self.tokens + other.tokens)

    @classmethod
    def of(cls, action_mask_nt: Tensor) -> BatchTotals:
        """Count a mask [n, t] of bool or 0/1 numbers."""
        return cls.of_lengths(action_lengths(action_mask_nt))

    @classmethod
    def of_lengths(cls, lengths_n: Tensor) -> BatchTotals:
        """Count from the numbers of action tokens [n]."""
        sequences, tokens = torch.stack([(lengths_n > 0).sum(), lengths_n.sum().to(torch.int64)]).tolist()
        return cls(int(sequences), int(tokens))


def action_lengths(action_mask_nt: Tensor) -> Tensor:
    """``L_i``, the number of action tokens of each row: int64 [n]."""
    return action_mask_nt.sum(dim=-1, dtype=torch.int64)


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless the name is known."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")


def masked_row_mean(values_nt: Tensor, mask_nt: Tensor, lengths_n: Tensor) -> Tensor:
    """``sum_t m_it x_it / L_i``: float64 [n], 0 where L_i = 0. ``mask_nt`` is bool."""
    return masked_row_sum(values_nt, mask_nt) / lengths_n.clamp(min=1)


def masked_row_sum(values_nt: Tensor, mask_nt: Tensor) -> Tensor:
    """``sum_t m_it x_it``: float64 [n]. ``mask_nt`` is bool."""
    return values_nt.masked_fill(~mask_nt, 0.0).sum(dim=-1, dtype=torch.float64)


def row_numerators(terms_nt: Tensor, mask_nt: Tensor, lengths_n: Tensor, reduction: str) -> Tensor:
    """What each row adds to the numerator of a reduction of token terms: float64 [n]."""
    if reduction == "sequence-mean":
        return masked_row_mean(terms_nt, mask_nt, lengths_n)
    return masked_row_sum(terms_nt, mask_nt)


def divide(numerator: Tensor, reduction: str, totals: BatchTotals, max_len: int | None = None) -> Tensor:
    """Divide a summed numerator by what the reduction averages over; 0 stays 0 where there is nothing to average.

    Raises ValueError for ``fixed`` without a positive ``max_len``.
    """
    check_reduction(reduction)
    if reduction == "token-mean":
        return numerator / max(totals.tokens, 1)
    if reduction == "sequence-mean":
        return numerator / max(totals.sequences, 1)
    if max_len is None or max_len <= 0:
        raise ValueError(f"the reduction 'fixed' divides by n * max_len: set max_len to a positive number of tokens (it is {max_len})")
    return numerator / (max(totals.sequences, 1) * max_len)


def reduce_tokens(
    terms_nt: Tensor,
    action_mask_nt: Tensor,
    reduction: str = "token-mean",
    *,
    totals: BatchTotals | None = None,
    max_len: int | None = None,
) -> Tensor:
    """Reduce token terms [n, t] to a scalar of the terms' dtype, float32 at least.

    For a loss of your own; the built-in objectives use the same parts.

    ``action_mask_nt``: bool or 0/1 numbers. ``totals``: see :class:`BatchTotals`; None where this call is the whole step.
    """
    mask_nt = action_mask_nt.bool()
    lengths_n = action_lengths(mask_nt)
    check_reduction(reduction)
    numerator = row_numerators(terms_nt, mask_nt, lengths_n, reduction).sum()
    value = divide(numerator, reduction, totals or BatchTotals.of_lengths(lengths_n), max_len)
    return value.to(torch.promote_types(terms_nt.dtype, torch.float32))


def reduce_sequences(terms_n: Tensor, action_mask_nt: Tensor, *, totals: BatchTotals | None = None) -> Tensor:
    """Mean of sequence terms [n] over the rows with action tokens: a scalar of the terms' dtype, float32 at least."""
    lengths_n = action_lengths(action_mask_nt.bool())
    numerator = terms_n.masked_fill(lengths_n == 0, 0.0).sum(dtype=torch.float64)
    value = divide(numerator, "sequence-mean", totals or BatchTotals.of_lengths(lengths_n))
    return value.to(torch.promote_types(terms_n.dtype, torch.float32))


def combine_metrics(parts: Sequence[tuple[Mapping[str, Tensor | float], int]]) -> dict[str, float]:
    """Metrics of a step from those of its micro-batches, each with its number of action tokens.

    Every metric of an objective is a mean over action tokens (a quantity of a whole sequence counts at each of its tokens), so
    that token-weighted means are exact; names ending in ``_max`` take the maximum. Micro-batches without action tokens are
    skipped.
    """
    combined: dict[str, float] = {}
    total = sum(tokens for _, tokens in parts)
    for metrics, tokens in parts:
        if tokens == 0:
            continue
        for name, value in metrics.items():
            if name.endswith("_max"):
                combined[name] = max(combined.get(name, -math.inf), float(value))
            else:
                combined[name] = combined.get(name, 0.0) + float(value) * (tokens / total)
    return combined
