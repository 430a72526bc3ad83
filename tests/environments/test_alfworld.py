"""The real engine behind the environment protocol, and the canonical games."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.environments import alfworld
from headrace.environments.base import Environment, Task
from headrace.environments.household import HouseholdEnvironment, expert, solves, tasks, to_pddl

HAS_ENGINE = all(importlib.util.find_spec(name) for name in ("alfworld", "textworld", "fast_downward"))
engine = pytest.mark.skipif(not HAS_ENGINE, reason="the real engine is not installed: pip install 'headrace[alfworld]'")


def put_game(folder: Path, task: Task, solvable: bool | None = True) -> None:
    """A game file as ALFWorld's, with the grammar reduced to its sentence where the engine is not there to run it."""
    folder.mkdir(parents=True)
    data: dict[str, object]
    if HAS_ENGINE:
        data = dict(alfworld.game_data(task))
    else:
        problem, instruction = to_pddl(task)
        data = {"pddl_domain": "", "pddl_problem": problem, "grammar": f'"rhs": "Your task is to: {instruction}."'}
    if solvable is not None:
        data["solvable"] = solvable
    (folder / "game.tw-pddl").write_text(json.dumps(data))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with five training games that count and some that do not."""
    some = tasks("train", 6)
    train = tmp_path / "json_2.1.1" / "train"
    for number, task in enumerate(some[:5]):
        put_game(train / f"{task.kind}-Thing-None-Place-{9 - number}" / "trial_T2019", task)
    put_game(train / "pick_and_place_with_movable_recep-A-B-C-1" / "trial_1", some[0])
    put_game(train / "pick_and_place_simple-PotatoSliced-None-Desk-1" / "trial_1", some[0])
    put_game(train / "pick_and_place_simple-Mug-None-Desk-1" / "trial_unsolvable", some[0], solvable=False)
    put_game(train / "pick_and_place_simple-Mug-None-Desk-1" / "trial_unknown", some[0], solvable=None)
    put_game(tmp_path / "json_2.1.1" / "valid_unseen" / "look_at_obj_in_light-Mug-None-DeskLamp-308" / "trial_1", some[1])
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    return tmp_path


def test_canonical_games_come_sorted_by_id_without_those_that_alfworld_leaves_out(data: Path) -> None:
    found = alfworld.tasks("train", 5)
    assert [task.id for task in found] == sorted(task.id for task in found)
    assert all(task.id.endswith("/trial_T2019") and task.id.startswith(task.kind) for task in found)
    assert alfworld.tasks("train", 2) == found[:2]
    assert [task.id for task in alfworld.tasks("unseen", 1)] == ["look_at_obj_in_light-Mug-None-DeskLamp-308/trial_1"]


def test_canonical_games_run_on_the_fast_simulator_too(data: Path) -> None:
    for task in alfworld.tasks("train", 5):
        assert HouseholdEnvironment().reset_now(task).startswith("-= Welcome to TextWorld, ALFRED! =-")
        assert solves(task, expert(task))


def test_too_few_games_and_unknown_splits_are_named(data: Path) -> None:
    with pytest.raises(ValueError, match="has 5 canonical games; 128 were asked for"):
        alfworld.tasks("train", 128)
    with pytest.raises(ValueError, match="no split 'warmup'"):
        alfworld.tasks("warmup", 1)
    with pytest.raises(FileNotFoundError, match="no ALFWorld games of the split 'seen'"):
        alfworld.tasks("seen", 1)


def test_missing_data_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="run alfworld-download and set ALFWORLD_DATA"):
        alfworld.tasks("train", 1)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="which is no folder"):
        alfworld.tasks("train", 1)


@pytest.mark.parametrize("absent", ["alfworld", "textworld", "fast_downward"])
def test_an_absent_extra_is_named_with_the_command_that_installs_it(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == absent else real(name, *rest) or object())
    with pytest.raises(ImportError, match=rf"pip install 'headrace\[alfworld\]'.*no module '{absent}'"):
        alfworld.AlfworldEnvironment()


@engine
def test_the_real_engine_plays_an_episode_through_the_protocol(data: Path) -> None:
    async def episode(task: Task, plan: Sequence[str]) -> list[object]:
        world: Environment = alfworld.AlfworldEnvironment(horizon=20)
        said: list[object] = [await world.reset(task)]
        for action in ("put mug 1 in/on desk 1", "open nothing", *plan):
            said.append(await world.step(action))
        await world.close()
        return said

    task = alfworld.tasks("train", 1)[0]
    said = asyncio.run(episode(task, expert(task)))
    simulated = HouseholdEnvironment(horizon=20)
    assert said[0] == simulated.reset_now(task)
    assert said[1:] == [simulated.step_now(action) for action in ("put mug 1 in/on desk 1", "open nothing", *expert(task))]
    assert said[-1].success  # type: ignore[attr-defined]


@engine
def test_episodes_of_the_real_engine_can_be_awaited_together() -> None:
    async def episode(task: Task) -> bool:
        world = alfworld.AlfworldEnvironment()
        await world.reset(task)
        return [await world.step(action) for action in expert(task)][-1].success

    async def together() -> list[bool]:
        return await asyncio.gather(*(episode(task) for task in tasks("train", 3)))

    assert asyncio.run(together()) == [True, True, True]


@engine
def test_a_step_that_nobody_awaits_any_more_does_not_act_in_the_next_episode() -> None:
    async def abandoned() -> list[str]:
        world = alfworld.AlfworldEnvironment()
        first = await world.reset(tasks("train", 1)[0])
        with alfworld._ENGINE_LOCK:
            step = asyncio.ensure_future(world.step("go to desk 1"))
            await asyncio.sleep(0.05)
            step.cancel()
            again = asyncio.ensure_future(world.reset(tasks("train", 1)[0]))
            await asyncio.sleep(0.05)
        assert await again == first
        await asyncio.sleep(0.05)
        return [(await world.step("look")).observation]

    assert asyncio.run(abandoned()) == ["You are in the middle of a room. Looking quickly around you, you see nothing."]


@engine
def test_the_real_engine_counts_the_horizon_as_the_simulator_does() -> None:
    task = tasks("train", 1)[0]
    arguments = list(sys.argv)
    world = alfworld.AlfworldEnvironment(horizon=2)
    with pytest.raises(RuntimeError, match="call reset"):
        world.step_now("look")
    world.reset_now(task)
    assert sys.argv == arguments
    assert not world.step_now("look").done
    last = world.step_now("look")
    assert (last.done, last.success, last.reason) == (True, False, "horizon")
    with pytest.raises(RuntimeError, match="This episode is over"):
        world.step_now("look")
    with pytest.raises(ValueError, match="horizon is 0"):
        alfworld.AlfworldEnvironment(horizon=0)
