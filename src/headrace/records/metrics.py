"""One JSON line per update, in ``metrics.jsonl``.

The log holds what happened; this file holds what was measured meanwhile and cannot be recomputed from the log (ratios,
gradient norm, seconds), beside what a person wants to see without recomputing it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from headrace.files import write_whole
from headrace.records.errors import RunError

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """What one update was like. Means over *attempts* and over *action tokens* differ, so each field says which.

    NaN where a number does not exist (the tokens of successes in a batch without one); None where the run does not
    measure it.
    """

    update: int
    """Counts from 0: the batch number of its consumptions."""
    version: int
    """The newest published version after it."""
    clock: float
    """Seconds on the run's clock, real or simulated, at its end."""
    seconds: float
    """Clock seconds since the end of the update before it (or the start)."""

    # --- reward ---
    attempts: int
    """In the batch."""
    reward: float
    """Mean outcome over attempts, in [0, 1]."""
    success: float
    """Share of attempts that reached the goal."""
    area: float
    """Area under ``reward`` so far, in [0, 1] (household: trapezoid; math: mean of points)."""
    value: float | None = None
    """Mean frozen prompt value over attempts: what the memory expected. None without a memory."""
    success_by_kind: Mapping[str, float] = field(default_factory=dict)
    attempts_by_kind: Mapping[str, int] = field(default_factory=dict)

    # --- lengths and credit ---
    success_tokens: float
    """Mean action tokens of attempts that reached the goal; NaN without one."""
    failure_tokens: float
    """Mean action tokens of the others; NaN without one."""
    length_advantage_covariance: float
    """Cov over attempts (divisor n) of action tokens and raw advantage, in tokens: negative when long attempts are the worse ones."""
    actor_residual: float
    """Mean normalized advantage over action tokens: what a token-mean loss sees as its baseline error. 0 under the action-token measure."""
    advantage_mean: float
    """Mean normalized advantage over attempts."""
    advantage_std: float
    """Standard deviation (divisor n) of the normalized advantage over attempts."""
    degenerate: int
    """Sets of attempts (groups, or the batch) whose advantages are all 0 for want of spread."""
    sets: int
    """Sets of attempts that a statistic was taken over: groups, 1 for the batch, 0 for measure "none"."""

    # --- the step, over action tokens ---
    loss: float
    ratio_mean: float
    """Importance ratio of the policy being trained to the one at the start of the update."""
    ratio_std: float
    ratio_max: float
    clip_low_fraction: float | None = None
    """Share of action tokens clipped from below (a negative advantage, a ratio already small). None where nothing clips."""
    clip_high_fraction: float | None = None
    dual_clip_fraction: float | None = None
    rollout_correction_mean: float | None = None
    """Mean truncated weight between training engine and generation engine. None where none is applied."""
    rollout_truncated_fraction: float | None = None
    kl: float
    """Estimate (k3) of KL(start of the update || after it), in nats per token; while the steps are taken, where only that is measured."""
    reference_kl: float | None = None
    """k3 to the reference policy; None while that penalty is off."""
    entropy: float | None = None
    """Nats per action token, of the full distribution; None unless ``learner.entropy`` is on."""
    gradient_norm: float
    """Mean over the update's optimizer steps, before clipping."""
    learning_rate: float
    """Of the last optimizer step."""
    other: Mapping[str, float] = field(default_factory=dict)
    """What objective and learner report beyond these (a gate's mean slope, skipped steps, whatever a user's own objective adds)."""

    # --- collection ---
    staleness_mean: float
    """Versions published between an attempt's dispatch and its use, mean over attempts."""
    staleness_max: int
    drops: Mapping[str, int] = field(default_factory=dict)
    """Attempts dropped since the update before, by reason."""
    unmatched_actions: int
    """Actions of the batch that the world's grammar did not recognise."""
    actions: int
    """All actions of the batch."""
    sampled_tokens: int
    """Action tokens of the batch."""
    trained_tokens: int
    """Tokens that went through the learner: action tokens and their contexts, each counted once."""

    # --- time, in clock seconds ---
    generation_seconds: float
    """Spent in the engine, summed over the batch's attempts; they run side by side, so this exceeds the clock."""
    environment_seconds: float
    """Spent in the world, summed over the batch's attempts."""
    training_seconds: float
    waiting_seconds: float
    """The learner stood still for want of a batch."""
    publication_seconds: float
    """Making a version available; with an engine of one weight slot, the wait for the attempts under way too."""
    checkpoint_seconds: float = 0.0

    @property
    def sampled_tokens_per_second(self) -> float:
        """Of the whole run: action tokens over the update's clock seconds; NaN where no time passed."""
        return _rate(self.sampled_tokens, self.seconds)

    @property
    def trained_tokens_per_second(self) -> float:
        """Of the learner: its tokens over its own seconds; NaN where no time passed."""
        return _rate(self.trained_tokens, self.training_seconds)

    def scalars(self) -> dict[str, float]:
        """Every finite number under a flat name (``success_by_kind/pick``), for trackers; the two rates included."""
        flat: dict[str, float] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            for name, number in [(f"{f.name}/{k}", v) for k, v in value.items()] if isinstance(value, Mapping) else [(f.name, value)]:
                if number is not None and math.isfinite(number):
                    flat[name] = float(number)
        rates = {"sampled_tokens_per_second": self.sampled_tokens_per_second, "trained_tokens_per_second": self.trained_tokens_per_second}
        return flat | {name: rate for name, rate in rates.items() if math.isfinite(rate)}


_OBJECTIVE_FIELDS = {
    "ratio_mean": "ratio_mean",
    "ratio_max": "ratio_max",
    "approx_kl": "kl",
    "clip_low_fraction": "clip_low_fraction",
    "clip_high_fraction": "clip_high_fraction",
    "dual_clip_fraction": "dual_clip_fraction",
    "rollout_correction_mean": "rollout_correction_mean",
    "rollout_truncated_fraction": "rollout_truncated_fraction",
}


def objective_fields(metrics: Mapping[str, float]) -> dict[str, Any]:
    """The fields of ``UpdateMetrics`` that an objective's combined metrics fill; unknown names go to ``other``.

    ``ratio_std`` comes from the first two moments. A user's objective that reports no ratio or KL leaves NaN there.
    """
    fields: dict[str, Any] = {"ratio_mean": math.nan, "ratio_std": math.nan, "ratio_max": math.nan, "kl": math.nan}
    fields |= {ours: float(metrics[theirs]) for theirs, ours in _OBJECTIVE_FIELDS.items() if theirs in metrics}
    if "ratio_square_mean" in metrics and "ratio_mean" in metrics:
        fields["ratio_std"] = math.sqrt(max(0.0, float(metrics["ratio_square_mean"]) - float(metrics["ratio_mean"]) ** 2))
    known = {*_OBJECTIVE_FIELDS, "ratio_square_mean"}
    fields["other"] = {name: float(value) for name, value in metrics.items() if name not in known}
    return fields


class MetricsFile:
    """The file of a run that is being trained. Opening it repairs a last line that a killed process left half-written."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / METRICS_FILE
        if self.path.exists():
            whole = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            if sum(map(len, whole)) != self.path.stat().st_size:
                write_whole(self.path, b"".join(whole))

    def append(self, metrics: UpdateMetrics) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_line(metrics))

    def rewrite(self, updates: int) -> None:
        """Keep the rows of the first ``updates`` updates: what a resumed run takes back leaves no row. Written aside, then renamed."""
        if self.path.exists():
            kept = [row for row in read_metrics(self.path.parent) if row.update < updates]
            write_whole(self.path, "".join(map(to_line, kept)))


def read_metrics(folder: str | Path) -> list[UpdateMetrics]:
    """The rows of a run in the order of updates, live runs included; empty where there is no file. ``RunError`` names a bad line."""
    path = Path(folder) / METRICS_FILE
    if not path.exists():
        return []
    rows: dict[int, UpdateMetrics] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):  # being written, or left by a killed process
            break
        try:
            row = from_line(line)
        except ValueError as error:
            raise RunError(f"{path}, line {number}: {error}") from error
        rows[row.update] = row
    return [rows[update] for update in sorted(rows)]


def to_line(metrics: UpdateMetrics) -> str:
    """Strict JSON: what is not finite becomes null."""
    values = {f.name: getattr(metrics, f.name) for f in dataclasses.fields(metrics)}
    return json.dumps({name: _plain(value) for name, value in values.items()}, allow_nan=False) + "\n"


def from_line(line: str) -> UpdateMetrics:
    """``ValueError`` for broken JSON, a missing field or an unknown one. null reads back as NaN where a field must be a number."""
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("a row of metrics is a JSON object")
        return UpdateMetrics(**{name: _restored(name, value) for name, value in values.items()})
    except TypeError as error:
        raise ValueError(str(error).replace("UpdateMetrics.__init__()", "a row of metrics")) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_HINTS = get_type_hints(UpdateMetrics)


def _restored(name: str, value: Any) -> Any:
    hint = _HINTS.get(name)
    if get_origin(hint) is not None and float in get_args(hint) and isinstance(value, dict):
        return {key: math.nan if inner is None else inner for key, inner in value.items()}
    return math.nan if value is None and hint is float else value


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan
