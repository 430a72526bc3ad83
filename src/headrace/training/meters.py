"""What an update was like: facts of its batch, its credit, the learner's result and the clock, put into one record."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, pstdev
from typing import Any

from headrace.curves import curve_summary
from headrace.records.metrics import MetricsFile, UpdateMetrics, objective_fields
from headrace.records.trackers import Tracker
from headrace.rollout import clock
from headrace.rollout.trajectory import Trajectory
from headrace.training.credit import Credit
from headrace.training.learner import UpdateResult


class Meters:
    """Counts time by what it went to, and writes a line per update.

    ``elapsed`` gives the run's clock. ``world`` names the rule of its curve
    (``curve_summary``). ``rows`` are those of the updates before (a resumed run has some).
    """

    def __init__(
        self,
        file: MetricsFile,
        elapsed: Callable[[], float],
        *,
        world: str = "",
        rows: Sequence[UpdateMetrics] = (),
        tracker: Tracker | None = None,
        on_update: Callable[[UpdateMetrics], None] | None = None,
    ) -> None:
        self._file = file
        self._elapsed = elapsed
        self._world = world
        self._rewards = [row.reward for row in rows]
        self._tracker = tracker
        self._on_update = on_update
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._drops: Counter[str] = Counter()
        for row in rows:
            self._drops.update(row.drops)
        self._began = elapsed()

    @contextmanager
    def time(self, what: str) -> Iterator[None]:
        """Seconds of the run's clock spent inside go to ``what``: training, waiting, publication or checkpoint."""
        began = clock.now()
        try:
            yield
        finally:
            self._spent[what] += clock.now() - began

    def updated(
        self,
        number: int,
        batch: Sequence[Trajectory],
        credit: Credit,
        result: UpdateResult,
        drops: Counter[str],
        version: int,
        dispatched_under: int,
    ) -> UpdateMetrics:
        """The record of update ``number``. ``drops``: of the whole run, by reason. ``dispatched_under``: the version that was
        newest when the batch was taken."""
        self._rewards.append(fmean(trajectory.outcome for trajectory in batch))
        end = self._elapsed()
        new_drops = drops - self._drops
        self._drops = Counter(drops)
        metrics = UpdateMetrics(
            update=number,
            version=version,
            clock=end,
            seconds=end - self._began,
            area=curve_summary(self._rewards, self._world).area,
            drops=dict(new_drops),
            training_seconds=self._spent["training"],
            waiting_seconds=self._spent["waiting"],
            publication_seconds=self._spent["publication"],
            checkpoint_seconds=self._spent["checkpoint"],
            **batch_facts(batch, dispatched_under),
            **credit_facts(credit),
            **learner_facts(result),
        )
        self._began = end
        self._spent.clear()
        self._file.append(metrics)
        if self._tracker is not None:
            self._tracker.log(number, metrics.scalars())
        if self._on_update is not None:
            self._on_update(metrics)
        return metrics

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def batch_facts(batch: Sequence[Trajectory], newest: int) -> dict[str, Any]:
    """What the attempts themselves say. ``newest`` is the version that was published when the batch was taken."""
    kinds = sorted({trajectory.dispatch.kind for trajectory in batch})
    by_kind = {kind: [t.success for t in batch if t.dispatch.kind == kind] for kind in kinds}
    staleness = [newest - trajectory.dispatch.version for trajectory in batch]
    values = [trajectory.dispatch.value for trajectory in batch if trajectory.dispatch.alpha is not None]
    return {
        "attempts": len(batch),
        "reward": fmean(trajectory.outcome for trajectory in batch),
        "success": fmean(trajectory.success for trajectory in batch),
        "value": fmean(values) if values else None,
        "success_by_kind": {kind: fmean(successes) for kind, successes in by_kind.items()},
        "attempts_by_kind": {kind: len(successes) for kind, successes in by_kind.items()},
        "success_tokens": _mean([t.action_tokens for t in batch if t.success]),
        "failure_tokens": _mean([t.action_tokens for t in batch if not t.success]),
        "staleness_mean": fmean(staleness),
        "staleness_max": max(staleness),
        "unmatched_actions": sum(trajectory.unmatched_actions for trajectory in batch),
        "actions": sum(len(trajectory.turns) for trajectory in batch),
        "sampled_tokens": sum(trajectory.action_tokens for trajectory in batch),
        "generation_seconds": math.fsum(trajectory.generation_seconds for trajectory in batch),
        "environment_seconds": math.fsum(trajectory.environment_seconds for trajectory in batch),
    }


def credit_facts(credit: Credit) -> dict[str, Any]:
    return {
        "length_advantage_covariance": credit.length_covariance,
        "actor_residual": credit.actor_residual,
        "advantage_mean": fmean(credit.advantages),
        "advantage_std": pstdev(credit.advantages),
        "degenerate": credit.degenerate,
        "sets": credit.cells,
    }


def learner_facts(result: UpdateResult) -> dict[str, Any]:
    """``kl`` is that of the whole update where the learner measured it, else the mean while training."""
    metrics = result.metrics
    fields = objective_fields(metrics.objective)
    fields["kl"] = metrics.kl if metrics.kl_after is None else metrics.kl_after
    fields["other"] = {
        **fields["other"],
        "effective_sample_size": metrics.effective_sample_size,
        "rollout_mismatch": metrics.rollout_mismatch,
        "gradient_norm_max": metrics.gradient_norm_max,
        "skipped_steps": float(metrics.skipped_steps),
    }
    return {
        **fields,
        "loss": metrics.loss,
        "reference_kl": metrics.reference_kl,
        "entropy": metrics.entropy,
        "gradient_norm": metrics.gradient_norm,
        "learning_rate": metrics.learning_rate,
        "trained_tokens": metrics.context_tokens,
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
