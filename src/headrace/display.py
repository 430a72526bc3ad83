"""What a person sees while something runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headrace.training.observer import Observer

if TYPE_CHECKING:
    from headrace.records.metrics import UpdateMetrics
    from headrace.training.evaluation import Evaluation
    from headrace.training.offline_values import TaskValue

_BARS = "▁▂▃▄▅▆▇█"


@contextmanager
def watching(plain: bool) -> Iterator[Observer]:
    """An observer for the length of a command; everything it shows goes to stderr, so that stdout holds results only."""
    if plain or not sys.stderr.isatty():
        yield PlainLines()
        return
    display = LiveDisplay()
    with display.live:
        yield display


class PlainLines:
    """A line per phase, every few seconds while it lasts, and one per update."""

    EVERY = 5.0

    def __init__(self) -> None:
        self._total: int | None = None
        self._said = self._began = time.monotonic()
        self._first_update: int | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        self._total, self._first_update = total, None
        self._said = self._began = time.monotonic()
        self._say(name + (f" ({total})" if total else ""))

    def progress(self, done: int, text: str = "") -> None:
        if time.monotonic() - self._said >= self.EVERY:
            self._said = time.monotonic()
            self._say(f"  {done}{f'/{self._total}' if self._total else ''} {text}".rstrip())

    def update(self, metrics: UpdateMetrics) -> None:
        if self._first_update is None:
            self._first_update = metrics.update
        left = f", {_clock(self._seconds_left(metrics.update))} left" if self._total else ""
        self._say(f"  update {metrics.update + 1}{f'/{self._total}' if self._total else ''}: {facts(metrics)}{left}")

    def note(self, text: str) -> None:
        self._say(text)

    def _seconds_left(self, update: int) -> float:
        """By the pace of the updates that this process has made (a resumed run begins in the middle)."""
        done = update + 1 - (self._first_update or 0)
        return (time.monotonic() - self._began) / done * max(0, (self._total or 0) - update - 1)

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveDisplay:
    """A progress bar for the phase under way, the latest update's figures, and the reward so far as a small curve."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("starting", total=None, text="")
        self._rewards: list[float] = []
        self._latest: UpdateMetrics | None = None
        self.live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4, transient=True)

    def phase(self, name: str, total: int | None = None) -> None:
        self._progress.reset(self._task, description=name, total=total, text="")

    def progress(self, done: int, text: str = "") -> None:
        self._progress.update(self._task, completed=done, text=text)

    def update(self, metrics: UpdateMetrics) -> None:
        self._latest = metrics
        self._rewards.append(metrics.reward)
        self._progress.update(self._task, completed=metrics.update + 1)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress]
        if self._latest is not None:
            parts.append(Text(f"{curve(self._rewards)}  {facts(self._latest)}"))
        return Group(*parts)


def curve(values: list[float], width: int = 40) -> str:
    """The last ``width`` values, each in [0, 1], as block characters."""
    return "".join(_BARS[max(0, min(7, round(7 * value)))] for value in values[-width:])


def facts(metrics: UpdateMetrics) -> str:
    """The figures of an update that a person watches."""
    parts = [f"reward {metrics.reward:.3f}", f"success {metrics.success:.3f}"]
    if math.isfinite(metrics.sampled_tokens_per_second):
        parts.append(f"{metrics.sampled_tokens_per_second:,.0f} tokens/s")
    parts.append(f"{metrics.seconds:.1f} s")
    dropped = sum(metrics.drops.values())
    if dropped:
        parts.append(f"{dropped} dropped")
    return ", ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def evaluation_table(evaluation: Evaluation, *, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(asdict(evaluation)))
        return
    table = Table("kind", "success", "attempts", title=f"{evaluation.split}, {evaluation.attempts} attempts", title_justify="left")
    for kind, result in evaluation.by_kind.items():
        table.add_row(kind, f"{result.success:.3f}", str(result.attempts))
    table.add_section()
    table.add_row("all", f"{evaluation.success:.3f} [{evaluation.low:.3f}, {evaluation.high:.3f}]", str(evaluation.attempts))
    console = Console()
    console.print(table)
    for line in _beside_the_table(evaluation):
        console.print(line, highlight=False, soft_wrap=True)


def _beside_the_table(evaluation: Evaluation) -> Iterator[str]:
    k = evaluation.k
    yield from (estimate.sentence() for estimate in evaluation.estimates)
    if not evaluation.estimates:
        yield f"No task has {k} scored attempts, so there is no mean@{k}, pass@{k} or maj@{k}."
    if evaluation.without_room:
        yield f"{evaluation.without_room} attempts had no room for a reply and count as no success; raise rollout.context_limit."
    if evaluation.failed:
        yield f"{evaluation.failed} attempts ended in an error or at a deadline and are not counted."


def values_table(values: Sequence[TaskValue]) -> None:
    """The distribution of prompt values: how many tasks had so many successes."""
    table = Table("successes", "rollouts", "tasks", title=f"{len(values)} tasks", title_justify="left")
    counts = Counter((round(value.successes, 2), value.rollouts) for value in values)
    for (successes, rollouts), tasks in sorted(counts.items()):
        table.add_row(f"{successes:g}", str(rollouts), str(tasks))
    Console().print(table)


def recipes_table() -> None:
    from headrace.algorithms import RECIPES

    table = Table("recipe", "memory", "measure", "objective", "group", "paper")
    for name, recipe in RECIPES.items():
        rho = "" if recipe.memory is None else f", rho {recipe.rho if recipe.rho is not None else 'by drift'}"
        memory = f"{recipe.memory}{rho}" if recipe.memory else "-"
        table.add_row(name, memory, recipe.measure, str(recipe.objective), str(recipe.group_size), recipe.paper or "Headrace")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
