"""Which task to attempt next: the ones whose outcome is most uncertain, a little of everything else (SPO, arXiv 2509.13232)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any


def uncertainty_weight(value: float, floor: float = 0.05) -> float:
    """``sqrt(v (1 - v)) + floor``: the standard deviation of a success with probability v, plus a floor."""
    return math.sqrt(value * (1.0 - value)) + floor


class UncertaintySampler:
    """Draws tasks sequentially without replacement with probability proportional to ``sqrt(v (1 - v)) + floor``.

    The k-th draw of a run uses the k-th number of a stream that depends on ``seed`` alone, so that the position in the stream is
    the number of tasks drawn so far and nothing else is state. The result does not depend on the order of ``values``. Equal
    values give a uniform draw, which is what recipes without a memory use.
    """

    def __init__(self, seed: int, floor: float = 0.05) -> None:
        if not 0 < floor < math.inf:
            raise ValueError(f"the floor of the sampling weight must be positive and finite, got {floor}")
        self.seed = seed
        self.floor = floor
        self.drawn = 0

    def choose(self, values: Mapping[str, float], count: int, in_flight: Collection[str]) -> list[str]:
        """Up to ``count`` distinct tasks of ``values`` that are not ``in_flight``, in the order drawn; fewer when too few are free.

        Raises ValueError for a negative count or a value outside [0, 1].
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        busy = in_flight if isinstance(in_flight, (set, frozenset)) else set(in_flight)
        free = sorted(task for task in values if task not in busy)
        weights = [self._weight(task, values[task]) for task in free]
        chosen = []
        for _ in range(min(count, len(free))):
            cumulative = list(accumulate(weights))
            place = min(bisect_right(cumulative, self._next_uniform() * cumulative[-1]), len(free) - 1)
            chosen.append(free.pop(place))
            weights.pop(place)
        return chosen

    def _weight(self, task: str, value: float) -> float:
        if not 0 <= value <= 1:
            raise ValueError(f"the value of task {task!r} must lie in [0, 1], got {value}")
        return uncertainty_weight(value, self.floor)

    def _next_uniform(self) -> float:
        """The next number in [0, 1), with 53 random bits."""
        digest = blake2b(f"{self.seed}:{self.drawn}".encode(), digest_size=8).digest()
        self.drawn += 1
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53

    def state_dict(self) -> dict[str, Any]:
        """Seed, floor and position, JSON-able."""
        return {"seed": self.seed, "floor": self.floor, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was taken."""
        self.seed, self.floor, self.drawn = state["seed"], state["floor"], state["drawn"]
