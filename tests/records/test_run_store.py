import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import RunFailed, UserError
from headrace.records.ledger import LedgerError
from headrace.records.run_store import RUN_FILE, RunError, RunReader, RunStore, is_run
from headrace.rollout.trajectory import (
    Consumption,
    Dispatch,
    Drop,
    Prior,
    Publication,
    Receipt,
    Restored,
    TokenRow,
    Trajectory,
    Turn,
)


def dispatch(number, task="task", version=0, group=None):
    return Dispatch(number, task, "pick", version, 0.1, 0.7, group, 2**62 + number)


def attempt(sent, *, rows=None, turns=(), outcome=1.0):
    rows = rows if rows is not None else (TokenRow((5, 6, 7), (False, True, True), (0.0, -0.5, -0.25), (-1, 0, 0)),)
    return Trajectory(sent, rows, tuple(turns), outcome, outcome > 0.5, "success", 2, 0.5, 0.125)


def received(trajectory):
    return Receipt(trajectory.dispatch.number, trajectory.outcome, trajectory.success, trajectory.action_tokens, trajectory.reason)


@pytest.fixture
def store(tmp_path):
    ticks = iter(range(10**6))
    with RunStore.create(tmp_path / "run", clock=lambda: float(next(ticks))) as store:
        yield store


def test_every_kind_of_event_reads_back_equal(store):
    sent = [dispatch(0), Dispatch(1, "täsk\n<b>", "look", 0, None, None, 3, 7), dispatch(2)]
    events = [Prior("task", 1 / 3, 7.6, 0, 2.5, 8), *sent]
    events += [received(attempt(sent[0])), Drop(1, "engine_error", "it fell \ud800 over"), received(attempt(sent[2], outcome=0.1))]
    events += [Consumption(0, 0, -0.1 - 0.2, 0.03), Consumption(2, 0, 1e-300), Publication(1, 0), Restored("checkpoints/1", 8)]
    assert [store.append(event) for event in events] == list(range(len(events)))
    assert list(store.events()) == list(enumerate(events))
    assert list(store.events(start=9)) == list(enumerate(events))[9:]
    assert [seconds for _, seconds, _ in store.timed_events()] == [float(i) for i in range(len(events))]


def test_a_trajectory_reads_back_with_the_same_tokens_masks_and_logprobs(store):
    rows = (
        TokenRow((1, 70000, 3), (False, True, True), (0.0, -1.5, -0.0078125), (-1, 0, 1)),
        TokenRow((9,), (True,), (float(np.float32(-0.1)),), (1,)),
        TokenRow((), (), (), ()),
    )
    sent = dispatch(0)
    trajectory = attempt(sent, rows=rows, turns=[Turn("You see <a> \x00 mug ü", "take mug"), Turn("", "")], outcome=0.25)
    store.append(sent)
    store.append_receipt(received(trajectory), trajectory)
    assert store.trajectory(0) == trajectory


def test_logprobs_are_kept_as_float32(store):
    sent = dispatch(0)
    trajectory = attempt(sent, rows=(TokenRow((1,), (True,), (-0.1,), (0,)),))
    store.append(sent)
    store.append_receipt(received(trajectory), trajectory)
    assert store.trajectory(0).rows[0].logprobs == (float(np.float32(-0.1)),)


ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.one_of(st.none(), st.tuples(st.floats(width=32, max_value=0), st.integers(0, 99))))),
    max_size=3,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.lists(st.tuples(st.text(), st.text()), max_size=3))
def test_any_trajectory_survives_the_codec(rows, turns):
    from headrace.records.codec import decode_trajectory, encode_trajectory

    built = tuple(
        TokenRow(
            tuple(token for token, _ in row),
            tuple(sampled is not None for _, sampled in row),
            tuple(0.0 if sampled is None else sampled[0] for _, sampled in row),
            tuple(-1 if sampled is None else sampled[1] for _, sampled in row),
        )
        for row in rows
    )
    trajectory = attempt(dispatch(3), rows=built, turns=[Turn(*turn) for turn in turns])
    assert decode_trajectory(encode_trajectory(trajectory), dispatch(3)) == trajectory


def test_a_logprob_on_a_token_that_was_not_sampled_is_refused(store):
    sent = dispatch(0)
    store.append(sent)
    bad = attempt(sent, rows=(TokenRow((1, 2), (False, True), (-0.5, -0.5), (-1, 0)),))
    with pytest.raises(ValueError, match="dispatch 0: a token with action mask False"):
        store.append_receipt(received(bad), bad)
    assert len(store) == 1


def test_a_receipt_and_its_trajectory_are_stored_both_or_neither(store):
    sent = dispatch(0)
    store.append(sent)
    store.append_receipt(received(attempt(sent)), attempt(sent))
    with pytest.raises(LedgerError, match="dispatch 0 was already received"):
        store.append_receipt(received(attempt(sent)), attempt(sent))
    with pytest.raises(LedgerError, match="receipt of dispatch 1 cannot carry the trajectory of dispatch 0"):
        store.append_receipt(Receipt(1, 1.0, True, 1, "success"), attempt(sent))
    assert len(store) == 2
    with sqlite3.connect(store.folder / RUN_FILE) as plain:
        assert plain.execute("SELECT count(*) FROM trajectories").fetchone() == (1,)


def test_several_events_are_logged_all_or_none(store):
    sent = [dispatch(0), dispatch(1)]
    store.append_all(sent)
    for each in sent:
        store.append_receipt(received(attempt(each)), attempt(each))
    with pytest.raises(LedgerError, match="dispatch 0 cannot be consumed: it was already consumed"):
        store.append_all([Consumption(0, 0, 0.1), Consumption(0, 0, 0.1)])
    assert len(store) == 4
    assert store.append_all([Consumption(0, 0, 0.1), Consumption(1, 0, 0.2), Publication(1, 0)]) == 4
    assert len(store) == 7


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused(store, advantage):
    store.append(dispatch(0))
    store.append_receipt(received(attempt(dispatch(0))), attempt(dispatch(0)))
    with pytest.raises(ValueError, match="not finite"):
        store.append(Consumption(0, 0, advantage))
    assert len(store) == 2


def test_a_restore_frees_what_it_took_back_and_keeps_it_readable(store):
    first, second = dispatch(0), dispatch(1)
    store.append(first)
    store.append_receipt(received(attempt(first, outcome=0.0)), attempt(first, outcome=0.0))
    store.append(second)
    with pytest.raises(LedgerError):
        store.append_receipt(received(attempt(first)), attempt(first))
    store.append(Restored("checkpoints/1", 1))
    with pytest.raises(RunError, match="no trajectory of dispatch 0"):
        store.trajectory(0)
    store.append_receipt(received(attempt(first)), attempt(first))
    store.append(second)
    assert store.trajectory(0).outcome == 1.0
    assert len(store) == 6
    with pytest.raises(LedgerError, match="cannot go back to log position 9"):
        store.append(Restored("checkpoints/1", 9))


def test_a_run_goes_on_where_it_was_closed(tmp_path):
    with RunStore.create(tmp_path, clock=lambda: 1.0) as store:
        store.append(dispatch(0))
    with RunStore.resume(tmp_path, clock=lambda: 2.0) as store:
        with pytest.raises(LedgerError, match="dispatch 0 was already made"):
            store.append(dispatch(0))
        assert store.append(dispatch(1)) == 1
    with RunReader(tmp_path) as reader:
        assert [(position, seconds) for position, seconds, _ in reader.timed_events()] == [(0, 1.0), (1, 2.0)]


def test_a_second_trainer_is_refused_and_a_reader_is_not(store):
    store.append(dispatch(0))
    with pytest.raises(RunError, match=rf"process {os.getpid()} on .* is already training in"):
        RunStore.resume(store.folder, clock=time.monotonic)
    with RunReader(store.folder) as reader:
        assert len(list(reader.events())) == 1
        store.append(dispatch(1))
        assert len(list(reader.events())) == 2
    assert store.append(dispatch(2)) == 2


def test_a_run_is_not_started_twice_in_one_folder(tmp_path):
    assert not is_run(tmp_path)
    RunStore.create(tmp_path, clock=time.monotonic).close()
    assert is_run(tmp_path)
    with pytest.raises(RunError, match="already holds a run: resume it or choose another folder"):
        RunStore.create(tmp_path, clock=time.monotonic)
    assert is_run(tmp_path)


WRITER = """
import sys, time
from headrace.records.run_store import RunStore
from headrace.rollout.trajectory import *
store = RunStore.create(sys.argv[1], clock=time.monotonic)
row = TokenRow((1, 2), (False, True), (0.0, -0.5), (-1, 0))
number = 0
while True:
    sent = Dispatch(number, "task", "pick", 0, 0.5, 0.5, None, number)
    store.append(sent)
    store.append_receipt(Receipt(number, 1.0, True, 1, "success"), Trajectory(sent, (row,), (), 1.0, True, "success"))
    print(number, flush=True)
    number += 1
"""


def test_after_kill_9_everything_that_was_acknowledged_is_there_and_the_run_goes_on(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    acknowledged = -1
    for line in writer.stdout:
        acknowledged = int(line)
        if acknowledged >= 200:
            break
    with pytest.raises(RunError, match=f"process {writer.pid} on .* is already training"):
        RunStore.resume(tmp_path, clock=time.monotonic)
    writer.send_signal(signal.SIGKILL)
    acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait()
    with RunReader(tmp_path) as reader:
        events = [event for _, event in reader.events()]
        assert reader.trajectory(acknowledged).dispatch.number == acknowledged
    assert len(events) in (2 * acknowledged + 2, 2 * acknowledged + 3, 2 * acknowledged + 4)
    with RunStore.resume(tmp_path, clock=time.monotonic) as store:
        assert store.append(dispatch(10**6)) == len(events)


READER = """
import os, sys
from headrace.records.run_store import RunReader
if os.getuid() == 0:
    os.setuid(65534)  # permissions stop root nowhere
folder = sys.argv[1]
assert not os.access(folder, os.W_OK)
print(len(RunReader(folder)))
"""


def test_a_finished_run_is_readable_in_a_folder_without_write_permission():
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        with RunStore.create(folder, clock=time.monotonic) as store:
            store.append(dispatch(0))
        Path(parent).chmod(0o755)
        (folder / RUN_FILE).chmod(0o444)
        folder.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, check=False)
        folder.chmod(0o755)
    assert done.stdout.strip() == "1", done.stderr


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no run in .*nowhere: run\.sqlite is missing"):
        RunReader(tmp_path / "nowhere")
    with pytest.raises(RunError, match="no run in"):
        RunStore.resume(tmp_path / "nowhere", clock=time.monotonic)
    assert not (tmp_path / "nowhere").exists()
    assert issubclass(RunError, UserError)


def test_files_that_are_no_run_are_named(tmp_path):
    (tmp_path / RUN_FILE).write_bytes(b"not a database at all, but long enough to look at" * 40)
    assert not is_run(tmp_path)
    for opening in (RunReader, lambda f: RunStore.resume(f, clock=time.monotonic), lambda f: RunStore.create(f, clock=time.monotonic)):
        with pytest.raises(RunError, match=r"run\.sqlite"):
            opening(tmp_path)
    (tmp_path / RUN_FILE).unlink()
    with sqlite3.connect(tmp_path / RUN_FILE) as other:
        other.execute("CREATE TABLE recipes (name)")
    with pytest.raises(RunError, match="is not the log of a Headrace run"):
        RunReader(tmp_path)
    with pytest.raises(RunError, match="already holds"):
        RunStore.create(tmp_path, clock=time.monotonic)


def test_another_schema_version_is_named(tmp_path):
    RunStore.create(tmp_path, clock=time.monotonic).close()
    with sqlite3.connect(tmp_path / RUN_FILE) as other:
        other.execute("PRAGMA user_version = 99")
    assert is_run(tmp_path)
    with pytest.raises(RunError, match="has schema version 99, but this program reads 1"):
        RunReader(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE events SET kind = 'riddle' WHERE position = 1",
        "UPDATE events SET body = '{}' WHERE position = 1",
        "UPDATE events SET body = 'x' WHERE position = 1",
        "DELETE FROM events WHERE position = 1",
    ],
)
def test_a_damaged_log_is_named_with_the_place(tmp_path, damage):
    with RunStore.create(tmp_path, clock=time.monotonic) as store:
        store.append_all([dispatch(0), dispatch(1), dispatch(2)])
    with sqlite3.connect(tmp_path / RUN_FILE) as other:
        other.execute(damage)
    with RunReader(tmp_path) as reader, pytest.raises(RunError, match=r"is damaged.*position [01]"):
        list(reader.events())
    with pytest.raises(RunError, match="is damaged"):
        RunStore.resume(tmp_path, clock=time.monotonic)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot write to .*file"):
        RunStore.create(tmp_path / "file", clock=time.monotonic)


def test_a_log_that_cannot_be_written_ends_the_run_with_a_sentence(store):
    store.append(dispatch(0))
    store._connection.execute(f"PRAGMA max_page_count = {store._connection.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(RunFailed, match=r"cannot write to .*run\.sqlite: .*full; the run can be resumed"):
        for number in range(1, 10_000):
            store.append(dispatch(number))
    assert len(store) == number
    store._connection.execute("PRAGMA max_page_count = 100000")
    assert store.append(dispatch(number)) == number


def test_plain_sql_reads_the_log(store):
    store.append(dispatch(4, task="desk"))
    store.append_receipt(Receipt(4, 0.75, True, 2, "success"), attempt(dispatch(4, task="desk"), outcome=0.75))
    with sqlite3.connect(f"file:{store.folder / RUN_FILE}?mode=ro", uri=True) as plain:
        query = "SELECT d.task, d.alpha, r.outcome, r.clock FROM dispatches d JOIN receipts r ON r.dispatch = d.number"
        assert plain.execute(query).fetchall() == [("desk", 0.1, 0.75, 1.0)]


def test_appending_is_thousands_of_events_a_second(store):
    started = time.process_time()
    for number in range(1000):
        sent = dispatch(number)
        store.append(sent)
        store.append_receipt(received(attempt(sent)), attempt(sent))
    assert 2000 / (time.process_time() - started) > 2000


def test_what_killed_processes_wrote_aside_is_cleared_away(tmp_path):
    RunStore.create(tmp_path, clock=lambda: 0.0).close()
    for name in (".policy.writing-17", ".policy.old-17"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    for name in (".metrics.jsonl.17", ".config.toml.writing", ".gitignore", "policy.txt"):
        (tmp_path / name).write_text("")
    before = {path.name for path in tmp_path.iterdir()}
    RunStore.resume(tmp_path, clock=lambda: 0.0).close()
    gone = before - {path.name for path in tmp_path.iterdir()}
    assert {name for name in gone if not name.startswith("run.")} == {
        ".policy.writing-17",
        ".policy.old-17",
        ".metrics.jsonl.17",
        ".config.toml.writing",
    }
