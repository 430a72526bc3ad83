"""Checkpoints: what the log cannot give back (weights, optimizer, pinned snapshots, drift memory).

A checkpoint is a folder ``checkpoints/update-000010`` with files and a manifest of their sizes and SHA-256 sums. It is
written aside, synced, read back and verified, renamed, and only then are older ones pruned, so that a full disk or a kill
at any moment leaves the last good one in place. Everything else about a run's state is a fold over its log up to
``log_position``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.errors import RunFailed
from headrace.files import replace_folder

FORMAT = 1
_NAME = re.compile(r"update-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``updates`` done, ``version`` published, the log's length at that moment, and the states that go with them.

    ``learner`` and ``drift`` are what ``state_dict()`` of the learner and of the drift memory gave (tensors and plain data);
    ``snapshots`` holds the weights of older versions that attempts in flight are pinned to.
    """

    updates: int
    version: int
    log_position: int
    learner: Mapping[str, Any] = field(repr=False)
    drift: Mapping[str, Any] | None = field(default=None, repr=False)
    snapshots: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return f"update-{self.updates:06d}"


@dataclass(frozen=True, slots=True)
class _Manifest:
    format: int
    updates: int
    version: int
    log_position: int
    snapshots: list[int]
    files: dict[str, dict[str, Any]]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write ``checkpoint`` below ``folder`` and prune all but the newest ``keep``. Raises ``RunFailed`` when the disk refuses."""
    target = folder / checkpoint.name
    aside = folder / f".{checkpoint.name}.writing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write_states(aside, checkpoint)
        _write_manifest(aside, checkpoint)
        _verify(aside)
        replace_folder(aside, target)
        _sync(folder)
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:  # torch and safetensors have their own for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise RunFailed(f"checkpoint {target} could not be written ({error}); the previous one is untouched") from error
    _prune(folder, keep, newest=checkpoint.updates)
    return target


def load_newest(folder: Path, log_length: int | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint whose files are whole, and a sentence for each newer one that was passed over.

    One that knows more than the ``log_length`` events of the log is passed over too: a power failure can take the log's last
    moments. Raises ``RunFailed`` when none is left.
    """
    passed_over: list[str] = []
    for path in reversed(_all(folder)):
        try:
            checkpoint = _read(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            passed_over.append(f"checkpoint {path.name} is damaged and was passed over: {error}")
            continue
        if log_length is None or checkpoint.log_position <= log_length:
            return checkpoint, passed_over
        passed_over.append(
            f"checkpoint {path.name} was passed over: it was made after {checkpoint.log_position} events, but the log holds {log_length}"
        )
    detail = "; ".join(passed_over) or "there is none"
    raise RunFailed(f"no usable checkpoint in {folder} ({detail}); start the run again in another folder")


def _all(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("update-*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_updates)


def _updates(path: Path) -> int:
    return int(path.name.removeprefix("update-"))


def _write_states(aside: Path, checkpoint: Checkpoint) -> None:
    torch.save(dict(checkpoint.learner), aside / "learner.pt")
    if checkpoint.drift is not None:
        torch.save(dict(checkpoint.drift), aside / "drift.pt")
    for version, weights in checkpoint.snapshots.items():
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()},
            aside / f"snapshot-{version}.safetensors",
        )


def _write_manifest(aside: Path, checkpoint: Checkpoint) -> None:
    files = {}
    for path in sorted(aside.iterdir()):
        _sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sum(path)}
    manifest = _Manifest(FORMAT, checkpoint.updates, checkpoint.version, checkpoint.log_position, sorted(checkpoint.snapshots), files)
    path = aside / "checkpoint.json"
    path.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    _sync(path)


def _verify(path: Path) -> _Manifest:
    data = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"format {data.get('format')} is not {FORMAT}, the one this version reads")
    manifest = _Manifest(**data)
    for name, facts in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != facts["bytes"] or _sum(file) != facts["sha256"]:
            raise ValueError(f"{name} differs from what was written")
    return manifest


def _read(path: Path) -> Checkpoint:
    manifest = _verify(path)
    drift = path / "drift.pt"
    return Checkpoint(
        updates=manifest.updates,
        version=manifest.version,
        log_position=manifest.log_position,
        learner=torch.load(path / "learner.pt", map_location="cpu", weights_only=True),
        drift=torch.load(drift, map_location="cpu", weights_only=True) if drift.exists() else None,
        snapshots={version: load_file(path / f"snapshot-{version}.safetensors") for version in manifest.snapshots},
    )


def _prune(folder: Path, keep: int, newest: int) -> None:
    """Keep the ``keep`` up to ``newest``, the one just written. Those beyond it were passed over or taken back by a restore:
    they must not stand in the place of a good one."""
    for path in [path for path in _all(folder) if _updates(path) <= newest][:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    for path in _all(folder):
        if _updates(path) > newest:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".update-*"):  # what a killed process left half-written
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
