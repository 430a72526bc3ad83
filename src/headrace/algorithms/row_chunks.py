"""Evaluate a sum over rows a few rows at a time, value and gradient together.

An objective is a scalar whose gradient with respect to the log-probabilities can be computed row by row. Doing so at once, in
pieces that fit the cache, needs one gradient tensor instead of a graph of a dozen intermediates of the batch's full size, and is
faster. The formulas stay plain torch code: this module differentiates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Sums = dict[str, Tensor]
"""Named scalars that add up over rows; names ending in ``_max`` are maxima."""

RowTerms = Callable[[Tensor, slice], tuple[Tensor, Sums]]
"""(log-probabilities of some rows in compute precision, which rows) -> (numerators [rows], sums for metrics)."""

_CHUNK_ELEMENTS = {"cpu": 1 << 17}
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 24


def sum_over_rows(logprobs_nt: Tensor, row_terms: RowTerms, dtype: torch.dtype) -> tuple[Tensor, Sums]:
    """The sum of all rows' numerators (float64 scalar, differentiable once with respect to ``logprobs_nt``) and the combined metric sums.

    Only ``logprobs_nt`` receives a gradient; it is computed here, in ``dtype``, if gradients are on and ``logprobs_nt`` wants
    one.
    """
    wants_gradient = torch.is_grad_enabled() and logprobs_nt.requires_grad
    values_nt = logprobs_nt.detach()
    gradient_nt = torch.empty(values_nt.shape, dtype=dtype, device=values_nt.device) if wants_gradient else None
    total = torch.zeros((), dtype=torch.float64, device=values_nt.device)
    sums: Sums = {}
    for rows in _chunks(values_nt):
        leaf_nt = values_nt[rows].to(dtype)
        if gradient_nt is None:
            numerators_n, partial = row_terms(leaf_nt, rows)
        else:
            leaf_nt = leaf_nt.detach().requires_grad_()
            numerators_n, partial = row_terms(leaf_nt, rows)
            (gradient_nt[rows],) = torch.autograd.grad(numerators_n.sum(), leaf_nt)
        total += numerators_n.detach().sum()
        _combine(sums, partial)
    if gradient_nt is not None:
        total = _WithGradient.apply(logprobs_nt, total, gradient_nt)  # type: ignore[no-untyped-call]
    return total, sums


def _chunks(values_nt: Tensor) -> Iterator[slice]:
    n, width = values_nt.shape
    elements = _CHUNK_ELEMENTS.get(values_nt.device.type, _CHUNK_ELEMENTS_ACCELERATOR)
    rows = max(elements // max(width, 1), 1)
    # At least one chunk, so that an empty batch still has its metrics.
    for start in range(0, max(n, 1), rows):
        yield slice(start, min(start + rows, n))


def _combine(sums: Sums, partial: Sums) -> None:
    for name, value in partial.items():
        if name not in sums:
            sums[name] = value
        elif name.endswith("_max"):
            sums[name] = torch.maximum(sums[name], value)
        else:
            sums[name] = sums[name] + value


class _WithGradient(torch.autograd.Function):
    """A value whose gradient is already known."""

    @staticmethod
    def forward(ctx: Any, logprobs_nt: Tensor, value: Tensor, gradient_nt: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_nt)
        ctx.dtype = logprobs_nt.dtype
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient_nt,) = ctx.saved_tensors
        return (gradient_nt * upstream).to(ctx.dtype), None, None
