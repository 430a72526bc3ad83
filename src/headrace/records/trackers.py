"""Numbers of a run, sent to the experiment trackers that people already use. All optional.

A tracker whose package is missing is refused before the run starts. Once running, a tracker that fails warns once and is
left out from then on: it never stops a run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from uuid import uuid4

from headrace.errors import UserError


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told at its start. ``first_step`` is above 0 when a run is resumed."""

    folder: Path
    project: str
    config: Mapping[str, Any]
    first_step: int = 0


class TensorBoard:
    """Event files in ``<run>/tensorboard``. A resumed run hides the steps that it takes back."""

    def __init__(self, run: TrackedRun) -> None:
        _package("tensorboard", "tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        purge = run.first_step if run.first_step else None
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```", run.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run named after the folder. Its id is kept in ``<run>/wandb-id``, so that a resumed run goes on with it."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = _package("wandb", "wandb")
        identity = run.folder / "wandb-id"
        if run.first_step == 0 or not identity.exists():
            identity.write_text(uuid4().hex, encoding="utf-8")
        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run named after the folder (kept by trackio on this machine)."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = _package("trackio", "trackio")
        self._trackio.init(project=run.project, name=run.folder.name, config=dict(run.config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def require(names: Sequence[str]) -> None:
    """``UserError`` for a tracker that is unknown or whose package is not installed, before anything has begun."""
    for name in names:
        _known(name)
        _package(name, name)


def _known(name: str) -> None:
    if name not in TRACKERS:
        raise UserError(f"unknown tracker {name!r}: choose among {', '.join(TRACKERS)}")


class Trackers:
    """Several trackers as one. ``warn`` is told once, in one sentence, about each that fails."""

    def __init__(self, names: Sequence[str], run: TrackedRun, *, warn: Callable[[str], None]) -> None:
        """``UserError`` for an unknown name or a package that is not installed."""
        self._warn = warn
        self._open: dict[str, Tracker] = {}
        for name in names:
            _known(name)
            with self._contained(name):
                self._open[name] = TRACKERS[name](run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            with self._contained(name):
                tracker.log(step, values)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._contained(name):
                tracker.close()
        self._open.clear()

    @contextmanager
    def _contained(self, name: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self._open.pop(name, None)
            self._warn(f"the tracker {name} failed and is left out from here on: {type(error).__name__}: {error}")


def _package(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"the tracker {module} needs the package {package}: pip install {package} ({error})") from None
