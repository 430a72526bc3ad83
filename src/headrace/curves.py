"""The numbers that a reward curve is judged by. Pure functions on sequences; nothing else of the project is imported.

``rewards`` are the mean outcomes of updates 1..T, in [0, 1] and in order; results are on the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

Area = Callable[[Sequence[float]], float]


def trapezoid_area(rewards: Sequence[float]) -> float:
    """Household area: ``mean over t of (r_t + r_{t+1}) / 2``, or ``r_1`` where there is only one update. ``ValueError`` for none."""
    _needed(rewards, 1, "an area")
    if len(rewards) == 1:
        return float(rewards[0])
    return fmean((first + second) / 2 for first, second in pairwise(rewards))


def paired_points(rewards: Sequence[float]) -> list[float]:
    """Math points: means of updates (1, 2), (3, 4), ...; an odd last update waits for its partner."""
    return [(first + second) / 2 for first, second in zip(rewards[0::2], rewards[1::2], strict=False)]


def mean_area(points: Sequence[float]) -> float:
    """Math area: the mean of the points (see :func:`paired_points`). ``ValueError`` for none."""
    _needed(points, 1, "an area")
    return fmean(points)


def end_reward(points: Sequence[float]) -> float:
    """The mean of the last five points (of all, where there are fewer). ``ValueError`` for none."""
    _needed(points, 1, "an end reward")
    return fmean(points[-5:])


def c10(points: Sequence[float], area: Area = trapezoid_area) -> float:
    """``(area(r_1..r_10) + mean(r_6..r_10)) / 2``. ``ValueError`` for fewer than ten points."""
    _needed(points, 10, "C10")
    return (area(points[:10]) + fmean(points[5:10])) / 2


@dataclass(frozen=True, slots=True)
class CurveSummary:
    """What a world's runs are judged by; ``c10`` is None for fewer than ten points."""

    area: float
    end: float
    c10: float | None


PAIRED_WORLDS = frozenset({"math"})
"""Worlds whose points are means of two updates and whose area is the points' mean; everywhere else an update is a point."""


def curve_summary(rewards: Sequence[float], world: str) -> CurveSummary:
    """Area, end reward and C10 by the rule of ``world`` (its name in a configuration). ``ValueError`` for no reward.

    A paired world's first update stands alone until its partner is there.
    """
    paired = world in PAIRED_WORLDS
    points = (paired_points(rewards) or list(rewards)) if paired else list(rewards)
    area = mean_area if paired else trapezoid_area
    return CurveSummary(area(points), end_reward(points), c10(points, area) if len(points) >= 10 else None)


def moving_average(values: Sequence[float], window: int = 5) -> list[float]:
    """Centred mean over ``window`` values, fewer at the ends; for the eye, never for a result."""
    if window < 1 or window % 2 == 0:
        raise ValueError(f"a centred window is an odd number of values, got {window}")
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _needed(values: Sequence[float], least: int, what: str) -> None:
    if len(values) < least:
        raise ValueError(f"{what} needs at least {least} point{'s' if least > 1 else ''}, got {len(values)}")
