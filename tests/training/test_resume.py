"""What a stopped run may find when it goes on, in the toy world."""

import asyncio
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from headrace.config import resolve_recipe
from headrace.errors import RunFailed, UserError
from headrace.records.metrics import read_metrics
from headrace.records.run_store import RunReader
from headrace.rollout.trajectory import Consumption, Dispatch, Drop
from headrace.training import checkpoints, evaluation
from headrace.training.replay import replay
from headrace.training.run import EVALUATIONS_FILE, train


def weights(folder):
    return load_file(folder / "policy" / "model.safetensors")


def difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def evaluated(folder):
    return [row["update"] for row in evaluation.read(folder / EVALUATIONS_FILE)]


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_run_in_two_parts_ends_with_the_weights_of_one_in_a_piece(lora, toy_config, tmp_path):
    """With LoRA the policy that a run leaves holds the adapters merged; going on must not add them again."""
    if lora:
        pytest.importorskip("peft")
    settings = {"rollout": {"max_staleness": 0}, "policy": {"lora": lora} if lora else {}, "learner": {"learning_rate": 2e-2}}
    train(toy_config(run={"updates": 4}, **settings), out=tmp_path / "whole")
    train(toy_config(run={"updates": 2}, **settings), out=tmp_path / "parts")
    halfway = weights(tmp_path / "parts")
    train(toy_config(run={"updates": 4}, **settings), out=tmp_path / "parts", resume=True)
    assert difference(weights(tmp_path / "whole"), weights(tmp_path / "parts")) < 1e-6
    assert difference(halfway, weights(tmp_path / "parts")) > 1e-4


def test_a_run_whose_policy_folder_is_gone_goes_on_from_its_checkpoint(toy_config, tmp_path):
    train(toy_config(run={"updates": 2}), out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "policy")
    assert train(toy_config(run={"updates": 3}), out=tmp_path / "run", resume=True).updates == 3
    assert (tmp_path / "run" / "policy" / "config.json").is_file()


def test_a_new_run_in_a_folder_with_another_s_remains_starts_from_its_own_policy(toy_config, tmp_path):
    train(toy_config(run={"updates": 2}, learner={"learning_rate": 2e-2}, evaluation={"attempts": 1}), out=tmp_path / "run")
    (tmp_path / "run" / "run.sqlite").unlink()
    for side in ("run.sqlite-wal", "run.sqlite-shm"):
        (tmp_path / "run" / side).unlink(missing_ok=True)
    train(toy_config(run={"updates": 0}), out=tmp_path / "run")
    train(toy_config(run={"updates": 0}), out=tmp_path / "fresh")
    assert difference(weights(tmp_path / "run"), weights(tmp_path / "fresh")) == 0
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["update-000000"]
    assert evaluated(tmp_path / "run") == []


def test_an_evaluation_that_was_cut_off_is_made_up_for(toy_config, tmp_path):
    def config(updates):
        return toy_config(run={"updates": updates}, evaluation={"attempts": 1, "every": 2})

    train(config(2), out=tmp_path / "run")
    (tmp_path / "run" / EVALUATIONS_FILE).write_text("")
    train(config(5), out=tmp_path / "run", resume=True)
    assert evaluated(tmp_path / "run") == [2, 4, 5]


def test_evaluations_of_updates_that_are_taken_back_are_gone(toy_config, tmp_path):
    train(toy_config(run={"updates": 3}, evaluation={"attempts": 1}), out=tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "update-000003" / "learner.pt").write_bytes(b"damaged")
    train(toy_config(run={"updates": 2}, evaluation={"attempts": 1}), out=tmp_path / "run", resume=True)
    assert evaluated(tmp_path / "run") == [0, 2]


def test_the_last_evaluation_is_of_the_policy_that_is_left_behind(toy_config, tmp_path, monkeypatch):
    """Two updates a version and three updates: the third is never published to attempts, but it is what the run leaves."""
    from headrace.rollout.local_engine import LocalEngine

    published = {}

    async def publish(self, version, new, before=LocalEngine.publish):
        published[version] = {name: tensor.clone() for name, tensor in new.items()}
        await before(self, version, new)

    monkeypatch.setattr(LocalEngine, "publish", publish)
    train(toy_config(run={"updates": 3, "publish_every": 2}, evaluation={"attempts": 1}), out=tmp_path / "run")
    assert sorted(published) == [1, 2]
    saved = weights(tmp_path / "run")
    assert difference(saved, published[2]) == 0 and difference(saved, published[1]) > 0


def test_a_run_stopped_between_two_publications_sends_no_more_than_it_can_use(toy_config, tmp_path):
    settings = {"rollout": {"concurrency": 16}}
    train(toy_config(run={"updates": 3, "publish_every": 2}, **settings), out=tmp_path / "run")
    train(toy_config(run={"updates": 8, "publish_every": 2}, **settings), out=tmp_path / "run", resume=True)
    with RunReader(tmp_path / "run") as reader:
        assert [event for _, event in reader.events() if isinstance(event, Drop)] == []


def test_an_attempt_under_way_for_many_versions_leaves_again_under_its_own(toy_config, tmp_path):
    """One task takes longer than three versions live. Its snapshot is in the checkpoint, so that a resumed run can send it again."""
    settings = {"environment": {"options": {"slow": "train-3", "seconds": 3.0}}, "values": {"rollouts": 0}}
    train(toy_config(run={"updates": 8}, **settings), out=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        log = [event for _, event in reader.events()]
    ended = {event.dispatch for event in log if not isinstance(event, Dispatch) and hasattr(event, "dispatch")}
    oldest = min(event.version for event in log if isinstance(event, Dispatch) and event.number not in ended)
    point, _ = checkpoints.load_newest(tmp_path / "run" / "checkpoints")
    assert oldest < point.version - 1 and oldest in point.snapshots
    train(toy_config(run={"updates": 20}, **settings), out=tmp_path / "run", resume=True)
    with RunReader(tmp_path / "run") as reader:
        assert {event.reason for _, event in reader.events() if isinstance(event, Drop)} <= {"stale"}
    assert replay(tmp_path / "run", resolve_recipe(toy_config())).ok


def test_drops_between_the_last_update_and_the_stop_are_counted_by_the_next_update(toy_config, tmp_path):
    slow = {"environment": {"options": {"slow": "train-3", "seconds": 3.0}}, "values": {"rollouts": 0}}
    settings = {"rollout": {"publication": "abort", "max_staleness": 2}, **slow}
    train(toy_config(run={"updates": 3}, **settings), out=tmp_path / "run")
    train(toy_config(run={"updates": 6}, **settings), out=tmp_path / "run", resume=True)
    with RunReader(tmp_path / "run") as reader:
        log = [event for _, event in reader.events()]
    last = max(place for place, event in enumerate(log) if type(event).__name__ == "Publication")
    logged = sum(isinstance(event, Drop) for event in log[:last])
    assert 0 < logged == sum(sum(row.drops.values()) for row in read_metrics(tmp_path / "run"))


def test_a_log_shorter_than_the_newest_checkpoint_falls_back_to_an_older_one(toy_config, tmp_path):
    """What a power failure leaves: checkpoints are flushed to the disk, the log's last events were not."""
    train(toy_config(run={"updates": 2}), out=tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    point, _ = checkpoints.load_newest(folder)
    checkpoints.save(folder, replace(point, updates=3, log_position=10**6), keep=2)
    assert train(toy_config(run={"updates": 4}), out=tmp_path / "run", resume=True).updates == 4
    assert replay(tmp_path / "run", resolve_recipe(toy_config())).ok


def test_a_run_inside_a_running_event_loop_is_refused_in_one_sentence(toy_config, tmp_path):
    async def main():
        with pytest.raises(UserError, match=r"headrace.train: an event loop is already running here.*to_thread"):
            train(toy_config(), out=tmp_path / "run")
        await asyncio.to_thread(train, toy_config(), out=tmp_path / "run")

    asyncio.run(main())
    assert len(read_metrics(tmp_path / "run")) == 3


def test_a_context_too_small_for_the_first_prompt_ends_the_run_and_says_so(toy_config, tmp_path):
    config = toy_config(rollout={"context_limit": 5, "reply_tokens": 3}, values={"rollouts": 0})
    with pytest.raises(RunFailed, match=r"no_action_tokens.*rollout.context_limit"):
        train(config, out=tmp_path / "run")


def test_a_disk_that_refuses_is_a_failed_run_with_the_cause(toy_config, tmp_path, monkeypatch):
    from headrace.training.policy import Policy

    train(toy_config(), out=tmp_path / "run")

    def full(self, folder, **_):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(Policy, "save", full)
    with pytest.raises(RunFailed, match=r"No space left on device.*can be resumed"):
        train(toy_config(run={"updates": 4}), out=tmp_path / "run", resume=True)
    monkeypatch.undo()
    assert train(toy_config(run={"updates": 5}), out=tmp_path / "run", resume=True).updates == 5


def test_a_mistake_before_the_first_event_leaves_a_folder_that_can_be_used(toy_config, tmp_path):
    config = toy_config(values={"rollouts": 0}, policy={"lora": {"targets": ["nowhere"]}})
    pytest.importorskip("peft")
    with pytest.raises(UserError, match="nowhere"):
        train(config, out=tmp_path / "run")
    assert train(toy_config(), out=tmp_path / "run").updates == 3


def test_a_run_that_lost_its_configuration_is_not_resumed_under_just_any(toy_config, tmp_path):
    train(toy_config(), out=tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    with pytest.raises(UserError, match=r"has lost its config.toml"):
        train(toy_config(seed=7), out=tmp_path / "run", resume=True)


def test_offline_values_that_cannot_be_kept_are_used_all_the_same(toy_config, tmp_path):
    (tmp_path / "file").write_text("")
    assert train(toy_config(run={"cache": str(tmp_path / "file")}), out=tmp_path / "run").updates == 3


def test_the_drift_that_spo_measures_goes_on_to_the_bit_after_a_resume(toy_config, tmp_path):
    settings = {"recipe": "spo", "rollout": {"max_staleness": 0}}
    train(toy_config(run={"updates": 4}, **settings), out=tmp_path / "whole")
    train(toy_config(run={"updates": 2}, **settings), out=tmp_path / "parts")
    train(toy_config(run={"updates": 4}, **settings), out=tmp_path / "parts", resume=True)

    def drifts(folder):
        with RunReader(folder) as reader:
            return [(event.dispatch, event.drift) for _, event in reader.events() if isinstance(event, Consumption)]

    assert drifts(tmp_path / "whole") == drifts(tmp_path / "parts")
    assert any(drift for _, drift in drifts(tmp_path / "parts")[32:])


def test_a_world_that_cannot_be_made_is_named_and_ends_the_run(toy_config, tmp_path):
    world = tmp_path / "own.py"
    world.write_text(
        "from fakes.toy_world import toy\nfrom dataclasses import replace\n"
        "def fail(): raise OSError('no port left')\ndef broken(): return replace(toy(), environment=fail)\n"
    )
    for rollouts in (0, 1):
        config = toy_config(environment={"name": f"{world}:broken"}, values={"rollouts": rollouts})
        with pytest.raises(RunFailed, match=r"making the environment raised OSError: no port left"):
            train(config, out=tmp_path / f"run{rollouts}")
