"""What an update reports, summed over micro-batches, steps and the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.algorithms import combine_metrics
from headrace.training.optimizer import StepReport
from headrace.training.packing import MicroBatch


@dataclass(frozen=True)
class LearnerMetrics:
    """Means are over action tokens of all steps, non-finite ones left out, unless said otherwise.

    ``loss``: mean over steps. ``kl``: k3 estimate of KL(old || policy) while training, from samples of old; ``kl_after``: the
    same under the weights that the update ends with, on a sample of its trajectories (None where that is off).
    ``gradient_norm``: before clipping, mean and maximum over steps. ``effective_sample_size``: (mean ratio)^2 / mean squared
    ratio, in (0, 1]. ``rollout_mismatch``: mean |old - rollout|, the two engines' disagreement together with policy lag;
    ``rollout_mismatch_max`` its maximum. ``reference_kl``: as it enters the loss, before its coefficient.
    ``objective``: the objective's own metrics (ratios, clip fractions, correction).
    ``trained_tokens`` and ``context_tokens``: action tokens and tokens fed, each epoch counted.
    """

    loss: float
    kl: float
    kl_after: float | None
    entropy: float | None
    gradient_norm: float
    gradient_norm_max: float
    learning_rate: float
    effective_sample_size: float
    rollout_mismatch: float
    rollout_mismatch_max: float
    reference_kl: float | None
    objective: Mapping[str, float]
    steps: int
    skipped_steps: int
    trained_tokens: int
    context_tokens: int


@dataclass
class StepMeter:
    """Sums over the micro-batches of one step of ``tokens`` action tokens."""

    tokens: int
    loss: float = 0.0
    finite: bool = True
    context_tokens: int = 0
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    entropy: float | None = None
    reference_kl: float | None = None
    objective: list[tuple[Mapping[str, Tensor | float], int]] = field(default_factory=list)

    @torch.no_grad()
    def add(
        self,
        micro: MicroBatch,
        loss: Tensor,
        metrics: Mapping[str, Tensor],
        old_nt: Tensor,
        entropies_m: Tensor | None,
        reference: Tensor | None,
    ) -> None:
        value = float(loss)
        self.loss += value
        self.finite = self.finite and math.isfinite(value)
        self.context_tokens += micro.rows.tokens
        self.objective.append((metrics, micro.rows.scored))
        gap_nt = (old_nt - micro.rollout_nt).abs().masked_fill(~micro.mask_nt, 0.0)
        if gap_nt.numel():
            self.mismatch += float(gap_nt.sum(dtype=torch.float64))
            self.mismatch_max = max(self.mismatch_max, float(gap_nt.max()))
        if entropies_m is not None:
            self.entropy = (self.entropy or 0.0) + float(entropies_m.sum(dtype=torch.float64))
        if reference is not None:
            self.reference_kl = (self.reference_kl or 0.0) + float(reference)


class UpdateMeter:
    """Sums over the steps of one update."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepMeter, StepReport]] = []
        self._move = 0.0
        self._moved_tokens = 0

    def add(self, step: StepMeter, report: StepReport) -> None:
        self._steps.append((step, report))

    def add_move(self, logprobs_nt: Tensor, old_nt: Tensor, mask_nt: Tensor) -> None:
        """``exp(d) - 1 - d`` with d = new - old: its mean over samples of old estimates KL(old || new) and is never negative."""
        change = (logprobs_nt - old_nt)[mask_nt].to(torch.float64).clamp(-80.0, 80.0)
        self._move += float((torch.expm1(change) - change).sum())
        self._moved_tokens += int(change.numel())

    def result(self) -> LearnerMetrics:
        good = [(step, report) for step, report in self._steps if report.taken]
        tokens = sum(step.tokens for step, _ in good)
        objective = combine_metrics([part for step, _ in good for part in step.objective])
        mean, square = objective.get("ratio_mean", math.nan), objective.get("ratio_square_mean", math.nan)
        return LearnerMetrics(
            loss=_mean([step.loss for step, _ in good]),
            kl=objective.get("approx_kl", math.nan),
            kl_after=self._move / self._moved_tokens if self._moved_tokens else None,
            entropy=_per_token([step.entropy for step, _ in good], tokens),
            gradient_norm=_mean([report.gradient_norm for _, report in good]),
            gradient_norm_max=max((report.gradient_norm for _, report in good), default=math.nan),
            learning_rate=self._steps[-1][1].learning_rate if self._steps else math.nan,
            effective_sample_size=mean**2 / square if square else math.nan,
            rollout_mismatch=sum(step.mismatch for step, _ in good) / max(tokens, 1),
            rollout_mismatch_max=max((step.mismatch_max for step, _ in good), default=0.0),
            reference_kl=_mean_or_none([step.reference_kl for step, _ in good]),
            objective=objective,
            steps=len(good),
            skipped_steps=len(self._steps) - len(good),
            trained_tokens=tokens,
            context_tokens=sum(step.context_tokens for step, _ in self._steps),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _mean_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _per_token(sums: list[float | None], tokens: int) -> float | None:
    known = [value for value in sums if value is not None]
    return sum(known) / max(tokens, 1) if known else None
