import dataclasses
import json
import math
import os

import pytest

from headrace.records.metrics import METRICS_FILE, MetricsFile, UpdateMetrics, objective_fields, read_metrics
from headrace.records.run_store import RunError


def metrics(update=0, **changes):
    values = dict.fromkeys((f.name for f in dataclasses.fields(UpdateMetrics) if f.default is dataclasses.MISSING), 0)
    values = {name: value for name, value in values.items() if name not in OPTIONAL}
    return UpdateMetrics(**{**values, "update": update, **changes})


OPTIONAL = {f.name for f in dataclasses.fields(UpdateMetrics) if f.default_factory is not dataclasses.MISSING}


def test_rows_read_back_equal_in_the_order_of_updates(tmp_path):
    file = MetricsFile(tmp_path)
    rows = [metrics(i, reward=i / 3, success_by_kind={"pick": 0.1}, drops={"stale": 2}, entropy=None) for i in range(3)]
    for row in rows:
        file.append(row)
    assert read_metrics(tmp_path) == rows


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path):
    MetricsFile(tmp_path).append(metrics(success_tokens=math.nan, gradient_norm=math.inf, success_by_kind={"pick": math.nan}))
    row = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["success_tokens"] is None and row["gradient_norm"] is None
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read.success_tokens) and math.isnan(read.gradient_norm) and math.isnan(read.success_by_kind["pick"])
    assert read.entropy is None


def test_a_resumed_run_leaves_no_rows_of_updates_that_it_took_back(tmp_path):
    file = MetricsFile(tmp_path)
    for update in range(5):
        file.append(metrics(update))
    file.rewrite(updates=3)
    file.append(metrics(3, reward=0.5))
    assert [(row.update, row.reward) for row in read_metrics(tmp_path)] == [(0, 0), (1, 0), (2, 0), (3, 0.5)]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_failed_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path)
    file.append(metrics(0))

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        file.rewrite(updates=0)
    assert len(read_metrics(tmp_path)) == 1


def test_a_line_that_a_killed_process_left_half_written_is_passed_over_and_repaired(tmp_path):
    file = MetricsFile(tmp_path)
    file.append(metrics(0))
    file.append(metrics(1))
    text = file.path.read_text()
    file.path.write_text(text[:-20])
    assert [row.update for row in read_metrics(tmp_path)] == [0]
    MetricsFile(tmp_path).append(metrics(1))
    assert [row.update for row in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{]", "line 1"), ('{"update": 0}', "line 1.*missing"), ('{"updaet": 0}', "line 1.*updaet"), ("[]", "line 1.*JSON object")],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    (tmp_path / METRICS_FILE).write_text(line + "\n")
    with pytest.raises(RunError, match=complaint):
        read_metrics(tmp_path)


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metrics(tmp_path) == []


def test_rates_follow_from_tokens_and_seconds():
    row = metrics(sampled_tokens=100, seconds=4.0, trained_tokens=600, training_seconds=2.0)
    assert (row.sampled_tokens_per_second, row.trained_tokens_per_second) == (25.0, 300.0)
    assert math.isnan(metrics(seconds=0.0).sampled_tokens_per_second)


def test_objective_metrics_find_their_fields():
    raw = {
        "ratio_mean": 1.0,
        "ratio_square_mean": 1.25,
        "ratio_max": 3.0,
        "approx_kl": 0.01,
        "clip_low_fraction": 0.5,
        "gate_slope_mean": 0.9,
    }
    row = metrics(**objective_fields(raw))
    assert (row.ratio_std, row.kl, row.clip_low_fraction, row.clip_high_fraction) == (0.5, 0.01, 0.5, None)
    assert row.other == {"gate_slope_mean": 0.9}
    assert math.isnan(metrics(**objective_fields({})).kl)


def test_scalars_are_flat_and_finite():
    flat = metrics(reward=0.5, success_tokens=math.nan, success_by_kind={"pick": 0.25}).scalars()
    assert flat["reward"] == 0.5 and flat["success_by_kind/pick"] == 0.25
    assert "success_tokens" not in flat and "entropy" not in flat
