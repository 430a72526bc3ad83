"""The sections of a report, each a function from runs to markup."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from headrace.curves import CurveSummary, curve_summary, moving_average
from headrace.records.metrics import UpdateMetrics
from headrace.studies.charts import Axes, Series, interval_row, interval_scale, line_chart, percent, stacked_bar, swatch
from headrace.studies.markup import Child, Html, el
from headrace.studies.run_data import EvaluationRow, RunData

SMOOTHING = 5  # updates


def run_facts(runs: Sequence[RunData]) -> Html:
    """One line about each run: what it is."""
    return el("ul", [el("li", _fact_line(run, named=len(runs) > 1, colour=i)) for i, run in enumerate(runs)], class_="facts")


def _fact_line(run: RunData, *, named: bool, colour: int) -> list[Child]:
    world = run.setting("environment", "name")
    facts = [f"recipe {run.recipe}", str(world) if world else "", f"{len(run.metrics)} updates", f"seed {run.config.get('seed', '?')}"]
    if run.facts.restores:
        facts.append("resumed once" if run.facts.restores == 1 else f"resumed {run.facts.restores} times")
    if run.simulated:
        facts.append("simulated time")
    name: list[Child] = [swatch(colour), el("b", run.name), " "] if named else []
    return [*name, " · ".join(fact for fact in facts if fact)]


# --- the result ---


def headline(runs: Sequence[RunData]) -> Html:
    evaluations = [row for row in (_evaluation_block(split, runs) for split in _splits(runs)) if row]
    body = _cards(runs[0]) if len(runs) == 1 else _comparison(runs)
    return el("div", body, el("div", evaluations, class_="evaluations"))


def _cards(run: RunData) -> Html:
    cards = [_card(f"success, {split}", *_before_after(run.of_split(split))) for split in run.splits()]
    rewards = [row.reward for row in run.metrics]
    if rewards:
        summary = _summary(run)
        first, last = fmean(rewards[:SMOOTHING]), fmean(rewards[-SMOOTHING:])
        count = min(SMOOTHING, len(rewards))
        cards.append(_card("training reward", f"{first:.2f} → {last:.2f}", f"means of the first and last {count} updates, from 0 to 1"))
        cards.append(_card("reward area", f"{summary.area:.3f}", _c10_text(summary)))
        cards.append(
            _card(
                "time",
                _duration(run.metrics[-1].clock),
                "simulated" if run.simulated else "of training, without preparation and evaluation",
            )
        )
        tokens = sum(row.sampled_tokens for row in run.metrics)
        cards.append(_card("tokens written", _count(tokens), f"in {_count(len(run.facts.used))} attempts that were trained on"))
    return el("div", cards, class_="cards")


def _card(name: str, value: str, note: str) -> Html:
    return el(
        "div", el("p", name, class_="card-name"), el("p", value, class_="card-value"), el("p", note, class_="card-note"), class_="card"
    )


def _before_after(rows: Sequence[EvaluationRow]) -> tuple[str, str]:
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return percent(last.success), f"{_when(last)}, {last.attempts} attempts"
    apart = first.high < last.low or last.high < first.low
    gain = 100 * (last.success - first.success)
    return (
        f"{100 * first.success:.0f} → {100 * last.success:.0f} %",
        f"{gain:+.1f} points; the intervals {'do not overlap' if apart else 'overlap'}",
    )


def _when(row: EvaluationRow) -> str:
    return "before training" if row.update == 0 else f"after {row.update} updates"


def _summary(run: RunData) -> CurveSummary:
    environment = run.config.get("environment")
    world = environment.get("name", "") if isinstance(environment, dict) else ""
    return curve_summary([row.reward for row in run.metrics], world)


def _c10_text(summary: CurveSummary) -> str:
    return f"end reward {summary.end:.3f}" if summary.c10 is None else f"C10 {summary.c10:.3f}, end reward {summary.end:.3f}"


def _figure(run: RunData, name: str) -> str:
    value = getattr(_summary(run), name) if run.metrics else None
    return "–" if value is None else f"{value:.3f}"


def _comparison(runs: Sequence[RunData]) -> Html:
    splits = _splits(runs)
    columns: list[tuple[str, Callable[[RunData], str]]] = [
        ("recipe", lambda run: run.recipe),
        ("seed", lambda run: str(run.config.get("seed", "?"))),
        ("updates", lambda run: str(len(run.metrics))),
        ("area", lambda run: _figure(run, "area")),
        ("C10", lambda run: _figure(run, "c10")),
        ("end reward", lambda run: _figure(run, "end")),
        *((f"success, {split}", _success_cell(split)) for split in splits),
        ("time", lambda run: _duration(run.metrics[-1].clock) if run.metrics else "–"),
        ("not trained on", lambda run: _share(sum(run.facts.drops_by_reason.values()), run.facts.dispatched)),
    ]
    head = el("tr", el("th", "run"), [el("th", name) for name, _ in columns])
    rows = [
        el("tr", el("th", swatch(i), run.name, scope="row"), [el("td", write(run)) for _, write in columns]) for i, run in enumerate(runs)
    ]
    return el("div", el("table", el("thead", head), el("tbody", rows)), class_="scroll")


def _success_cell(split: str) -> Callable[[RunData], str]:
    def write(run: RunData) -> str:
        rows = run.of_split(split)
        return (
            "–"
            if not rows
            else percent(rows[0].success)
            if len(rows) == 1
            else f"{100 * rows[0].success:.1f} → {percent(rows[-1].success)}"
        )

    return write


def _evaluation_block(split: str, runs: Sequence[RunData]) -> Html | None:
    """First and last evaluation of each run on one split."""
    lines = []
    for i, run in enumerate(runs):
        rows = run.of_split(split)
        for row in rows if len(rows) < 2 else (rows[0], rows[-1]):
            when = _when(row)
            lines.append(interval_row(f"{run.name}, {when}" if len(runs) > 1 else when, row.success, row.low, row.high, i))
    if not lines:
        return None
    attempts = sorted({row.attempts for run in runs for row in run.of_split(split)})
    note = f"{' or '.join(map(str, attempts))} attempts each; bars are 95 % intervals for these very tasks."
    return el("div", el("h3", f"Evaluation on {split} tasks"), el("p", note, class_="note"), lines, interval_scale(), class_="intervals")


# --- curves ---


def learning_curve(runs: Sequence[RunData]) -> Html:
    if not any(run.metrics for run in runs):
        return el("p", "No update has ended yet.", class_="empty")
    series: list[Series] = []
    for i, run in enumerate(runs):
        series += _reward_lines(run, i, alone=len(runs) == 1)
    series += _evaluation_marks(runs)
    chart = line_chart(series, Axes("update", "mean outcome, 0 to 1", zero=True, height=320))
    caption = (
        f"Mean outcome of each update's attempts (thin) and its centred mean over {SMOOTHING} updates (bold). "
        "These attempts are sampled while the policy learns, under the version that sent them out."
    )
    if len(runs) == 1 and any(row.value is not None for row in runs[0].metrics):
        caption += " Dashed: what the prompt values expected of the same attempts; the gap is the raw advantage."
    if any(run.evaluations for run in runs):
        where = "" if len(runs) == 1 else f" on {_splits(runs)[0]} tasks"
        caption += f" Dots with bars: success in separate evaluations{where}, with 95 % intervals."
    return el("figure", chart, el("figcaption", el("p", caption)), class_="wide")


def _reward_lines(run: RunData, colour: int, *, alone: bool) -> list[Series]:
    x = [float(row.update + 1) for row in run.metrics]
    rewards = [row.reward for row in run.metrics]
    if not rewards:
        return []
    name = "reward" if alone else run.name
    lines = [Series(name, x, rewards, colour, "faint", legend=False), Series(name, x, moving_average(rewards, SMOOTHING), colour)]
    if alone and any(row.value is not None for row in run.metrics):
        lines.append(Series("expected by the prompt values", x, [row.value for row in run.metrics], 6, "dashed"))
    return lines


def _evaluation_marks(runs: Sequence[RunData]) -> list[Series]:
    """One run: every split in a colour of its own. Several: the first split, in the colours of the runs."""
    alone = len(runs) == 1
    marks = []
    for i, run in enumerate(runs):
        for j, split in enumerate(_splits(runs) if alone else _splits(runs)[:1]):
            rows = run.of_split(split)
            x, y = [float(row.update) for row in rows], [row.success for row in rows]
            low, high = [row.low for row in rows], [row.high for row in rows]
            label = f"evaluation, {split}" if alone else f"{run.name}, evaluation"
            marks.append(Series(label, x, y, j + 1 if alone else i, "marks", low, high, legend=alone))
    return marks


def success_by_kind(runs: Sequence[RunData]) -> Html:
    kinds = sorted({kind for run in runs for kind in run.kinds()})
    return el("div", [_kind_figure(kind, runs) for kind in kinds], class_="grid-charts") if kinds else Html("")


def _kind_figure(kind: str, runs: Sequence[RunData]) -> Html:
    series: list[Series] = []
    attempts = 0
    for i, run in enumerate(runs):
        rows = [row for row in run.metrics if kind in row.success_by_kind]
        attempts += sum(row.attempts_by_kind.get(kind, 0) for row in rows)
        x, y = [float(row.update + 1) for row in rows], [row.success_by_kind[kind] for row in rows]
        if rows:
            smooth = moving_average(y, SMOOTHING)
            series += [Series(run.name, x, y, i, "faint", legend=False), Series(run.name if len(runs) > 1 else "success", x, smooth, i)]
    caption = el("figcaption", el("h3", kind.replace("_", " ")), el("p", f"{_count(attempts)} attempts."))
    return el("figure", caption, line_chart(series, Axes("update", "success, share of attempts", low=0.0, high=1.0, height=130)))


# --- time and losses ---

_SPLIT: tuple[tuple[str, Callable[[UpdateMetrics], float]], ...] = (
    ("waiting for attempts", lambda row: row.waiting_seconds),
    ("training", lambda row: row.training_seconds),
    ("publication", lambda row: row.publication_seconds),
    ("checkpoints", lambda row: row.checkpoint_seconds),
)


def time_split(runs: Sequence[RunData]) -> Html:
    bars = [_time_bar(run, named=len(runs) > 1) for run in runs if run.metrics]
    note = (
        "What the learner's clock went to. Generation goes on while the learner trains, so waiting is only the part of generation that "
        "training could not hide. Below it, what one attempt's own time went to: the engine (its queue included) and the world."
    )
    return el("div", el("p", note, class_="lead"), bars) if bars else Html("")


def _time_bar(run: RunData, *, named: bool) -> Html:
    parts = [(name, sum(get(row) for row in run.metrics)) for name, get in _SPLIT]
    total = sum(row.seconds for row in run.metrics)
    parts.append(("other", max(0.0, total - sum(value for _, value in parts))))
    attempts = sum(row.attempts for row in run.metrics)
    generation, world = sum(row.generation_seconds for row in run.metrics), sum(row.environment_seconds for row in run.metrics)
    own = [("generation", generation), ("environment", world)]
    blocks: list[Child] = [el("h3", run.name) if named else None]
    if total > 0:
        blocks.append(stacked_bar(parts, _duration))
    if generation + world > 0:
        per_attempt = f"Per attempt: {_duration(generation / attempts)} in the engine, {_duration(world / attempts)} in the world."
        blocks += [el("p", per_attempt, class_="note"), stacked_bar(own, lambda seconds: f"{_duration(seconds)} summed over attempts")]
    return el("div", blocks, class_="time")


def losses(runs: Sequence[RunData]) -> Html:
    """Drops by reason, and the tasks that they fall on."""
    reasons = sorted({reason for run in runs for reason in run.facts.drops_by_reason})
    if not reasons:
        sent = sum(run.facts.dispatched for run in runs)
        return el("p", f"None of {_count(sent)} attempts was dropped.", class_="empty")
    head = el(
        "tr", el("th", "reason"), [el("th", run.name if len(runs) > 1 else "attempts") for run in runs], el("th", "meaning", class_="text")
    )
    rows = [
        el(
            "tr",
            el("th", reason.replace("_", " "), scope="row"),
            [el("td", _share(run.facts.drops_by_reason[reason], run.facts.dispatched)) for run in runs],
            el("td", _MEANINGS.get(reason, ""), class_="text"),
        )
        for reason in reasons
    ]
    return el("div", el("div", el("table", el("thead", head), el("tbody", rows)), class_="scroll"), [_worst_tasks(run) for run in runs])


_MEANINGS = {
    "stale": "finished too many versions after it was sent out",
    "aborted": "cancelled when a new version was published",
    "unscored": "the world could not grade it",
    "no_action_tokens": "the policy wrote nothing",
    "environment_error": "the world failed",
    "engine_error": "generation failed",
    "environment_deadline": "the world did not answer in time",
    "engine_deadline": "generation did not answer in time",
    "episode_deadline": "the whole attempt took too long",
    "version_gone": "its policy was no longer served",
}


def _worst_tasks(run: RunData) -> Html | None:
    worst = run.facts.drops_by_task.most_common(5)
    if not worst:
        return None
    listed = "; ".join(f"{task} ({count})" for task, count in worst)
    return el("p", f"Tasks with the most drops in {run.name}: {listed}.", class_="note")


def settings(runs: Sequence[RunData]) -> Html:
    blocks = [
        el("details", el("summary", f"config.toml of {run.name}"), el("pre", run.config_text), open=len(runs) == 1)
        for run in runs
        if run.config_text
    ]
    return el("div", blocks) if blocks else Html("")


# --- words for numbers ---


def _splits(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(split for run in runs for split in run.splits()))


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.1f} %)" if total else str(count)


def _count(number: int) -> str:
    return f"{number:,}".replace(",", "\u202f")


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
