import dataclasses
import itertools
import json
import math
import random
import sqlite3

import pytest

from fakes.fake_run import FakeRun
from headrace.algorithms import PromptValue, prior_from_rollouts, recipe
from headrace.records.run_store import RUN_FILE, RunError, RunStore
from headrace.rollout.trajectory import (
    Consumption,
    Dispatch,
    Prior,
    Publication,
    Receipt,
    Restored,
    TokenRow,
    Trajectory,
    Turn,
)
from headrace.training.credit import credit
from headrace.training.folds import RunState
from headrace.training.replay import replay


class LittleRun:
    """Sends, receives and consumes as a loop does, through store and state, with outcomes and receipt order by chance."""

    def __init__(self, folder, name="spo++", seed=0):
        self.recipe = recipe(name)
        self.store = RunStore.create(folder, clock=itertools.count(0.0, 0.5).__next__)
        self.state = RunState(self.recipe.new_memory())
        self.chance = random.Random(seed)
        for task in "abcdef":
            prior = prior_from_rollouts(self.chance.randint(0, 8), 8)
            self.log(Prior(task, prior.alpha, prior.beta, 0, 0.0, 8))

    def log(self, event, trajectory=None):
        position = self.store.append(event) if trajectory is None else self.store.append_receipt(event, trajectory)
        self.state.apply(event, position)

    def send(self, task):
        group = self.state.next_dispatch if self.recipe.group_size > 1 else None
        for _ in range(self.recipe.group_size):
            memory = self.state.memory
            value = memory.read(task, self.state.version) if memory is not None else None
            alpha, beta = (value.alpha, value.beta) if value else (None, None)
            self.log(Dispatch(self.state.next_dispatch, task, "pick", self.state.version, alpha, beta, group, 1))

    def receive(self, number):
        sent = self.state.in_flight[number]
        length = self.chance.randint(1, 9)
        mask, sampled = (False, False, *[True] * length), [sent.version] * length
        row = TokenRow((1,) * (length + 2), mask, (0.0, 0.0, *[-0.5] * length), (-1, -1, *sampled))
        outcome = self.chance.choice([0.0, 0.25, 1.0])
        trajectory = Trajectory(sent, (row,), (Turn("see", "do"),), outcome, outcome == 1.0, "horizon")
        self.log(Receipt(number, outcome, outcome == 1.0, length, "horizon"), trajectory)

    def update(self, *, publish=True):
        """Six tasks out, all received in any order, all consumed."""
        for task in "abcdef":
            self.send(task)
        numbers = list(self.state.in_flight)
        self.chance.shuffle(numbers)
        for number in numbers:
            self.receive(number)
        self.consume(list(self.state.waiting))
        if publish:
            self.log(Publication(self.state.version + 1, self.state.next_batch - 1))

    def consume(self, numbers):
        batch = [self.store.trajectory(number) for number in numbers]
        number = self.state.next_batch
        drift = self.chance.choice([None, 0.01, 0.1]) if self.recipe.memory == "receipt" else None
        for trajectory, advantage in zip(batch, credit(batch, self.recipe).advantages, strict=True):
            self.log(Consumption(trajectory.dispatch.number, number, advantage, drift))


@pytest.fixture
def run(tmp_path):
    run = LittleRun(tmp_path)
    for _ in range(3):
        run.update()
    run.store.close()
    return run


def edit(folder, statement):
    with sqlite3.connect(folder / RUN_FILE) as plain:
        assert plain.execute(statement).rowcount == 1


@pytest.mark.parametrize("name", ["spo++", "spo", "spo++/trajectory", "spo++/receipt", "grpo", "rloo"])
def test_a_faithful_log_replays_bit_for_bit(tmp_path, name):
    run = LittleRun(tmp_path, name, seed=3)
    for update in range(4):
        run.update(publish=update % 2 == 1)
    report = replay(tmp_path, run.recipe)
    assert report.ok, str(report)
    sent = 24 * run.recipe.group_size
    assert (report.values, report.advantages, report.batches, report.unfinished) == (sent, sent, 4, 0)
    assert "all match bit for bit" in str(report)


def test_another_recipe_than_the_runs_does_not_match(run, tmp_path):
    report = replay(tmp_path, recipe("spo++/trajectory"))
    assert {mismatch.dispatch for mismatch in report.mismatches} == set(range(18))
    report = replay(tmp_path, dataclasses.replace(run.recipe, rho=0.9))
    assert report.mismatches[0].sentence.startswith("dispatch 6 (")


def test_one_changed_last_bit_of_a_frozen_value_is_found(run, tmp_path):
    with sqlite3.connect(tmp_path / RUN_FILE) as plain:
        position, body = plain.execute("SELECT position, body FROM events WHERE kind = 'dispatch' AND dispatch = 7").fetchone()
        fields = json.loads(body)
        changed = json.dumps(fields | {"alpha": math.nextafter(fields["alpha"], 99.0)})
        plain.execute("UPDATE events SET body = ? WHERE position = ?", (changed, position))
    report = replay(tmp_path, run.recipe)
    assert {mismatch.dispatch for mismatch in report.mismatches} >= {7}
    assert "dispatch 7 (b) was frozen at alpha, beta" in str(report)


def test_a_changed_advantage_is_found_with_its_dispatch(run, tmp_path):
    edit(tmp_path, "UPDATE events SET body = json_set(body, '$.advantage', 0.125) WHERE kind = 'consumption' AND dispatch = 9")
    (mismatch,) = replay(tmp_path, run.recipe).mismatches
    assert mismatch.dispatch == 9
    assert "dispatch 9 was trained on with advantage 0.125 in batch 1, recomputed" in str(mismatch)


def test_a_changed_outcome_is_found_against_the_stored_attempt(run, tmp_path):
    edit(tmp_path, "UPDATE events SET body = json_set(body, '$.outcome', 0.5) WHERE kind = 'receipt' AND dispatch = 17")
    (mismatch,) = replay(tmp_path, run.recipe).mismatches
    assert mismatch.dispatch == 17 and "but its attempt holds" in mismatch.sentence


def test_a_second_consumption_is_found(run, tmp_path):
    query = "UPDATE events SET dispatch = 13, body = json_set(body, '$.dispatch', 13) WHERE kind = 'consumption' AND dispatch = 14"
    edit(tmp_path, query)
    report = replay(tmp_path, run.recipe)
    assert any("dispatch 13 cannot be consumed: it was already consumed" in mismatch.sentence for mismatch in report.mismatches)


def test_what_a_restore_took_back_is_not_compared(tmp_path):
    run = LittleRun(tmp_path, seed=1)
    run.update()
    kept = len(run.store)
    run.update()
    run.store.append(Restored("checkpoints/1", kept))
    run.store.close()
    assert replay(tmp_path, run.recipe).batches == 1
    report = replay(tmp_path, run.recipe)
    assert report.ok and report.values == 6 and report.restored == 19


def test_a_batch_that_a_killed_process_left_half_logged_is_said_and_not_compared(tmp_path):
    run = LittleRun(tmp_path)
    run.update()
    run.update(publish=False)
    run.store.close()
    with sqlite3.connect(tmp_path / RUN_FILE) as plain:
        last = plain.execute("SELECT max(position) FROM events").fetchone()[0]
        plain.execute("DELETE FROM events WHERE position > ?", (last - 2,))
    report = replay(tmp_path, run.recipe)
    assert report.ok and (report.batches, report.unfinished) == (1, 4)
    assert "the last 4 consumptions are of a batch that was not logged to its end" in str(report)


def test_the_fake_run_that_other_tests_read_is_a_lawful_one(tmp_path):
    report = replay(FakeRun(tmp_path / "run", updates=5, batch=8).write(), recipe("spo++"))
    assert report.ok and report.batches == 5


def test_a_run_without_updates_replays_to_nothing(tmp_path):
    LittleRun(tmp_path).store.close()
    report = replay(tmp_path, recipe("spo++"))
    assert report.ok and (report.values, report.batches) == (0, 0)


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(RunError, match="no run in"):
        replay(tmp_path / "nowhere", recipe("spo++"))


def test_a_prior_is_part_of_the_frozen_value(tmp_path):
    run = LittleRun(tmp_path)
    run.send("a")
    assert run.state.in_flight[0].alpha == run.state.priors["a"].alpha != PromptValue(0.5, 0.5).alpha
    edit(tmp_path, "UPDATE events SET body = json_set(body, '$.beta', 5.0) WHERE kind = 'prior' AND json_extract(body, '$.task') = 'a'")
    assert [mismatch.dispatch for mismatch in replay(tmp_path, run.recipe).mismatches] == [0]
