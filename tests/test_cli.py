"""The command as a person meets it: exit status, one clear sentence, what is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.config import resolve_recipe, to_toml
from headrace.records.metrics import read_metrics
from headrace.records.run_store import RunReader, is_run
from headrace.rollout.trajectory import Consumption
from headrace.training.jobs import run_config
from headrace.training.replay import replay

HEADRACE = [sys.executable, "-m", "headrace.cli"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def headrace(*arguments, timeout=120):
    return subprocess.run([*HEADRACE, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


def start(*arguments):
    return subprocess.Popen([*HEADRACE, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


@pytest.fixture
def toy_file(toy_config, tmp_path):
    def write(**sections):
        path = tmp_path / "toy.toml"
        path.write_text(to_toml(toy_config(**sections)))
        return path

    return write


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.05)


def updates_of(folder: Path) -> int:
    return len(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


def test_help_is_quick():
    headrace("--help")
    times = []
    for _ in range(3):
        began = time.monotonic()
        result = headrace("--help")
        times.append(time.monotonic() - began)
    assert result.returncode == 0 and "train" in result.stdout
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert min(times) < 0.5 * max(1.0, load), times


def test_the_version_is_the_packages():
    import headrace as package

    assert headrace("--version").stdout.strip() == f"headrace {package.__version__}"


def test_recipes_prints_every_recipe_with_its_paper():
    from headrace.algorithms import RECIPES

    text = headrace("recipes").stdout
    assert all(name in text for name in RECIPES)
    assert "2608.24870" in text and "2602.19327" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "learner.learning_rte=1"], ["learner.learning_rte", "learner.learning_rate"]),
        (["--set", "recipe=grpo", "--set", "recipe_options.group_size=1"], ["group_size"]),
        (["--out", "{file}/below"], ["--out", "written"]),
        (["--resume"], ["--resume", "--out"]),
        (["--resume", "--out", "{absent}"], ["not a run directory"]),
        (["--set", "environment.name=nowhere.py:toy"], ["nowhere.py"]),
        (["--set", "policy.model={absent}"], ["absent"]),
    ],
)
def test_what_is_wrong_with_a_command_is_status_2_and_one_clear_sentence(arguments, words, toy_file, tmp_path):
    (tmp_path / "file").write_text("")
    places = {"file": tmp_path / "file", "absent": tmp_path / "absent"}
    result = headrace("train", toy_file(), "--plain", *[argument.format(**places) for argument in arguments])
    message = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 2, result.stderr
    assert message.startswith("headrace: ") and all(word in message for word in words), message
    assert "Traceback" not in result.stderr


def test_a_missing_file_is_status_2_and_named(tmp_path):
    result = headrace("train", tmp_path / "absent.toml")
    assert result.returncode == 2 and "absent.toml: no such configuration file" in result.stderr


@pytest.mark.parametrize("command", ["report", "replay"])
def test_a_folder_that_is_no_run_is_status_2(command, tmp_path):
    result = headrace(command, tmp_path)
    assert result.returncode == 2 and "not a run directory" in result.stderr


def test_a_run_that_cannot_go_on_is_status_1_with_the_cause(toy_file, tmp_path):
    path = toy_file(environment={"options": {"fail": "all"}}, values={"rollouts": 0})
    result = headrace("train", path, "--out", tmp_path / "run", "--plain")
    assert result.returncode == 1 and "is broken" in result.stderr


def test_train_evaluate_replay_and_report_from_the_command_line(toy_file, tmp_path):
    run = tmp_path / "run"
    done = headrace("train", toy_file(), "--out", run, "--plain")
    assert done.returncode == 0 and "report.html" in done.stdout, done.stderr
    assert "update 3/3" in done.stderr
    assert '"success"' in headrace("evaluate", run, "--json", "--attempts", 1).stdout
    assert headrace("evaluate", run, "--greedy", "--attempts", 1, "--plain").returncode == 0
    assert "all match bit for bit" in headrace("replay", run).stdout
    assert headrace("report", run, "--out", tmp_path / "page.html").returncode == 0
    assert (tmp_path / "page.html").read_text().lstrip().lower().startswith("<!doctype html>")
    again = headrace("train", toy_file(), "--out", run, "--plain")
    assert again.returncode == 2 and "already holds a run" in again.stderr


def test_ctrl_c_leaves_a_run_that_goes_on(toy_file, tmp_path):
    path, run = toy_file(run={"updates": 100000, "clock": "real", "checkpoint_every": 5}), tmp_path / "run"
    process = start("train", path, "--out", run, "--plain")
    wait_for(lambda: updates_of(run) >= 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume" in out
    done = updates_of(run)
    resumed = headrace("train", path, "--out", run, "--resume", "--plain", "--set", f"run.updates={done + 3}")
    assert resumed.returncode == 0, resumed.stderr
    assert [row.update for row in read_metrics(run)] == list(range(done + 3))
    assert replay(run, resolve_recipe(run_config(run))).ok


@pytest.mark.parametrize("updates_before", [0, 1, 7])
def test_a_killed_run_goes_on_and_uses_every_attempt_at_most_once(updates_before, toy_file, tmp_path):
    path, run = toy_file(run={"updates": 100000, "clock": "real", "checkpoint_every": 3}), tmp_path / "run"
    process = start("train", path, "--out", run, "--plain")
    wait_for(lambda: is_run(run) and updates_of(run) >= updates_before)
    process.kill()
    process.communicate(timeout=60)
    resumed = headrace("train", path, "--out", run, "--resume", "--plain", "--set", f"run.updates={updates_before + 5}")
    assert resumed.returncode == 0, resumed.stderr
    report = replay(run, resolve_recipe(run_config(run)))
    assert report.ok, str(report)
    from headrace.records.ledger import effective

    with RunReader(run) as reader:
        used = [event.dispatch for _, event in effective(reader.events()) if isinstance(event, Consumption)]
    assert len(used) == len(set(used)) == 16 * len(read_metrics(run))
    assert [row.update for row in read_metrics(run)] == list(range(len(read_metrics(run))))


def test_two_trainers_of_one_run_are_refused(toy_file, tmp_path):
    path, run = toy_file(run={"updates": 100000, "clock": "real"}), tmp_path / "run"
    process = start("train", path, "--out", run, "--plain")
    try:
        wait_for(lambda: updates_of(run) >= 1)
        second = headrace("train", path, "--out", run, "--resume", "--plain")
        assert second.returncode == 2 and "headrace: " in second.stderr
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_world_that_blocks_a_thread_for_ever_does_not_keep_the_process_from_ending(toy_config, tmp_path):
    world = tmp_path / "own.py"
    world.write_text(
        "import asyncio, time\nfrom dataclasses import replace\nfrom fakes.toy_world import ToyEnvironment, toy\n"
        "class Blocking(ToyEnvironment):\n"
        "    async def reset(self, task):\n"
        "        if task.id == 'train-3': await asyncio.to_thread(time.sleep, 1e6)\n"
        "        return await super().reset(task)\n"
        "def blocking(): return replace(toy(), environment=lambda: Blocking(1, '', '', 0.0))\n"
    )
    path, run = tmp_path / "toy.toml", tmp_path / "run"
    sections = {"environment": {"name": f"{world}:blocking"}, "values": {"rollouts": 0}, "rollout": {"environment_deadline": 0.5}}
    path.write_text(to_toml(toy_config(**sections, run={"updates": 8, "clock": "real"})))
    environment = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [*HEADRACE, "train", str(path), "--out", str(run), "--plain"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0 and "threads that do not end" in done.stderr, done.stderr


def test_an_interrupted_preparation_says_how_to_go_on_with_what_was_set(toy_file, tmp_path):
    path, run = toy_file(run={"clock": "real"}, values={"rollouts": 1}), tmp_path / "run"
    process = start("train", path, "--out", run, "--plain", "--set", "values.rollouts=100000")
    wait_for(lambda: (run / "config.toml").exists())
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"go on with: headrace train {run}/config.toml --out {run} --resume" in err
    assert run_config(run).values.rollouts == 100000
