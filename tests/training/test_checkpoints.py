import json

import pytest
import torch
from safetensors import SafetensorError

from headrace.errors import RunFailed
from headrace.training import checkpoints
from headrace.training.checkpoints import Checkpoint, load_newest, save


def make(updates: int) -> Checkpoint:
    return Checkpoint(
        updates=updates,
        version=updates,
        log_position=10 * updates,
        learner={"weights": {"w": torch.full((4,), float(updates))}, "steps": updates},
        drift={"tasks": ["a"]},
        snapshots={updates - 1: {"w": torch.zeros(4)}},
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    save(tmp_path, make(3), keep=2)
    loaded, passed_over = load_newest(tmp_path)
    assert passed_over == []
    assert (loaded.updates, loaded.version, loaded.log_position) == (3, 3, 30)
    assert torch.equal(loaded.learner["weights"]["w"], torch.full((4,), 3.0))
    assert loaded.drift == {"tasks": ["a"]}
    assert torch.equal(loaded.snapshots[2]["w"], torch.zeros(4))


def test_only_the_newest_are_kept(tmp_path):
    for updates in (1, 2, 3, 12):
        save(tmp_path, make(updates), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-000003", "update-000012"]


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path):
    save(tmp_path, make(1), keep=2)
    newest = save(tmp_path, make(2), keep=2)
    data = bytearray((newest / "learner.pt").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (newest / "learner.pt").write_bytes(bytes(data))
    loaded, passed_over = load_newest(tmp_path)
    assert loaded.updates == 1
    assert len(passed_over) == 1 and "update-000002" in passed_over[0] and "learner.pt" in passed_over[0]


def test_a_damaged_checkpoint_does_not_stand_in_the_place_of_a_good_one(tmp_path):
    """Restored from 5 because 10 is damaged; the next save, 6, must outlive the pruning that keeps one."""
    save(tmp_path, make(5), keep=1)
    damaged = save(tmp_path, make(10), keep=2)
    (damaged / "learner.pt").write_bytes(b"")
    assert load_newest(tmp_path)[0].updates == 5
    save(tmp_path, make(6), keep=1)
    assert load_newest(tmp_path)[0].updates == 6
    assert [path.name for path in tmp_path.iterdir()] == ["update-000006"]


def test_a_checkpoint_that_knows_more_than_the_log_is_passed_over(tmp_path):
    save(tmp_path, make(1), keep=2)
    save(tmp_path, make(2), keep=2)
    loaded, passed_over = load_newest(tmp_path, log_length=15)
    assert loaded.updates == 1 and "after 20 events, but the log holds 15" in passed_over[0]


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 1}', '{"format": 1, "files": 3}'])
def test_a_damaged_manifest_is_passed_over(text, tmp_path):
    save(tmp_path, make(1), keep=2)
    (save(tmp_path, make(2), keep=2) / "checkpoint.json").write_text(text)
    assert load_newest(tmp_path)[0].updates == 1


def test_what_killed_processes_left_half_written_is_cleared_away(tmp_path):
    (tmp_path / ".update-000007.writing").mkdir()
    (tmp_path / ".update-000004.old").mkdir()
    save(tmp_path, make(8), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000008"]


def test_a_half_written_checkpoint_is_never_seen(tmp_path):
    save(tmp_path, make(1), keep=1)
    (tmp_path / ".update-000002.writing").mkdir()
    (tmp_path / ".update-000002.writing" / "learner.pt").write_bytes(b"half")
    assert load_newest(tmp_path)[0].updates == 1


def test_a_full_disk_leaves_the_old_checkpoint_in_place(tmp_path, monkeypatch):
    save(tmp_path, make(1), keep=1)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(RunFailed, match="No space left"):
        save(tmp_path, make(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000001"]
    assert load_newest(tmp_path)[0].updates == 1


def test_a_checkpoint_of_the_same_update_replaces_the_old_one(tmp_path):
    save(tmp_path, make(1), keep=2)
    save(tmp_path, make(1), keep=2)
    assert load_newest(tmp_path)[0].updates == 1


def test_no_checkpoint_is_one_clear_sentence(tmp_path):
    with pytest.raises(RunFailed, match="no usable checkpoint"):
        load_newest(tmp_path / "nothing")


def test_another_format_is_named(tmp_path):
    path = save(tmp_path, make(1), keep=1)
    manifest = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(RunFailed, match="format 99"):
        load_newest(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("PytorchStreamWriter failed writing file"), SafetensorError("os error 28")])
def test_a_full_disk_as_torch_and_safetensors_say_it_is_a_failed_run(error, tmp_path, monkeypatch):
    save(tmp_path, make(1), keep=1)

    def full(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(checkpoints.torch, "save", full)
    with pytest.raises(RunFailed, match="could not be written"):
        save(tmp_path, make(2), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["update-000001"]
