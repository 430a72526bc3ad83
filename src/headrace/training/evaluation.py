"""How good a policy is: sampled (or greedy) attempts at fixed tasks with fixed seeds, and an interval for the success."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.environments.worlds import Answers
from headrace.evaluation_statistics import Estimate, Interval, TaskAttempts, estimates, wilson_interval
from headrace.files import write_whole
from headrace.rollout.trajectory import Failure, Trajectory

EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class KindResult:
    success: float
    attempts: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Success on one split. ``low`` and ``high``: 95 % Wilson interval over attempts at these very tasks (it covers the
    randomness of sampling, not that of drawing other tasks). ``failed`` attempts ended in an error or a deadline and are
    not among ``attempts``. ``estimates`` are mean@k, pass@k and maj@k of success, with intervals for other tasks of the same
    kind; none where no task has ``k`` scored attempts. ``without_room``: attempts among them, no successes, in which
    ``rollout.context_limit`` left no room for a first reply."""

    split: str
    update: int
    success: float
    low: float
    high: float
    attempts: int
    failed: int
    mean_outcome: float
    by_kind: dict[str, KindResult]
    k: int = 1
    estimates: tuple[Estimate, ...] = ()
    without_room: int = 0

    def sentence(self) -> str:
        return f"{self.split}: success {self.success:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.attempts} attempts"


def summarize(
    split: str, update: int, results: Sequence[Trajectory | Failure], *, k: int | None = None, answers: Answers | None = None
) -> Evaluation:
    """``k`` of mean@k and so on: by default the number of attempts at each task. ``answers`` of the world make maj@k possible."""
    scored = [result for result in results if isinstance(result, Trajectory) and result.scored]
    successes = sum(result.success for result in scored)
    interval = wilson_interval(successes, len(scored)) if scored else Interval(0.0, 1.0)
    kinds: dict[str, list[bool]] = {}
    for result in scored:
        kinds.setdefault(result.dispatch.kind, []).append(result.success)
    tasks = _by_task(results, answers)
    k = k or max((len(task.outcomes) for task in tasks), default=1)
    enough = any(len(task.scored().outcomes) >= k for task in tasks)
    return Evaluation(
        split=split,
        update=update,
        success=successes / len(scored) if scored else float("nan"),
        low=interval.low,
        high=interval.high,
        attempts=len(scored),
        failed=len(results) - len(scored),
        mean_outcome=sum(result.outcome for result in scored) / len(scored) if scored else float("nan"),
        by_kind={kind: KindResult(sum(values) / len(values), len(values)) for kind, values in sorted(kinds.items())},
        k=k,
        estimates=tuple(estimates(tasks, k, same=answers.same if answers is not None else None)) if enough else (),
        without_room=sum(result.reason == "context" and not result.turns for result in scored),
    )


def _by_task(results: Sequence[Trajectory | Failure], answers: Answers | None) -> list[TaskAttempts]:
    tasks: dict[str, list[Trajectory | Failure]] = {}
    for result in results:
        tasks.setdefault(result.dispatch.task, []).append(result)
    return [TaskAttempts(task, tuple(map(_success, tried)), _answers(tried, answers)) for task, tried in tasks.items()]


def _success(result: Trajectory | Failure) -> float:
    """1 or 0, NaN where there is no verdict: all estimates are of the success that ``Evaluation.success`` is the share of."""
    return float(result.success) if isinstance(result, Trajectory) and result.scored else float("nan")


def _answers(tried: Sequence[Trajectory | Failure], answers: Answers | None) -> tuple[str | None, ...] | None:
    return None if answers is None else tuple(_answer(one, answers) for one in tried)


def _answer(result: Trajectory | Failure, answers: Answers) -> str | None:
    """A reply that ran out of its budget never reached the world, so what it says is no answer."""
    if isinstance(result, Failure) or not result.turns or result.reason == "reply":
        return None
    return answers.read(result.turns[-1].action)


def append(path: Path, evaluation: Evaluation) -> None:
    """One JSON line; an evaluation of the same split and update replaces the older one (a resumed run measures again)."""
    rows = [row for row in read(path) if (row["split"], row["update"]) != (evaluation.split, evaluation.update)]
    _write(path, [*rows, asdict(evaluation)])


def keep(path: Path, updates: int) -> None:
    """Only the evaluations after at most ``updates`` updates: what a resumed run takes back leaves none."""
    if path.exists():
        _write(path, [row for row in read(path) if int(str(row["update"])) <= updates])


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
