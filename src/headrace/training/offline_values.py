"""Prompt values before training: a few attempts at every task with the initial policy (SPO, arXiv 2509.13232, section 3).

The results are kept under a hash of everything that made them, so matched runs of different recipes share one measurement.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.algorithms import prior_from_rollouts
from headrace.environments.base import Task
from headrace.files import write_whole
from headrace.rollout.trajectory import Failure, Prior, Trajectory


@dataclass(frozen=True, slots=True)
class TaskValue:
    """``successes`` (a sum of outcomes) in ``rollouts`` scored attempts; attempts that failed or were unscored are not among them."""

    task: str
    successes: float
    rollouts: int


def tally(tasks: Sequence[Task], results: Sequence[Trajectory | Failure]) -> list[TaskValue]:
    outcomes: dict[str, list[float]] = {task.id: [] for task in tasks}
    for result in results:
        if isinstance(result, Trajectory) and result.scored and result.action_tokens > 0:
            outcomes[result.dispatch.task].append(result.outcome)
    return [TaskValue(task, sum(values), len(values)) for task, values in outcomes.items()]


def priors(values: Sequence[TaskValue], mass: float) -> list[Prior]:
    """The events that seed a run's memory at version 0."""
    events = []
    for value in values:
        prior = prior_from_rollouts(value.successes, value.rollouts, mass)
        events.append(Prior(value.task, prior.alpha, prior.beta, 0, value.successes, value.rollouts))
    return events


def mean_success(values: Sequence[TaskValue]) -> float:
    rollouts = sum(value.rollouts for value in values)
    return sum(value.successes for value in values) / rollouts if rollouts else float("nan")


def stored(path: Path, tasks: Sequence[Task]) -> list[TaskValue] | None:
    """Values kept at ``path`` for exactly these tasks, or None. A damaged file counts as absent: it is measured again."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["values"]
        values = [TaskValue(str(row[0]), float(row[1]), int(row[2])) for row in rows]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return values if [value.task for value in values] == [task.id for task in tasks] else None


def store(path: Path, values: Sequence[TaskValue]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[value.task, value.successes, value.rollouts] for value in values]
    write_whole(path, json.dumps({"values": rows}) + "\n")


async def measure_or_load(
    path: Path,
    tasks: Sequence[Task],
    measure: Callable[[], Awaitable[Sequence[Trajectory | Failure]]],
    *,
    warn: Callable[[str], None] = lambda sentence: None,
) -> tuple[list[TaskValue], bool]:
    """The values at ``path``, measured by awaiting ``measure()`` and kept there when absent; and whether they were already there.
    Where they cannot be kept, ``warn`` is told: a measurement is not thrown away for that."""
    values = stored(path, tasks)
    if values is not None:
        return values, True
    values = tally(tasks, await measure())
    try:
        store(path, values)
    except OSError as error:
        warn(f"offline values could not be kept for other runs ({error}); run.cache names their folder")
    return values, False
