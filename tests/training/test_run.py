"""Whole runs in the toy world, in simulated time unless said otherwise."""

import math
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

import headrace
from headrace.algorithms import RECIPES
from headrace.config import resolve_recipe
from headrace.errors import RunFailed, UserError
from headrace.records.metrics import read_metrics
from headrace.records.run_store import RunReader
from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Prior, Publication, Receipt, Restored
from headrace.training.jobs import evaluate, measure_values
from headrace.training.observer import Silent
from headrace.training.replay import replay
from headrace.training.run import train


def log(folder):
    return sqlite3.connect(folder / "run.sqlite").execute("select * from events order by position").fetchall()


def events(folder, kind):
    with RunReader(folder) as reader:
        return [event for _, event in reader.events() if isinstance(event, kind)]


def test_the_same_seed_gives_the_same_log_twice(toy_config, tmp_path):
    config = toy_config()
    for name in ("one", "two"):
        train(config, out=tmp_path / name)
    assert log(tmp_path / "one") == log(tmp_path / "two")


def test_another_seed_gives_another_log(toy_config, tmp_path):
    train(toy_config(), out=tmp_path / "one")
    train(toy_config(seed=1), out=tmp_path / "two")
    assert log(tmp_path / "one") != log(tmp_path / "two")


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_trains_and_its_log_accounts_for_every_number(name, toy_config, tmp_path):
    config = toy_config(recipe=name)
    result = train(config, out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert result.updates == len(rows) == 3
    assert all(math.isfinite(row.loss) and math.isfinite(row.gradient_norm) and row.attempts == 16 for row in rows)
    report = replay(tmp_path / "run", resolve_recipe(config))
    assert report.ok, str(report)
    assert report.advantages == 48


def test_a_policy_learns_the_toy_world(toy_config, tmp_path):
    config = toy_config(
        run={"updates": 60, "checkpoint_every": 60},
        learner={"learning_rate": 2e-3},
        rollout={"batch_size": 32, "concurrency": 32},
        evaluation={"attempts": 8},
    )
    result = train(config, out=tmp_path / "run")
    before, after = result.evaluations
    assert 0.1 < before.success < 0.4 and after.success > before.success + 0.15 and after.low > before.high


def test_what_a_run_leaves_lies_in_its_directory(toy_config, tmp_path):
    result = headrace.train(toy_config(evaluation={"attempts": 1}), out=tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"run.sqlite", "config.toml", "metrics.jsonl", "checkpoints", "policy", "report.html"} <= names
    assert result.report == tmp_path / "run" / "report.html" and result.report.stat().st_size > 1000
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "policy").chat_template


def test_a_run_goes_on_with_more_updates(toy_config, tmp_path):
    train(toy_config(), out=tmp_path / "run")
    result = train(toy_config(run={"updates": 5}), out=tmp_path / "run", resume=True)
    assert result.updates == 5
    assert [row.update for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert replay(tmp_path / "run", resolve_recipe(toy_config())).ok


def test_learning_goes_on_to_the_bit_where_a_checkpoint_left_it(toy_config, tmp_path):
    """A run of four updates equals one of two that goes on for two more, as far as the log can tell: nothing is in flight
    across the break when every attempt of a version ends before the next batch."""
    settings = {"rollout": {"max_staleness": 0}}
    train(toy_config(run={"updates": 4}, **settings), out=tmp_path / "whole")
    train(toy_config(run={"updates": 2}, **settings), out=tmp_path / "parts")
    train(toy_config(run={"updates": 4}, **settings), out=tmp_path / "parts", resume=True)

    def used(folder):
        return [(e.batch, e.dispatch, e.advantage) for e in events(folder, Consumption)]

    assert used(tmp_path / "whole") == used(tmp_path / "parts")


def test_a_checkpoint_that_would_say_the_same_is_not_written_again(toy_config, tmp_path, monkeypatch):
    from headrace.training import checkpoints

    written = []
    save = checkpoints.save
    monkeypatch.setattr(
        checkpoints, "save", lambda folder, point, *, keep: (written.append(point.updates), save(folder, point, keep=keep))[1]
    )
    settings = {"run": {"updates": 4, "checkpoint_every": 2}, "rollout": {"max_staleness": 0}}
    train(toy_config(**settings), out=tmp_path / "run")
    assert written == [0, 2, 4]


def test_events_after_the_restored_checkpoint_are_taken_back(toy_config, tmp_path):
    train(toy_config(run={"updates": 3, "checkpoint_every": 2}), out=tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "update-000003"
    (newest / "learner.pt").write_bytes(b"damaged")
    result = train(toy_config(run={"updates": 4, "checkpoint_every": 2}), out=tmp_path / "run", resume=True)
    assert result.updates == 4
    assert [event.checkpoint for event in events(tmp_path / "run", Restored)] == ["update-000002"]
    assert replay(tmp_path / "run", resolve_recipe(toy_config())).ok
    assert [row.update for row in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_every_event_of_an_attempt_is_in_the_log_in_order(toy_config, tmp_path):
    train(toy_config(), out=tmp_path / "run")
    seen = {}
    with RunReader(tmp_path / "run") as reader:
        for _, event in reader.events():
            number = event.number if isinstance(event, Dispatch) else getattr(event, "dispatch", None)
            if number is not None:
                seen.setdefault(number, []).append(type(event).__name__)
    assert all(kinds[0] == "Dispatch" for kinds in seen.values())
    assert {tuple(kinds) for kinds in seen.values()} <= {("Dispatch",), ("Dispatch", "Receipt"), ("Dispatch", "Receipt", "Consumption")}
    assert [event.version for event in events(tmp_path / "run", Publication)] == [1, 2, 3]
    assert len(events(tmp_path / "run", Prior)) == 16


def test_the_frozen_value_of_the_first_dispatches_is_the_offline_one(toy_config, tmp_path):
    train(toy_config(), out=tmp_path / "run")
    priors = {prior.task: prior for prior in events(tmp_path / "run", Prior)}
    first = events(tmp_path / "run", Dispatch)[0]
    assert (first.alpha, first.beta) == (priors[first.task].alpha, priors[first.task].beta)


def test_publishing_every_second_update_makes_half_the_versions(toy_config, tmp_path):
    train(toy_config(run={"updates": 4, "publish_every": 2}), out=tmp_path / "run")
    assert [(event.version, event.batch) for event in events(tmp_path / "run", Publication)] == [(1, 1), (2, 3)]


@pytest.mark.parametrize("publication", ["drain", "abort", "continue"])
def test_every_way_to_publish_trains_and_replays(publication, toy_config, tmp_path):
    config = toy_config(rollout={"publication": publication}, environment={"options": {"turns": 2}})
    train(config, out=tmp_path / "run")
    assert replay(tmp_path / "run", resolve_recipe(config)).ok
    if publication == "abort":
        assert {drop.reason for drop in events(tmp_path / "run", Drop)} <= {"aborted"}


def test_an_engine_of_one_weight_slot_is_given_a_version_only_when_nothing_is_under_way(toy_config, tmp_path, monkeypatch):
    from headrace.rollout.local_engine import LocalEngine

    monkeypatch.setattr(LocalEngine, "weight_slots", 1)
    train(toy_config(environment={"options": {"turns": 2}}), out=tmp_path / "run")
    under_way = set()
    with RunReader(tmp_path / "run") as reader:
        for _, event in reader.events():
            match event:
                case Dispatch():
                    under_way.add(event.number)
                case Receipt() | Drop():
                    under_way.discard(event.dispatch)
                case Publication():
                    assert not under_way


def test_a_broken_task_is_dropped_by_name_and_the_run_goes_on(toy_config, tmp_path):
    config = toy_config(environment={"options": {"fail": "train-3"}}, values={"rollouts": 0})
    train(config, out=tmp_path / "run")
    drops = events(tmp_path / "run", Drop)
    assert drops and {drop.reason for drop in drops} == {"environment_error"}
    assert all("ValueError: the toy of train-3 is broken" in drop.detail for drop in drops)
    numbers = {drop.dispatch for drop in drops}
    assert numbers.isdisjoint(receipt.dispatch for receipt in events(tmp_path / "run", Receipt))


def test_a_hung_task_ends_at_its_deadline_and_is_named(toy_config, tmp_path):
    config = toy_config(
        environment={"options": {"slow": "train-3", "seconds": 1e6}},
        rollout={"environment_deadline": 0.3},
        values={"rollouts": 0},
        run={"updates": 8, "checkpoint_every": 8},
    )
    began = time.monotonic()
    train(config, out=tmp_path / "run")
    assert time.monotonic() - began < 60
    assert any(drop.reason == "environment_deadline" and "train-3" in drop.detail for drop in events(tmp_path / "run", Drop))


def test_when_every_attempt_fails_the_run_ends_within_seconds_with_the_cause(toy_config, tmp_path):
    config = toy_config(environment={"options": {"fail": "all"}}, values={"rollouts": 0}, rollout={"max_consecutive_failures": 20})
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"20 attempts failed one after another[\s\S]*ValueError: the toy of train-\d+ is broken"):
        train(config, out=tmp_path / "run")
    assert time.monotonic() - began < 20


def test_offline_values_are_measured_once_and_shared_by_matched_runs(toy_config, tmp_path):
    first = measure_values(toy_config())
    assert sum(value.rollouts for value in first) == 32
    files = list((tmp_path / "cache" / "values").iterdir())
    assert len(files) == 1
    train(toy_config(recipe="spo"), out=tmp_path / "spo")
    train(toy_config(recipe="spo++"), out=tmp_path / "spo++")
    assert list((tmp_path / "cache" / "values").iterdir()) == files
    assert events(tmp_path / "spo", Prior) == events(tmp_path / "spo++", Prior)
    measure_values(toy_config(values={"seed": 9}))
    assert len(list((tmp_path / "cache" / "values").iterdir())) == 2


def test_offline_values_are_measured_again_when_a_task_changes_under_its_id(toy_config, tmp_path):
    """A gold that is corrected in a file of problems, say: the id stays, for it names the question."""
    (tmp_path / "world.py").write_text(
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from fakes.toy_world import toy\n"
        "def world(**options):\n"
        "    built, gold = toy(**options), Path(__file__).with_name('gold').read_text()\n"
        "    def tasks(split, count):\n"
        "        return [replace(task, payload={**task.payload, 'gold': gold}) for task in built.tasks(split, count)]\n"
        "    return replace(built, tasks=tasks)\n"
    )
    for number, gold in enumerate(("1", "2"), 1):
        (tmp_path / "gold").write_text(gold)
        measure_values(toy_config(environment={"name": f"{tmp_path / 'world.py'}:world"}))
        assert len(list((tmp_path / "cache" / "values").iterdir())) == number


def test_an_evaluation_with_fixed_seeds_gives_the_same_figures_twice(toy_config, tmp_path):
    config = toy_config(environment={"options": {"turns": 1}})
    train(config, out=tmp_path / "run")
    assert evaluate(tmp_path / "run", attempts=3) == evaluate(tmp_path / "run", attempts=3)
    assert evaluate(tmp_path / "run", attempts=3).attempts == 48
    assert evaluate(tmp_path / "run", split="unseen", tasks=8, attempts=1).attempts == 8


@pytest.mark.parametrize("name", ["objective", "plain_objective"])
def test_a_loss_in_a_file_of_the_users_own_trains_and_nothing_else_is_touched(name, toy_config, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "own_loss.py"
    config = toy_config(recipe_options={"objective": f"{example}:{name}"})
    train(config, out=tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3 and all(math.isfinite(row.loss) for row in rows)
    if name == "objective":
        assert all("outside_fraction" in row.other for row in rows)


def test_the_policy_of_an_unfinished_run_is_that_of_its_newest_checkpoint(toy_config, tmp_path):
    import torch
    from safetensors.torch import load_file

    from headrace.training import checkpoints

    class Stopped(Exception):
        pass

    class Watching(Silent):
        def update(self, metrics):
            if metrics.update == 2:
                raise Stopped

    with pytest.raises(Stopped):
        train(toy_config(run={"updates": 5, "checkpoint_every": 2}), out=tmp_path / "run", observer=Watching())
    newest, _ = checkpoints.load_newest(tmp_path / "run" / "checkpoints")
    saved = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert newest.updates == 2 and evaluate(tmp_path / "run", attempts=1).update == 2
    assert all(torch.equal(saved[name], tensor) for name, tensor in newest.snapshots[2].items() if name in saved)


def test_lora_trains_and_leaves_an_ordinary_policy(toy_config, tmp_path):
    pytest.importorskip("peft")
    config = toy_config(policy={"lora": {"rank": 4}})
    train(config, out=tmp_path / "run")
    assert evaluate(tmp_path / "run", attempts=1).attempts == 16
    result = train(toy_config(policy={"lora": {"rank": 4}}, run={"updates": 4}), out=tmp_path / "run", resume=True)
    assert result.updates == 4


def test_an_engine_in_a_process_of_its_own_trains_and_replays(toy_config, tmp_path):
    config = toy_config(run={"clock": "real"}, engine={"placement": "process"})
    train(config, out=tmp_path / "run")
    assert replay(tmp_path / "run", resolve_recipe(config)).ok
    assert len(read_metrics(tmp_path / "run")) == 3


def test_real_time_trains_and_replays_too(toy_config, tmp_path):
    config = toy_config(run={"clock": "real"})
    train(config, out=tmp_path / "run")
    assert replay(tmp_path / "run", resolve_recipe(config)).ok
    assert Counter(type(event).__name__ for event in events(tmp_path / "run", Consumption)) == {"Consumption": 48}


@pytest.mark.parametrize("sections", [{"environment": {"split": "trian"}}, {"evaluation": {"splits": ("unsen",), "attempts": 1}}])
def test_a_split_that_the_world_does_not_have_is_refused_before_anything_costly(sections, toy_config, tmp_path):
    with pytest.raises(UserError, match="the splits train and unseen"):
        train(toy_config(**sections), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_overwritten_and_an_absent_one_not_resumed(toy_config, tmp_path):
    train(toy_config(), out=tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        train(toy_config(), out=tmp_path / "run")
    with pytest.raises(UserError, match="not a run directory"):
        train(toy_config(), out=tmp_path / "absent", resume=True)
    with pytest.raises(UserError, match=r"differs.*learner.learning_rate \(0.003 -> 0.001\)"):
        train(toy_config(learner={"learning_rate": 1e-3}), out=tmp_path / "run", resume=True)
