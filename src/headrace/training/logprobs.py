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
from torch.autograd.function import once_differentiable

RECTANGLE = 1 << 22
"""Elements of the largest temporary: 16 MiB in float32."""
_ROWS = 1024
_MM_HAS_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)


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


@dataclass(frozen=True)
class _Rectangle:
    """Some positions times some of the vocabulary, its logits in compute precision.

    ``rows`` and ``columns`` say which. ``logits_rc`` may be overwritten. ``column_r``: each row's target as a column of
    this rectangle where ``inside_r``, else any column.
    """

    rows: slice
    columns: slice
    logits_rc: Tensor
    column_r: Tensor
    inside_r: Tensor


@dataclass(frozen=True)
class _Problem:
    hidden_mh: Tensor
    weight_vh: Tensor
    bias_v: Tensor | None
    target_m: Tensor
    scale: float
    softcap: float | None
    rectangle: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden_mh.dtype, torch.float32)

    @property
    def half(self) -> bool:
        """Whether hidden states and weight are both stored in the same half precision."""
        return self.hidden_mh.dtype == self.weight_vh.dtype != self.dtype

    @property
    def operand_dtype(self) -> torch.dtype:
        """Of the factors of the logits. Tensor cores multiply half-precision factors exactly and add in float32 as they are."""
        return self.weight_vh.dtype if self.half and self.hidden_mh.is_cuda and _MM_HAS_OUT_DTYPE else self.dtype

    def rectangles(self) -> Iterator[_Rectangle]:
        """All of [m, V]; the vocabulary outside, so that low-precision weights are converted once."""
        positions, vocabulary = self.hidden_mh.shape[0], self.weight_vh.shape[0]
        # All the vocabulary where it is small; else many rows, so that the weight is read rarely.
        high = max(1, min(positions, max(_ROWS, self.rectangle // vocabulary), self.rectangle))
        for columns in _slices(vocabulary, max(1, self.rectangle // high)):
            weight_ch = self.weight_vh[columns].to(self.operand_dtype)
            bias_c = None if self.bias_v is None else self.bias_v[columns].to(self.dtype)
            for rows in _slices(positions, high):
                hidden_rh = self.hidden_mh[rows].to(self.operand_dtype)
                column_r = self.target_m[rows] - columns.start
                inside_r = (column_r >= 0) & (column_r < weight_ch.shape[0])
                logits_rc = self._logits(hidden_rh, weight_ch, bias_c)
                yield _Rectangle(rows, columns, logits_rc, column_r.clamp(0, weight_ch.shape[0] - 1), inside_r)

    def _logits(self, hidden_rh: Tensor, weight_ch: Tensor, bias_c: Tensor | None) -> Tensor:
        wide = hidden_rh.dtype == self.dtype
        logits_rc = hidden_rh @ weight_ch.T if wide else torch.mm(hidden_rh, weight_ch.T, out_dtype=self.dtype)
        if bias_c is not None:
            logits_rc += bias_c
        if self.softcap is not None:
            logits_rc = logits_rc.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_rc if self.scale == 1.0 else logits_rc.mul_(self.scale)

    def slope(self, logits_rc: Tensor) -> Tensor | None:
        """d logits / d (hidden @ weight^T), None where it is 1 everywhere."""
        if self.softcap is not None:
            return (logits_rc / (self.softcap * self.scale)).square_().neg_().add_(1.0).mul_(self.scale)
        return None if self.scale == 1.0 else logits_rc.new_tensor(self.scale)


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


class _Running:
    """Log-sum-exp, entropy and chosen logits of all positions, over the rectangles seen so far."""

    def __init__(self, problem: _Problem, entropy: bool) -> None:
        zeros = problem.hidden_mh.new_zeros(problem.hidden_mh.shape[0], dtype=problem.dtype)
        self.entropy = entropy
        self.top_m = zeros - torch.inf
        self.total_m = zeros.clone()  # sum of exp(logit - top)
        self.weighted_m = zeros.clone()  # sum of exp(logit - top) (logit - top)
        self.chosen_m = zeros

    def add(self, part: _Rectangle) -> None:
        rows, logits_rc = part.rows, part.logits_rc
        picked_r = logits_rc.gather(1, part.column_r[:, None])[:, 0]
        self.chosen_m[rows] = torch.where(part.inside_r, picked_r, self.chosen_m[rows])
        top_r = torch.maximum(self.top_m[rows], logits_rc.amax(1))
        drop_r = self.top_m[rows] - top_r  # -inf at a row's first rectangle
        before_r = self.total_m[rows] * drop_r.exp()
        logits_rc.sub_(top_r[:, None])
        if self.entropy:
            moved_r = torch.where(before_r > 0, before_r * drop_r, 0.0)
            self.weighted_m[rows] = self.weighted_m[rows] * drop_r.exp() + moved_r + logits_rc.exp().mul_(logits_rc).sum(1)
        self.total_m[rows] = before_r + logits_rc.exp_().sum(1)
        self.top_m[rows] = top_r


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_mh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        target_m: Tensor,
        scale: float,
        softcap: float | None,
        entropy: bool,
        rectangle: int,
    ) -> tuple[Tensor, Tensor]:
        problem = _Problem(hidden_mh, weight_vh, bias_v, target_m, scale, softcap, rectangle)
        running = _Running(problem, entropy)
        for part in problem.rectangles():
            running.add(part)
        log_total_m = running.total_m.log()
        normalizer_m = running.top_m + log_total_m
        entropies_m = log_total_m - running.weighted_m / running.total_m if entropy else normalizer_m.new_zeros(0)
        ctx.save_for_backward(hidden_mh, weight_vh, bias_v, target_m, normalizer_m, entropies_m)
        ctx.settings = (scale, softcap, rectangle)
        if not entropy:
            ctx.mark_non_differentiable(entropies_m)
        return running.chosen_m - normalizer_m, entropies_m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_m: Tensor, grad_entropies_m: Tensor) -> tuple[Tensor | None, ...]:
        hidden_mh, weight_vh, bias_v, target_m, normalizer_m, entropies_m = ctx.saved_tensors
        problem = _Problem(hidden_mh, weight_vh, bias_v, target_m, *ctx.settings)
        inputs = (hidden_mh, weight_vh, bias_v)
        grads = [
            torch.zeros_like(tensor, dtype=problem.dtype) if tensor is not None and needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        for part in problem.rectangles():
            entropy = None if not len(entropies_m) else (grad_entropies_m[part.rows], entropies_m[part.rows])
            grad_rc = _grad_logits(problem, part, normalizer_m[part.rows], grad_logprobs_m[part.rows], entropy)
            if grads[2] is not None:
                grads[2][part.columns] += grad_rc.sum(0)
            if problem.half:  # as autograd would, with sums over rectangles in float32
                grad_rc = grad_rc.to(weight_vh.dtype)
            if grads[0] is not None:
                grads[0][part.rows] += grad_rc @ weight_vh[part.columns].to(grad_rc.dtype)
            if grads[1] is not None:
                grads[1][part.columns] += grad_rc.T @ hidden_mh[part.rows].to(grad_rc.dtype)
        typed = [None if grad is None else grad.to(tensor.dtype) for tensor, grad in zip(inputs, grads, strict=True)]
        return (*typed, *(None,) * 5)


def _grad_logits(
    problem: _Problem, part: _Rectangle, normalizer_r: Tensor, grad_logprobs_r: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient with respect to hidden @ weight^T + bias, overwriting the rectangle's logits.

    d logprob / d logit_j = [j chosen] - p_j;  d entropy / d logit_j = -p_j (ln p_j + entropy).
    """
    slope = problem.slope(part.logits_rc)
    logprobs_rc = part.logits_rc.sub_(normalizer_r[:, None])
    coefficient = -grad_logprobs_r[:, None]
    if entropy is not None:
        grad_entropies_r, entropies_r = entropy
        coefficient = coefficient - grad_entropies_r[:, None] * (logprobs_rc + entropies_r[:, None])
    grad_rc = logprobs_rc.exp_().mul_(coefficient)
    grad_rc.scatter_add_(1, part.column_r[:, None], torch.where(part.inside_r, grad_logprobs_r, 0.0)[:, None])
    return grad_rc if slope is None else grad_rc.mul_(slope)


_apply: Any = _TokenScores.apply
