"""Intervals for what an evaluation measures. Pure functions; nothing else of the project is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


def wilson_interval(successes: float, attempts: int, z: float = 1.959963984540054) -> Interval:
    """Wilson's score interval for a success probability; ``z`` is the normal quantile (1.96: 95 %). ``ValueError`` for no attempts."""
    if attempts < 1:
        raise ValueError("an interval needs at least one attempt")
    p, z2 = successes / attempts, z * z
    scale = 1 + z2 / attempts
    centre = p + z2 / (2 * attempts)
    half = z * math.sqrt(p * (1 - p) / attempts + z2 / (4 * attempts * attempts))
    return Interval(max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))
