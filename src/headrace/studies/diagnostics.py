"""Which quantities of an update are worth a chart, and what a person should know to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.records.metrics import UpdateMetrics
from headrace.studies.charts import Axes, Series, Style, line_chart
from headrace.studies.markup import Html, el
from headrace.studies.run_data import RunData

Getter = Callable[[UpdateMetrics], float | None]


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    get: Getter


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One small chart. ``what`` says what is drawn, ``good`` what to look for. Drawn only where some run has a value."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    what: str
    good: str
    zero: bool = False
    reference: float | None = None


def _of(name: str) -> Getter:
    return lambda row: getattr(row, name)


def _other(name: str) -> Getter:
    return lambda row: row.other.get(name)


def _unmatched_share(row: UpdateMetrics) -> float:
    return row.unmatched_actions / row.actions if row.actions else math.nan


def _degenerate_share(row: UpdateMetrics) -> float | None:
    return row.degenerate / row.sets if row.sets > 1 else None


CREDIT = (
    Diagnostic(
        "Length of attempts",
        "action tokens",
        (Line("reached the goal", _of("success_tokens")), Line("did not", _of("failure_tokens"))),
        "Mean number of tokens that the policy wrote in one attempt.",
        "Good: successes that stay short. Failures that grow longer wander.",
        zero=True,
    ),
    Diagnostic(
        "Length and advantage",
        "covariance, tokens",
        (Line("Cov(length, raw advantage)", _of("length_advantage_covariance")),),
        "Below zero, the long attempts are the bad ones, so most tokens carry blame.",
        "Neither good nor bad in itself: the further from 0, the more it matters which measure centres the advantage.",
        reference=0.0,
    ),
    Diagnostic(
        "What the actor sees on average",
        "advantage per token",
        (Line("actor's residual", _of("actor_residual")),),
        "Mean normalized advantage over the tokens that are trained. A residual pushes every token the same way, whatever it did.",
        "Good: 0, which the action-token measure makes exact.",
        reference=0.0,
    ),
    Diagnostic(
        "Normalized advantage",
        "advantage",
        (Line("mean", _of("advantage_mean")), Line("standard deviation", _of("advantage_std"))),
        "Over attempts of the batch.",
        "Good: a spread near 1. Near 0 there is nothing to learn from, as all attempts went as expected.",
        reference=0.0,
    ),
    Diagnostic(
        "Batches or groups without spread",
        "share of groups",
        (Line("degenerate groups", _degenerate_share),),
        "Groups whose siblings all had the same outcome: their attempts are paid for and teach nothing.",
        "Good: few.",
        zero=True,
    ),
)

STEP = (
    Diagnostic(
        "Importance ratio",
        "ratio",
        (Line("mean", _of("ratio_mean")), Line("mean + std", lambda row: row.ratio_mean + row.ratio_std)),
        "Probability of a token under the policy being trained, over that at the start of the update.",
        "Good: a mean near 1. A growing spread means that steps are large for the data they use.",
        reference=1.0,
    ),
    Diagnostic(
        "Clipped tokens",
        "share of action tokens",
        (
            Line("pushed down far enough", _of("clip_low_fraction")),
            Line("pushed up far enough", _of("clip_high_fraction")),
            Line("dual clip", _of("dual_clip_fraction")),
        ),
        "Tokens whose gradient is cut because the policy has moved far enough on them.",
        "Good: a few percent at most.",
        zero=True,
    ),
    Diagnostic(
        "How far an update moves",
        "KL, nats per token",
        (Line("KL(before || after)", _of("kl")), Line("KL to the reference", _of("reference_kl"))),
        "Distance between the policies before and after the update, estimated on its own tokens.",
        "Good: small and steady, below about 0.01 for a small model. Skill is often lost after a jump.",
        zero=True,
    ),
    Diagnostic(
        "Entropy",
        "nats per token",
        (Line("entropy", _of("entropy")),),
        "How undecided the policy is per action token.",
        "Good: a slow decline. Near 0 it no longer explores.",
        zero=True,
    ),
    Diagnostic(
        "Gradient norm",
        "norm before clipping",
        (Line("mean of the steps", _of("gradient_norm")), Line("largest", _other("gradient_norm_max"))),
        "Size of the gradient before it is clipped.",
        "Good: steady. Spikes point at a few attempts that dominate the batch.",
        zero=True,
    ),
    Diagnostic(
        "Effective sample size",
        "share of tokens",
        (Line("effective sample size", _other("effective_sample_size")),),
        "What the batch is worth once its tokens are weighed by their ratios: (mean ratio)² / mean ratio².",
        "Good: near 1. Below about 0.8 a few tokens speak for all.",
    ),
    Diagnostic(
        "Steps that were not taken",
        "optimizer steps",
        (Line("skipped", lambda row: row.other.get("skipped_steps") or None),),
        "Optimizer steps left out because the loss or the gradient was not finite.",
        "Good: none.",
        zero=True,
    ),
    Diagnostic(
        "Learning rate",
        "learning rate",
        (Line("learning rate", _of("learning_rate")),),
        "Of the last optimizer step of each update.",
        "With a warm-up it starts low.",
        zero=True,
    ),
    Diagnostic(
        "Engines disagree by",
        "nats per token",
        (Line("mean |training - generation|", _other("rollout_mismatch")),),
        "Gap between a token's log-probability in training and in the generation engine: rounding, and the lag of stale attempts.",
        "Good: near 0 for fresh attempts. The rollout correction makes up for the rest.",
        zero=True,
    ),
    Diagnostic(
        "Rollout correction",
        "weight, share",
        (Line("mean weight", _of("rollout_correction_mean")), Line("share truncated", _of("rollout_truncated_fraction"))),
        "Weights that make up for the difference between the engine that sampled and the policy that is trained.",
        "Good: a mean near 1 and almost nothing truncated.",
        reference=1.0,
        zero=True,
    ),
)

COLLECTION = (
    Diagnostic(
        "Staleness",
        "versions",
        (Line("mean", _of("staleness_mean")), Line("largest", _of("staleness_max"))),
        "How many policies were published between sending an attempt out and training on it.",
        "Good: below 1 on average. It rises where attempts take very different times.",
        zero=True,
    ),
    Diagnostic(
        "Actions the world did not understand",
        "share of actions",
        (Line("unmatched", _unmatched_share),),
        "Actions that are no command, call or answer; the world says so, and nothing else happens.",
        "Good: falling towards 0.",
        zero=True,
    ),
    Diagnostic(
        "Throughput",
        "tokens per second",
        (
            Line("sampled, whole run", lambda row: row.sampled_tokens_per_second),
            Line("trained, learner", lambda row: row.trained_tokens_per_second),
        ),
        "Tokens written per second of the run, and tokens (with their context) through the learner per second of training.",
        "Good: steady. A drop means longer contexts or a busy machine.",
        zero=True,
    ),
)


def unnamed_diagnostics(runs: Sequence[RunData]) -> list[Diagnostic]:
    """A chart for everything that an objective or the learner reports beyond the fields of ``UpdateMetrics``."""
    known = {"gradient_norm_max", "rollout_mismatch", "effective_sample_size", "skipped_steps"}
    names = sorted({name for run in runs for row in run.metrics for name in row.other} - known)
    return [
        Diagnostic(
            name.replace("_", " ").capitalize(),
            name.replace("_", " "),
            (Line(name, _other(name)),),
            "As the objective or the learner reports it.",
            "",
        )
        for name in names
    ]


def diagnostic_grid(diagnostics: Sequence[Diagnostic], runs: Sequence[RunData]) -> Html:
    figures = [figure for figure in (_figure(one, runs) for one in diagnostics) if figure]
    return el("div", figures, class_="grid-charts") if figures else Html("")


def _figure(diagnostic: Diagnostic, runs: Sequence[RunData]) -> Html | None:
    series = [one for i, run in enumerate(runs) for one in _series(diagnostic, run, i if len(runs) > 1 else None)]
    if not series:
        return None
    axes = Axes("update", diagnostic.unit, zero=diagnostic.zero, reference=diagnostic.reference)
    caption = el(
        "figcaption",
        el("h3", diagnostic.title),
        el("p", diagnostic.what, el("em", f" {diagnostic.good}") if diagnostic.good else None),
    )
    return el("figure", caption, line_chart(series, axes))


def _series(diagnostic: Diagnostic, run: RunData, number: int | None) -> list[Series]:
    """One run: a colour per line. Several: a colour per run, a dash per line."""
    styles: tuple[Style, ...] = ("line", "dashed", "dotted")
    found = []
    for i, line in enumerate(diagnostic.lines):
        values = [line.get(row) for row in run.metrics]
        if not any(value is not None and math.isfinite(value) for value in values):
            continue
        x = [float(row.update + 1) for row in run.metrics]
        label = line.label if number is None else f"{run.name}: {line.label}" if len(diagnostic.lines) > 1 else run.name
        found.append(Series(label, x, values, i if number is None else number, "line" if number is None else styles[i % 3]))
    return found
