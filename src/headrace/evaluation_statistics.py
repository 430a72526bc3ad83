"""What an evaluation measures, with intervals: success, mean@k, pass@k, maj@k. Pure functions; nothing else of the project is imported.

Every estimate is a mean over tasks of one number per task, and its interval is about drawing other tasks of the same kind,
with the sampling of attempts in it. Attempts without a verdict (outcome NaN) are left out before anything is counted.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MAX_SUBSETS = 5_000  # more choices of k attempts than this are sampled instead of enumerated


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
    low, high = (centre - half) / scale, (centre + half) / scale
    return Interval(max(0.0, min(low, p)), min(1.0, max(high, p)))  # at p = 0 and 1 the formula is off by a rounding error


def bootstrap_interval(values_x: Sequence[float], *, confidence: float = 0.95, resamples: int = 4_000, seed: int = 0) -> Interval:
    """Percentile bootstrap interval for the mean of one number in [0, 1] per task (Efron 1979).

    Tasks are drawn anew with replacement ``resamples`` times. Where all values are equal that says nothing, and Wilson's
    interval is given, with the values as successes. ``ValueError`` for no values or a value outside [0, 1].
    """
    values = np.asarray(values_x, dtype=np.float64)
    if values.size == 0:
        raise ValueError("an interval needs at least one task")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("a task's value lies outside [0, 1]")
    if (values == values[0]).all():
        return wilson_interval(float(values.sum()), values.size)
    source = np.random.default_rng(seed)
    rows = max(1, 2_000_000 // values.size)  # bounds the memory of one block of resamples
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    means = [values[source.integers(0, values.size, (block, values.size))].mean(axis=1) for block in blocks]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Probability that at least one of ``k`` attempts drawn from ``attempts``, of which ``successes`` succeeded, is a success.

    ``1 - C(attempts - successes, k) / C(attempts, k)``: unbiased for the chance of k fresh attempts (Chen et al. 2021,
    arXiv 2107.03374). ``ValueError`` unless ``0 <= successes <= attempts`` and ``1 <= k <= attempts``.
    """
    if not 0 <= successes <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} needs 1 <= k <= attempts and 0 <= successes <= attempts, not {successes} of {attempts}")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def group_answers(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[int | None]:
    """A group number for each answer: equivalent answers share one, ``None`` (no answer) has none.

    Each answer is compared with the first of every group so far: ``same(answer, first)`` is called at most
    (answers x groups) times.
    """
    firsts: list[str] = []
    numbers: dict[str, int] = {}
    for answer in answers:
        if answer is None or answer in numbers:
            continue
        found = next((number for number, first in enumerate(firsts) if same(answer, first)), None)
        if found is None:
            found = len(firsts)
            firsts.append(answer)
        numbers[answer] = found
    return [None if answer is None else numbers[answer] for answer in answers]


def majority_at_k(groups: Sequence[int | None], outcomes: Sequence[float], k: int, *, seed: int = 0) -> float:
    """Expected outcome of the most frequent answer among ``k`` of the attempts (self-consistency, Wang et al. 2022, arXiv 2203.11171).

    ``groups[i]`` is the answer's group, ``outcomes[i]`` its outcome in [0, 1]; attempts without an answer have no vote, and
    without any vote the outcome is 0. Groups that tie share the choice equally. The mean is over all choices of k attempts,
    or over ``MAX_SUBSETS`` seeded ones where there are more. ``ValueError`` unless ``1 <= k <= len(groups)``.
    """
    if len(groups) != len(outcomes) or not 1 <= k <= len(groups):
        found = f"{len(groups)} and {len(outcomes)}"
        raise ValueError(f"maj@{k} needs one group and one outcome per attempt and 1 <= k <= attempts, not {found}")
    worth = {group: _mean([o for g, o in zip(groups, outcomes, strict=True) if g == group]) for group in set(groups) - {None}}
    return _mean([_elected([groups[i] for i in chosen], worth) for chosen in _choices(len(groups), k, seed)])


def _elected(votes: Sequence[int | None], worth: dict[int | None, float]) -> float:
    counts = {group: votes.count(group) for group in set(votes) - {None}}
    most = max(counts.values(), default=0)
    return _mean([worth[group] for group, count in counts.items() if count == most]) if counts else 0.0


def _choices(attempts: int, k: int, seed: int) -> Iterator[Sequence[int]]:
    if math.comb(attempts, k) <= MAX_SUBSETS:
        yield from itertools.combinations(range(attempts), k)
        return
    source = random.Random(seed)
    for _ in range(MAX_SUBSETS):
        yield source.sample(range(attempts), k)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- a whole evaluation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskAttempts:
    """The attempts at one task: outcomes in [0, 1] (1 is a success, NaN unscored) and, for maj@k, the answers given."""

    task: str
    outcomes: tuple[float, ...]
    answers: tuple[str | None, ...] | None = None

    def scored(self) -> TaskAttempts:
        """Without the unscored attempts."""
        kept = [i for i, outcome in enumerate(self.outcomes) if not math.isnan(outcome)]
        answers = None if self.answers is None else tuple(self.answers[i] for i in kept)
        return TaskAttempts(self.task, tuple(self.outcomes[i] for i in kept), answers)


@dataclass(frozen=True, slots=True)
class Estimate:
    """``name`` ("pass@4"), its value and interval; ``tasks`` are those it rests on, ``left_out`` had fewer than k scored attempts."""

    name: str
    value: float
    low: float
    high: float
    tasks: int
    left_out: int

    def sentence(self) -> str:
        rest = f", {self.left_out} left out" if self.left_out else ""
        return f"{self.name} {self.value:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.tasks} tasks{rest}"


def estimates(tasks: Sequence[TaskAttempts], k: int, *, same: Callable[[str, str], bool] | None = None, seed: int = 0) -> list[Estimate]:
    """mean@k, pass@k and, where attempts carry answers, maj@k, each with a 95 % bootstrap interval over tasks.

    Tasks with fewer than ``k`` scored attempts are left out of all three and counted. ``same`` says which answers are the
    same for maj@k (``None``: equal text). ``ValueError`` where no task has ``k`` scored attempts.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    scored = [task.scored() for task in tasks]
    usable = [task for task in scored if len(task.outcomes) >= k]
    if not usable:
        raise ValueError(f"no task has {k} scored attempts")
    values = {
        f"mean@{k}": [_mean(task.outcomes) for task in usable],
        f"pass@{k}": [pass_at_k(len(task.outcomes), sum(outcome >= 1 for outcome in task.outcomes), k) for task in usable],
    }
    if all(task.answers is not None for task in usable):
        equal = same or (lambda left, right: left == right)
        values[f"maj@{k}"] = [majority_at_k(group_answers(task.answers or (), equal), task.outcomes, k, seed=seed) for task in usable]
    left_out = len(tasks) - len(usable)
    found = []
    for name, values_x in values.items():
        interval = bootstrap_interval(values_x, seed=seed)
        found.append(Estimate(name, _mean(values_x), interval.low, interval.high, len(usable), left_out))
    return found
