"""What a run left on disk, read for people: configuration, metrics, evaluations, counts from the log, a sample of attempts."""

from __future__ import annotations

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import CONFIG_FILE
from headrace.records.ledger import effective
from headrace.records.metrics import UpdateMetrics, read_metrics
from headrace.records.run_store import RunReader
from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Event, Publication, Receipt, Restored, Trajectory
from headrace.training import evaluation
from headrace.training.evaluation import EVALUATIONS_FILE


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """Success on a split after so many updates, with its 95 % interval."""

    split: str
    update: int
    success: float
    low: float
    high: float
    attempts: int
    by_kind: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Used:
    """An attempt that was trained on."""

    dispatch: Dispatch
    receipt: Receipt
    consumption: Consumption
    version_at_use: int


@dataclass(slots=True)
class LogFacts:
    """Counts over the events that count, and every attempt that was trained on."""

    dispatched: int = 0
    received: int = 0
    drops_by_reason: Counter[str] = field(default_factory=Counter)
    drops_by_task: Counter[str] = field(default_factory=Counter)
    versions: int = 0
    restores: int = 0
    used: list[Used] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[tuple[int, Event]]) -> LogFacts:
        facts = cls(restores=sum(isinstance(event, Restored) for _, event in events))
        dispatches: dict[int, Dispatch] = {}
        receipts: dict[int, Receipt] = {}
        for _, event in effective(events):
            match event:
                case Dispatch():
                    dispatches[event.number] = event
                case Receipt():
                    receipts[event.dispatch] = event
                case Drop():
                    facts.drops_by_reason[event.reason] += 1
                    facts.drops_by_task[dispatches[event.dispatch].task] += 1
                case Consumption():
                    facts.used.append(Used(dispatches[event.dispatch], receipts[event.dispatch], event, facts.versions))
                case Publication():
                    facts.versions = event.version
                case _:
                    pass
        facts.dispatched, facts.received = len(dispatches), len(receipts)
        return facts


@dataclass(frozen=True, slots=True)
class RunData:
    """``name`` tells the run from the others of the same report. ``config_text`` is empty where the file is missing."""

    folder: Path
    name: str
    config_text: str
    config: Mapping[str, Any]
    metrics: Sequence[UpdateMetrics]
    evaluations: Sequence[EvaluationRow]
    facts: LogFacts

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", "unknown recipe"))

    @property
    def simulated(self) -> bool:
        return bool(self.setting("run", "clock") == "simulated")

    def setting(self, section: str, key: str) -> Any:
        """A value of the configuration, None where it is absent."""
        table = self.config.get(section)
        return table.get(key) if isinstance(table, Mapping) else None

    def kinds(self) -> list[str]:
        return sorted({kind for row in self.metrics for kind in row.success_by_kind})

    def splits(self) -> list[str]:
        return list(dict.fromkeys(row.split for row in self.evaluations))

    def of_split(self, split: str) -> list[EvaluationRow]:
        return sorted((row for row in self.evaluations if row.split == split), key=lambda row: row.update)


def read_runs(folders: Sequence[str | Path]) -> list[RunData]:
    """Every run, named so that the names differ. ``RunError`` where one is missing or damaged."""
    paths = [Path(folder) for folder in folders]
    return [_read_run(path, name) for path, name in zip(paths, distinct_names(paths), strict=True)]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents in front as it takes to tell them apart."""
    resolved = [path.resolve() for path in paths]
    for depth in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({i})" for i, path in enumerate(resolved, start=1)]


def sample(used: Sequence[Used], most: int) -> list[Used]:
    """At most ``most`` attempts that show the run: spread evenly over updates from first to last, and within an update over
    successes and failures of every kind in turn. The same run gives the same sample."""
    if len(used) <= most:
        return list(used)
    by_batch: dict[int, list[Used]] = defaultdict(list)
    for one in used:
        by_batch[one.consumption.batch].append(one)
    batches = _spread(sorted(by_batch), max(1, min(len(by_batch), most // 8)))
    share, extra = divmod(most, len(batches))
    chosen: list[Used] = []
    for i, batch in enumerate(batches):
        chosen += list(_in_turn(by_batch[batch]))[: share + (i < extra)]
    return chosen


def read_attempts(folder: Path, used: Sequence[Used]) -> Iterator[tuple[Used, Trajectory]]:
    with RunReader(folder) as reader:
        for one in used:
            yield one, reader.trajectory(one.dispatch.number)


def _read_run(folder: Path, name: str) -> RunData:
    with RunReader(folder) as reader:
        facts = LogFacts.of(list(reader.events()))
    path = folder / CONFIG_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [_evaluation(row) for row in evaluation.read(folder / EVALUATIONS_FILE)]
    scored = [row for row in rows if math.isfinite(row.success)]
    return RunData(folder, name, text, tomllib.loads(text), read_metrics(folder), scored, facts)


def _evaluation(row: Mapping[str, Any]) -> EvaluationRow:
    by_kind = {kind: float(result["success"]) for kind, result in row["by_kind"].items()}
    return EvaluationRow(row["split"], row["update"], row["success"], row["low"], row["high"], row["attempts"], by_kind)


def _spread(items: Sequence[int], count: int) -> list[int]:
    """``count`` items at even distances, the first and the last among them."""
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _in_turn(used: Sequence[Used]) -> Iterator[Used]:
    """One of each (kind, success) in turn, in the order of dispatches within each."""
    queues: dict[tuple[str, bool], list[Used]] = defaultdict(list)
    for one in sorted(used, key=lambda one: one.dispatch.number, reverse=True):
        queues[one.dispatch.kind, one.receipt.success].append(one)
    waiting = [queues[key] for key in sorted(queues)]
    while waiting:
        for queue in waiting:
            yield queue.pop()
        waiting = [queue for queue in waiting if queue]
