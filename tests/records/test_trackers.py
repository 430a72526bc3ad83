import sys
from types import SimpleNamespace

import pytest

from headrace.errors import UserError
from headrace.records.trackers import TRACKERS, TrackedRun, Trackers


@pytest.fixture
def run(tmp_path):
    return TrackedRun(folder=tmp_path, project="headrace", config={"recipe": "spo++"})


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_before_the_run_starts(name, run, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"the tracker {name} needs the package {name}: pip install {name}"):
        Trackers([name], run, warn=pytest.fail)


def test_an_unknown_tracker_is_named(run):
    with pytest.raises(UserError, match="unknown tracker 'mlflow': choose among tensorboard, wandb, trackio"):
        Trackers(["mlflow"], run, warn=pytest.fail)


def test_a_failing_tracker_warns_once_and_the_others_go_on(run, monkeypatch):
    logged, warnings = [], []

    def fail(*_, **__):
        raise ConnectionError("nobody there")

    good = SimpleNamespace(log=lambda step, values: logged.append((step, dict(values))), close=lambda: logged.append("closed"))
    monkeypatch.setattr(
        "headrace.records.trackers.TRACKERS", {"bad": lambda run: SimpleNamespace(log=fail, close=fail), "good": lambda run: good}
    )
    trackers = Trackers(["bad", "good"], run, warn=warnings.append)
    for step in range(2):
        trackers.log(step, {"reward": 0.5})
    trackers.close()
    assert logged == [(0, {"reward": 0.5}), (1, {"reward": 0.5}), "closed"]
    assert warnings == ["the tracker bad failed and is left out from here on: ConnectionError: nobody there"]


def test_a_tracker_that_cannot_start_warns_and_is_left_out(run, monkeypatch):
    def fail(run):
        raise TimeoutError("no answer")

    warnings = []
    monkeypatch.setattr("headrace.records.trackers.TRACKERS", {"bad": fail})
    Trackers(["bad"], run, warn=warnings.append).log(0, {})
    assert len(warnings) == 1


def test_a_resumed_run_goes_on_with_its_wandb_run(run, monkeypatch, tmp_path):
    started = []
    fake = SimpleNamespace(log=lambda values, step: started.append((step, values)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: started.append(options) or fake))
    for first_step in (0, 7):
        trackers = Trackers(["wandb"], TrackedRun(tmp_path, "p", {}, first_step), warn=pytest.fail)
        trackers.log(first_step, {"reward": 0.5})
        trackers.close()
    assert started[0]["id"] == started[2]["id"] and started[1] == (0, {"reward": 0.5})


def test_tensorboard_writes_event_files(run):
    pytest.importorskip("tensorboard")
    trackers = Trackers(["tensorboard"], run, warn=pytest.fail)
    trackers.log(0, {"reward": 0.5})
    trackers.close()
    assert list((run.folder / "tensorboard").glob("events*"))
