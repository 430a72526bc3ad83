"""The real ALFWorld engine behind the environment protocol, and its canonical games.

Needs the optional extra: ``pip install 'headrace[alfworld]'``. A step takes tens of milliseconds; the household simulator plays
the same tasks with the same texts thousands of times faster, so this is for checking it and for final evaluations.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.household.games import read_game
from headrace.environments.household.layout import layout_of
from headrace.environments.household.pddl import to_pddl
from headrace.environments.household.problem import KINDS
from headrace.environments.household.world import is_command

#: ALFWorld's folder for each split, under its data folder.
FOLDERS = {"train": "train", "seen": "valid_seen", "unseen": "valid_unseen"}
_MISSING = "The real ALFWorld engine needs the package alfworld with textworld[pddl]: pip install 'headrace[alfworld]'."
# The engine's translator swaps sys.stdout and sys.argv, and its text parser is one object for the whole process.
_ENGINE_LOCK = threading.Lock()


def require() -> None:
    """ImportError with one sentence where the optional extra is not installed."""
    for name in ("alfworld", "textworld", "fast_downward"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"{_MISSING} (Python found no module {name!r}.)")


def tasks(split: str, count: int, data: str | Path | None = None) -> list[Task]:
    """The first ``count`` canonical games of a split, sorted by id.

    ``data`` is ALFWorld's data folder, by default the environment variable ``ALFWORLD_DATA``; games are looked for in its
    ``json_2.1.1/train``, ``valid_seen`` and ``valid_unseen``. An id is the game's folder below the split's, such as
    ``pick_and_place_simple-Mug-None-Desk-308/trial_T20190909_...``. As ALFWorld does, games of other kinds, with movable
    receptacles or slices, and unsolvable ones are left out. The tasks run on the fast simulator as well.
    """
    if split not in FOLDERS:
        raise ValueError(f"ALFWorld has no split {split!r}; choose one of {', '.join(FOLDERS)}.")
    root = data_folder(data)
    folder = next((f for f in (root / "json_2.1.1" / FOLDERS[split], root / FOLDERS[split]) if f.is_dir()), None)
    if folder is None:
        raise FileNotFoundError(
            f"There are no ALFWorld games of the split {split!r} in {root}: run alfworld-download with ALFWORLD_DATA={root}."
        )
    found: list[Task] = []
    for path in sorted(folder.rglob("game.tw-pddl"), key=lambda path: path.parent.relative_to(folder).as_posix()):
        if len(found) == count:
            break
        if _is_canonical(path):
            task_id = path.parent.relative_to(folder).as_posix()
            task = read_game(path)
            found.append(Task(task_id, task.kind, {**task.payload, "game": path.relative_to(root).as_posix()}))
    if len(found) < count:
        raise ValueError(f"{folder} has {len(found)} canonical games; {count} were asked for.")
    return found


def data_folder(data: str | Path | None = None) -> Path:
    """ALFWorld's data folder; FileNotFoundError with one sentence where none is named or it does not exist."""
    named = data if data is not None else os.environ.get("ALFWORLD_DATA")
    if not named:
        raise FileNotFoundError("ALFWorld's games are not on this machine: run alfworld-download and set ALFWORLD_DATA to its folder.")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"ALFWORLD_DATA names {folder}, which is no folder: run alfworld-download and set it to where the games lie."
        )
    return folder


def _is_canonical(path: Path) -> bool:
    if "movable" in str(path.parent) or "Sliced" in str(path.parent):
        return False
    kind = path.parent.parent.name.split("-", 1)[0]
    return kind in KINDS and json.loads(path.read_text()).get("solvable") is True


class AlfworldEnvironment:
    """The real engine, one episode at a time, of at most ``horizon`` actions.

    Runs canonical games from ``tasks`` and any household task: those are handed over as PDDL. Work happens in a thread, one
    engine call at a time in a process, since the engine is not safe to call in parallel. ``reset_now`` and ``step_now`` are the
    same without asyncio.
    """

    system: str | None = None
    tools: Sequence[ToolSpec] = ()

    def __init__(self, horizon: int = 50) -> None:
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}; an episode needs at least one action.")
        require()
        self.horizon = horizon
        self._engine: Any = None
        self._loaded: Task | None = None
        self._task: Task | None = None
        self._state: Mapping[str, Any] = {}
        self._episode = 0
        self._taken = 0
        self._done = False

    async def reset(self, task: Task) -> str:
        self._episode += 1
        return await asyncio.to_thread(self._reset, task, self._episode)

    async def step(self, action: str) -> Step:
        return await asyncio.to_thread(self._step, action, self._episode)

    async def close(self) -> None:
        self._engine = self._loaded = self._task = None
        self._episode += 1

    def reset_now(self, task: Task) -> str:
        self._episode += 1
        return self._reset(task, self._episode)

    def _reset(self, task: Task, episode: int) -> str:
        with _ENGINE_LOCK, _arguments_kept():
            self._check(episode)
            if self._loaded != task or self._engine is None:
                self._engine = _engine_for(task)
                self._loaded = task
            self._state = self._engine.reset()
            self._task, self._taken, self._done = task, 0, False
            return str(self._state["feedback"])

    def step_now(self, action: str) -> Step:
        return self._step(action, self._episode)

    def _step(self, action: str, episode: int) -> Step:
        with _ENGINE_LOCK:
            if self._task is None:
                raise RuntimeError("The ALFWorld environment has no episode: call reset with a task before step.")
            self._check(episode)
            if self._done:
                raise RuntimeError("This episode is over: call reset with a task before the next step.")
            self._state, _, _ = self._engine.step(action)
            self._taken += 1
            won = bool(self._state["won"])
            reason = "success" if won else "horizon" if self._taken >= self.horizon else None
            self._done = reason is not None
            step = Step(str(self._state["feedback"]), self._done, won, reason)
            return step if is_command(layout_of(self._task), action) else replace(step, unmatched=True)

    def _check(self, episode: int) -> None:
        """A caller that gave up waiting leaves its thread in the queue; it must not act in the episode that came after."""
        if episode != self._episode:
            raise RuntimeError("The episode that this call belonged to is over.")

    def admissible(self) -> list[str]:
        """Every command that would do something after the latest observation, sorted."""
        if self._task is None:
            raise RuntimeError("The ALFWorld environment has no episode: call reset with a task before admissible.")
        return list(self._state["admissible_commands"])


@contextmanager
def _arguments_kept() -> Iterator[None]:
    """The engine's translator puts its own command line into ``sys.argv`` and leaves it there."""
    kept = sys.argv
    try:
        yield
    finally:
        sys.argv = kept


def _engine_for(task: Task) -> Any:
    """ALFWorld's own stack (PDDL engine and demangler without shuffling), loaded with the task."""
    textworld: Any = importlib.import_module("textworld")
    pddl: Any = importlib.import_module("textworld.envs")
    alfred: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    engine = alfred.AlfredDemangler(pddl.PddlEnv(infos), shuffle=False)
    engine.load(game_data(task))
    return engine


def game_data(task: Task) -> dict[str, str]:
    """What the engine loads: the canonical game file as it is, or the task's PDDL with the package's domain and grammar."""
    game = task.payload.get("game")
    if game is not None:
        return dict(json.loads((data_folder() / str(game)).read_text()))
    folder = Path(str(importlib.import_module("alfworld").__file__)).parent / "data"
    problem, instruction = to_pddl(task)
    slot = json.dumps(instruction)[1:-1]
    return {
        "pddl_domain": (folder / "alfred.pddl").read_text(),
        "grammar": (folder / "alfred.twl2").read_text().replace("UNKNOWN GOAL", slot),
        "pddl_problem": problem,
    }
