"""What every objective shares: checking, masking, precision, the rollout correction, metrics, aggregation.

An objective maximizes J; its ``loss`` is -J. A subclass writes down only its term (and says which of it was clipped).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from .reductions import BatchTotals, action_lengths, divide, masked_row_mean, masked_row_sum, row_numerators
from .row_chunks import Sums, sum_over_rows

LOG_RATIO_LIMIT = 80.0
"""Log-ratios are held within +-80, where float32 still represents the ratio. Beyond, the value saturates and the gradient is 0."""


@dataclass(frozen=True)
class ObjectiveResult:
    """``loss``: scalar to minimize. ``metrics``: detached float64 scalars over action tokens (see :func:`combine_metrics`)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class ObjectiveFunction(Protocol):
    """The signature of an objective: any callable like this one can stand in for a built-in.

    ``logprobs_nt``, ``old_logprobs_nt`` and ``rollout_logprobs_nt`` (optional): log-probabilities of the sampled tokens [n, t]
    under the policy being trained, under the training engine at the start of the update, and as the generation engine reported
    them. ``advantages_n``: [n]. ``action_mask_nt``: bool or 0/1 numbers, 1 on tokens that the policy generated. ``totals``: see
    :class:`BatchTotals`.
    """

    def __call__(
        self,
        logprobs_nt: Tensor,
        old_logprobs_nt: Tensor,
        advantages_n: Tensor,
        action_mask_nt: Tensor,
        rollout_logprobs_nt: Tensor | None = None,
        *,
        totals: BatchTotals | None = None,
    ) -> ObjectiveResult: ...


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch in compute precision (float32 or better), with everything under the mask neutralized."""

    logprobs_nt: Tensor
    log_ratio_nt: Tensor  # ln r, 0 under the mask, held within +-80
    advantages_n: Tensor  # 0 in rows without action tokens
    mask_nt: Tensor  # bool
    lengths_n: Tensor
    rollout_log_ratio_nt: Tensor | None  # old - roll, 0 under the mask, held within +-80

    @property
    def advantages_n1(self) -> Tensor:
        return self.advantages_n.unsqueeze(1)


@dataclass(frozen=True)
class Terms:
    """An objective's terms, [n, t] or [n], before the rollout correction, and what to report about them.

    ``ratio``: the importance ratio that the objective weighs with. ``fractions``: named indicators or weights to be averaged over
    action tokens. Each has the shape [n, t] or [n]; a quantity of a whole sequence counts at each of its action tokens.
    """

    terms: Tensor
    ratio: Tensor
    fractions: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective(ABC):
    """Base of the built-in objectives.

    ``correction_cap`` (keyword only): the rollout correction multiplies each term, outside any min or dual clip, by
    ``sg[min(exp(old - roll), cap)]`` (truncated importance sampling, fengyao.notion.site/off-policy-rl), per token, or
    ``sg[min(exp(mean_t(old - roll)), cap)]`` for per-sequence objectives. It applies where ``rollout_logprobs_nt`` is given.
    """

    correction_cap: float = field(default=2.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.correction_cap > 0:
            raise ValueError(f"correction_cap must be positive, got {self.correction_cap}")

    @property
    def reduction(self) -> str:
        """How terms are averaged; it also decides which advantage measure is the aligned one."""
        return "token-mean"

    @property
    def max_len(self) -> int | None:
        """The constant of the reduction ``fixed``."""
        return None

    @property
    def per_sequence(self) -> bool:
        """Whether there is one term per sequence rather than per token."""
        return False

    @abstractmethod
    def terms(self, rows: Rows) -> Terms:
        """The terms of J for some rows."""

    def __call__(
        self,
        logprobs_nt: Tensor,
        old_logprobs_nt: Tensor,
        advantages_n: Tensor,
        action_mask_nt: Tensor,
        rollout_logprobs_nt: Tensor | None = None,
        *,
        totals: BatchTotals | None = None,
    ) -> ObjectiveResult:
        """The loss ``-J`` and its metrics for one micro-batch.

        Shapes and meanings as in :class:`ObjectiveFunction`; any floating dtype, computed in float32 or better. The gradient
        reaches ``logprobs_nt`` only, once (no second derivatives). Whatever lies under the mask, NaN and infinities included, has
        no effect. Raises ValueError for shapes that differ, a mask that is not 0/1, a non-finite advantage of a row with action
        tokens, and ``fixed`` without max_len.
        """
        _check(logprobs_nt, old_logprobs_nt, advantages_n, action_mask_nt, rollout_logprobs_nt)
        lengths_n = action_lengths(action_mask_nt)
        advantages_n = _checked_advantages(advantages_n.detach(), lengths_n)
        own = BatchTotals.of_lengths(lengths_n)
        dtype = torch.float32
        for tensor in (logprobs_nt, old_logprobs_nt, rollout_logprobs_nt):
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)

        def evaluate(leaf_nt: Tensor, part: slice) -> tuple[Tensor, Sums]:
            rollout_nt = None if rollout_logprobs_nt is None else rollout_logprobs_nt[part].detach()
            old_nt, mask_nt = old_logprobs_nt[part].detach(), action_mask_nt[part].bool()
            rows = _rows(leaf_nt, old_nt, rollout_nt, advantages_n[part].to(dtype), mask_nt, lengths_n[part])
            return self._evaluate(rows)

        numerator, sums = sum_over_rows(logprobs_nt, evaluate, dtype)
        loss = -divide(numerator, self.reduction, own if totals is None else totals, self.max_len)
        return ObjectiveResult(loss.to(dtype), _finish(sums, own))

    def _evaluate(self, rows: Rows) -> tuple[Tensor, Sums]:
        evaluated = self.terms(rows)
        terms = evaluated.terms
        with torch.no_grad():
            sums = _metric_sums(rows, evaluated)
            correction = self._correction(rows)
            if correction is not None:
                sums["rollout_correction_mean"] = _token_sum(correction.clamp(max=self.correction_cap), rows)
                sums["rollout_truncated_fraction"] = _token_sum((correction > self.correction_cap).to(terms.dtype), rows)
        if correction is not None:
            terms = terms * correction.clamp(max=self.correction_cap)
        if self.per_sequence:
            return terms.masked_fill(rows.lengths_n == 0, 0.0).to(torch.float64), sums
        return row_numerators(terms, rows.mask_nt, rows.lengths_n, self.reduction), sums

    def _correction(self, rows: Rows) -> Tensor | None:
        """The rollout weight before truncation, per token [n, t] or per sequence [n]."""
        if rows.rollout_log_ratio_nt is None:
            return None
        logs = rows.rollout_log_ratio_nt
        if self.per_sequence:
            logs = masked_row_mean(logs, rows.mask_nt, rows.lengths_n)
        return torch.exp(logs)

    def __str__(self) -> str:
        """Name and settings, without those that are off and without the usual correction cap."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "correction_cap"}
        if self.correction_cap != 2.0:
            shown["correction_cap"] = self.correction_cap
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items() if value is not None)})"


def _rows(leaf_nt: Tensor, old_nt: Tensor, rollout_nt: Tensor | None, advantages_n: Tensor, mask_nt: Tensor, lengths_n: Tensor) -> Rows:
    """Neutralize before anything is computed: what is masked here reaches no exp and receives no gradient."""
    dtype = leaf_nt.dtype
    logprobs_nt = torch.where(mask_nt, leaf_nt, 0.0)
    old_nt = torch.where(mask_nt, old_nt.to(dtype), 0.0)
    log_ratio_nt = (logprobs_nt - old_nt).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rollout_log_ratio_nt = None
    if rollout_nt is not None:
        rollout_log_ratio_nt = (old_nt - torch.where(mask_nt, rollout_nt.to(dtype), 0.0)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Rows(logprobs_nt, log_ratio_nt, advantages_n, mask_nt, lengths_n, rollout_log_ratio_nt)


def _metric_sums(rows: Rows, evaluated: Terms) -> Sums:
    """Sums over action tokens; :func:`_finish` divides them."""
    ratio = evaluated.ratio.detach()
    valid = rows.mask_nt if ratio.dim() == 2 else rows.lengths_n > 0
    ratio = ratio.masked_fill(~valid, 0.0).to(torch.float64)
    log_ratio_nt = rows.log_ratio_nt.detach()  # 0 under the mask, where k3 is 0 too
    sums = {
        "ratio_mean": _token_sum(ratio, rows),
        "ratio_square_mean": _token_sum(ratio.square(), rows),
        "ratio_max": ratio.amax() if ratio.numel() else ratio.sum(),
        "approx_kl": (torch.expm1(log_ratio_nt) - log_ratio_nt).sum(dtype=torch.float64),
    }
    for name, value in evaluated.fractions.items():
        sums[name] = _token_sum(value.detach(), rows)
    return sums


def _token_sum(values: Tensor, rows: Rows) -> Tensor:
    """Sum over action tokens of a quantity per token [n, t] or per sequence [n]: a float64 scalar."""
    if values.dim() == 1:
        return (values.masked_fill(rows.lengths_n == 0, 0.0).to(torch.float64) * rows.lengths_n).sum()
    if values.dtype == torch.bool:
        return (values & rows.mask_nt).sum().to(torch.float64)
    return masked_row_sum(values, rows.mask_nt).sum()


def _finish(sums: Sums, totals: BatchTotals) -> dict[str, Tensor]:
    return {name: value if name.endswith("_max") else divide(value, "token-mean", totals) for name, value in sums.items()}


def _check(logprobs_nt: Tensor, old_nt: Tensor, advantages_n: Tensor, mask_nt: Tensor, rollout_nt: Tensor | None) -> None:
    if logprobs_nt.dim() != 2:
        raise ValueError(f"logprobs_nt must be [trajectories, tokens], got shape {tuple(logprobs_nt.shape)}")
    for name, tensor in (("old_logprobs_nt", old_nt), ("action_mask_nt", mask_nt), ("rollout_logprobs_nt", rollout_nt)):
        if tensor is not None and tensor.shape != logprobs_nt.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but logprobs_nt has {tuple(logprobs_nt.shape)}")
    if advantages_n.shape != logprobs_nt.shape[:1]:
        raise ValueError(f"advantages_n has shape {tuple(advantages_n.shape)}, but there are {len(logprobs_nt)} trajectories")
    if mask_nt.dtype != torch.bool and bool(((mask_nt != 0) & (mask_nt != 1)).any()):
        raise ValueError("action_mask_nt must hold bools or the numbers 0 and 1")


def _checked_advantages(advantages_n: Tensor, lengths_n: Tensor) -> Tensor:
    """Advantages with 0 in rows without action tokens; ValueError for a row that would poison the loss."""
    advantages_n = advantages_n.masked_fill(lengths_n == 0, 0.0)
    broken_n = ~torch.isfinite(advantages_n)
    if bool(broken_n.any()):
        row = int(broken_n.nonzero()[0])
        raise ValueError(f"advantages_n[{row}] is {float(advantages_n[row])}: drop an unscored trajectory before the loss")
    return advantages_n
