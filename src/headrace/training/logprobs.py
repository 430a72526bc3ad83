"""Log-probabilities (and entropies) of chosen tokens without the full logits.

The output head is applied to the hidden states that predict a chosen token and to nothing else, in float32 or better,
rectangle by rectangle over (positions, vocabulary) with a running log-sum-exp; the backward pass computes each rectangle
again. The peak beside inputs and gradients is a few rectangles of ``RECTANGLE`` elements, whatever the vocabulary and the
number of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RECTANGLE = 1 << 22
"""Elements of the largest temporary: 16 MiB in float32."""
_ROWS = 1024


@dataclass(frozen=True)
class OutputHead:
    """logits = scale * cap(hidden @ weight^T + bias), cap(x) = softcap * tanh(x / softcap) or x where softcap is None.

    weight [V, H], bias [V] or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class TokenScores:
    """Of each chosen token: its log-probability and (if asked for) the entropy in nats of its distribution; [m], float32 or better."""

    logprobs_m: Tensor
    entropies_m: Tensor | None = None


def token_scores(
    hidden_mh: Tensor, head: OutputHead, target_m: Tensor, *, entropy: bool = False, rectangle: int = RECTANGLE
) -> TokenScores:
    """Scores of ``target_m`` (int64 [m]) under the distributions that ``hidden_mh`` [m, H] predicts.

    Differentiable in hidden states, weight and bias, through the entropy too. Computes in float32 (float64 for float64 hidden
    states) with autocast off. ``rectangle``: elements of the largest temporary.
    """
    with torch.autocast(hidden_mh.device.type, enabled=False):
        logprobs, entropies = _apply(hidden_mh, head.weight, head.bias, target_m, head.scale, head.softcap, entropy, rectangle)
    return TokenScores(logprobs, entropies if entropy else None)


def scores_from_logits(logits_mv: Tensor, target_m: Tensor, *, entropy: bool = False) -> TokenScores:
    """The same from full logits [m, V]: for models whose head is no plain matrix. Memory grows with m * V."""
    logprobs_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32)).log_softmax(-1)
    chosen = logprobs_mv.gather(1, target_m[:, None])[:, 0]
    return TokenScores(chosen, -(logprobs_mv.exp() * logprobs_mv).sum(-1) if entropy else None)


def _rectangles(rows: int, vocabulary: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a rectangle: all the vocabulary where it is small, else about ``_ROWS`` rows, to read the weight rarely."""
    high = max(1, min(rows, max(_ROWS, elements // vocabulary), elements))
    return high, max(1, min(vocabulary, elements // high))


def _spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, size):
        yield start, min(total, start + size)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    logits = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if scale == 1.0 else logits.mul_(scale)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        softcap: float | None,
        entropy: bool,
        rectangle: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        m, vocabulary = hidden.shape[0], weight.shape[0]
        high, wide = _rectangles(m, vocabulary, rectangle)
        top = hidden.new_full((m,), -torch.inf, dtype=dtype)  # running maximum
        total = hidden.new_zeros(m, dtype=dtype)  # sum of exp(logit - top)
        weighted = hidden.new_zeros(m, dtype=dtype)  # sum of exp(logit - top) * (logit - top)
        chosen = hidden.new_zeros(m, dtype=dtype)
        for v0, v1 in _spans(vocabulary, wide):
            columns, shift = weight[v0:v1].to(dtype), None if bias is None else bias[v0:v1].to(dtype)
            for r0, r1 in _spans(m, high):
                logits = _logits(hidden[r0:r1].to(dtype), columns, shift, scale, softcap)
                column = target[r0:r1] - v0
                inside = (column >= 0) & (column < v1 - v0)
                picked = logits.gather(1, column.clamp(0, v1 - v0 - 1)[:, None])[:, 0]
                chosen[r0:r1] = torch.where(inside, picked, chosen[r0:r1])
                higher = torch.maximum(top[r0:r1], logits.amax(1))
                drop = top[r0:r1] - higher  # -inf at the first rectangle
                shrink = drop.exp()
                logits.sub_(higher[:, None])
                if entropy:
                    moved = torch.where(total[r0:r1] > 0, total[r0:r1] * shrink * drop, 0.0)
                    mass = logits.exp()
                    weighted[r0:r1] = weighted[r0:r1] * shrink + moved + mass.mul_(logits).sum(1)
                total[r0:r1] = total[r0:r1] * shrink + logits.exp_().sum(1)
                top[r0:r1] = higher
        log_total = total.log()
        normalizer = top + log_total
        entropies = log_total - weighted / total if entropy else hidden.new_zeros(0, dtype=dtype)
        ctx.save_for_backward(hidden, weight, bias, target, normalizer, entropies)
        ctx.settings = (scale, softcap, entropy, rectangle)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return chosen - normalizer, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_chosen, grad_entropy = grads
        hidden, weight, bias, target, normalizer, entropies = ctx.saved_tensors
        scale, softcap, entropy, rectangle = ctx.settings
        dtype = normalizer.dtype
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if need_bias else None
        m, vocabulary = hidden.shape[0], weight.shape[0]
        high, wide = _rectangles(m, vocabulary, rectangle)
        for v0, v1 in _spans(vocabulary, wide):
            columns, shift = weight[v0:v1].to(dtype), None if bias is None else bias[v0:v1].to(dtype)
            for r0, r1 in _spans(m, high):
                rows = hidden[r0:r1].to(dtype)
                logits = _logits(rows, columns, shift, scale, softcap)
                slope = None if softcap is None else 1.0 - (logits / (softcap * scale)).square_()
                logprobs = logits.sub_(normalizer[r0:r1, None])
                coefficient = -grad_chosen[r0:r1, None]
                if entropy:
                    coefficient = coefficient - grad_entropy[r0:r1, None] * (logprobs + entropies[r0:r1, None])
                grad = logprobs.exp_().mul_(coefficient)
                column = target[r0:r1] - v0
                inside = (column >= 0) & (column < v1 - v0)
                grad.scatter_add_(1, column.clamp(0, v1 - v0 - 1)[:, None], torch.where(inside, grad_chosen[r0:r1], 0.0)[:, None])
                if scale != 1.0:
                    grad.mul_(scale)
                if slope is not None:
                    grad.mul_(slope)
                if grad_hidden is not None:
                    grad_hidden[r0:r1].addmm_(grad, columns)
                if grad_weight is not None:
                    grad_weight[v0:v1].addmm_(grad.T, rows)
                if grad_bias is not None:
                    grad_bias[v0:v1] += grad.sum(0)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


_apply: Any = _TokenScores.apply
