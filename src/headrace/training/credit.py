"""Trajectories -> the advantages that the actor sees, with what every run reports about them.

Pure and deterministic: the training loop and ``headrace replay`` call the same function and get the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.algorithms import GROUP_MEASURES, Recipe, actor_residual, length_covariance, normalize_with_counts
from headrace.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Credit:
    """Advantages of one update, in the order of its trajectories.

    ``raw``: outcome minus the frozen prompt value (the outcome itself without a memory). ``advantages``: normalized under the recipe's
    measure; each action token of a trajectory gets its value. ``actor_residual``: the action-token mean of ``advantages``,
    what a token-mean loss sees beside a centred signal. ``length_covariance``: Cov(action tokens, raw), divisor n.
    ``cells``: sets that a statistic was taken over (groups, or 1 for the batch), ``degenerate`` of which had one member, one
    action token or no spread, so that their advantages are exactly 0.
    """

    raw: tuple[float, ...]
    advantages: tuple[float, ...]
    action_tokens: tuple[int, ...]
    measure: str
    actor_residual: float
    length_covariance: float
    cells: int
    degenerate: int


def credit(trajectories: Sequence[Trajectory], recipe: Recipe) -> Credit:
    """The advantages of one update under ``recipe``, in float64.

    Raises ValueError, naming the dispatch, for what may never enter a batch (no action tokens, an outcome that is not
    finite), for a dispatch without a frozen value where the recipe has a memory, and for one without a group where the
    measure compares siblings.
    """
    measure = recipe.resolved_measure
    raw = [_raw_advantage(trajectory, recipe) for trajectory in trajectories]
    lengths = [trajectory.action_tokens for trajectory in trajectories]
    raw_n, lengths_n = torch.tensor(raw, dtype=torch.float64), torch.tensor(lengths, dtype=torch.int64)
    groups_n = torch.tensor([_group(trajectory) for trajectory in trajectories]) if measure in GROUP_MEASURES else None
    normalized = normalize_with_counts(raw_n, lengths_n, measure, groups_n)
    return Credit(
        raw=tuple(raw),
        advantages=tuple(normalized.advantages_n.tolist()),
        action_tokens=tuple(lengths),
        measure=measure,
        actor_residual=float(actor_residual(normalized.advantages_n, lengths_n)),
        length_covariance=float(length_covariance(raw_n, lengths_n)),
        cells=normalized.cells,
        degenerate=normalized.degenerate,
    )


def _raw_advantage(trajectory: Trajectory, recipe: Recipe) -> float:
    dispatch = trajectory.dispatch
    if not math.isfinite(trajectory.outcome):
        raise ValueError(f"{_name(trajectory)} has no score ({trajectory.outcome}): drop it before the batch")
    if trajectory.action_tokens == 0:
        raise ValueError(f"{_name(trajectory)} has no action tokens: drop it before the batch")
    if recipe.memory is None:
        return trajectory.outcome
    if dispatch.alpha is None or dispatch.beta is None:
        raise ValueError(f"{_name(trajectory)} has no frozen value, but recipe {recipe.name!r} has a memory")
    return trajectory.outcome - dispatch.value


def _group(trajectory: Trajectory) -> int:
    if trajectory.dispatch.group is None:
        raise ValueError(f"{_name(trajectory)} belongs to no group, but the measure compares siblings")
    return trajectory.dispatch.group


def _name(trajectory: Trajectory) -> str:
    return f"dispatch {trajectory.dispatch.number} ({trajectory.dispatch.task})"
