"""The example of a world in a file of one's own: it keeps the contract, and the project runs it like a world of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.environments.base import Environment, Step
from headrace.environments.worlds import World
from headrace.errors import UserError
from headrace.open_doors import load_object
from headrace.play import play
from headrace.rollout.agent_loop import EpisodeSettings, run_episode
from headrace.rollout.chat import ChatCodec
from headrace.rollout.engine import Request
from headrace.rollout.scripted_engine import Reply, ScriptedEngine
from headrace.rollout.trajectory import Dispatch, Trajectory
from headrace.training.assemble import build_world, split_tasks
from headrace.training.tiny_policy import TinySizes, fit_tokenizer

EXAMPLE = f"{Path(__file__).parents[1] / 'examples' / 'own_world.py'}:world"
DOCUMENT = Path(__file__).parents[1] / "docs" / "own_world.md"


@pytest.fixture(scope="module", name="world")
def load_world() -> World:
    made = load_object(EXAMPLE, "environment")(most=100, guesses=7)
    assert isinstance(made, World)
    return made


def bisect(low: int, high: int, said: str, guess: int) -> tuple[int, int]:
    return (guess + 1, high) if said == "Higher." else (low, guess - 1)


async def play_by_bisection(environment: Environment, world: World, number: int) -> Step:
    await environment.reset(world.tasks("train", number + 1)[number])
    low, high = 1, 100
    while True:
        guess = (low + high) // 2
        step = await environment.step(f"I guess {guess}.")
        if step.done:
            await environment.close()
            return step
        low, high = bisect(low, high, step.observation, guess)


def test_seven_guesses_find_every_number_of_a_hundred(world: World) -> None:
    steps = [asyncio.run(play_by_bisection(world.environment(), world, number)) for number in range(len(world.tasks("train", 999)))]
    assert all(step.success and step.reason == "success" for step in steps)


def test_splits_are_disjoint_and_ids_are_stable(world: World) -> None:
    ids = {split: [task.id for task in world.tasks(split, 999)] for split in ("train", "warmup", "test")}
    assert sum(map(len, ids.values())) == 100 == len({i for part in ids.values() for i in part})
    assert ids["train"][:2] == ["guess-100/1", "guess-100/2"]
    assert [task.id for task in world.tasks("train", 5)] == ids["train"][:5]
    with pytest.raises(ValueError, match="unknown split 'other'"):
        world.tasks("other", 1)


def test_out_of_guesses_is_no_success_and_a_win_on_the_last_guess_is(world: World) -> None:
    async def game(*guesses: str) -> list[Step]:
        environment = load_object(EXAMPLE, "environment")(guesses=3).environment()
        await environment.reset(world.tasks("train", 1)[0])
        return [await environment.step(guess) for guess in guesses]

    lost = asyncio.run(game("5", "hm", "6"))
    assert [step.done for step in lost] == [False, False, True]
    assert (lost[2].success, lost[2].reason) == (False, "horizon") and [step.unmatched for step in lost] == [False, True, False]
    assert asyncio.run(game("5", "6", "1"))[-1] == Step("That is it.", True, True, "success")


def test_demonstrations_are_played_in_the_world_and_now_and_then_fail(world: World) -> None:
    assert world.demonstrate is not None
    attempts = [world.demonstrate(task, 0) for task in world.tasks("train", 999)]
    assert attempts == [world.demonstrate(task, 0) for task in world.tasks("train", 999)]
    endings = [attempt[-1][1] == str(task.payload["secret"]) for task, attempt in zip(world.tasks("train", 999), attempts, strict=True)]
    assert 0.6 < sum(endings) / len(endings) < 1
    assert all(attempt[0][0] == "I think of a number from 1 to 100." for attempt in attempts)


def test_the_agent_loop_runs_it(world: World) -> None:
    """A scripted policy that always says 50, then 75, ... as tokens, through the chat template and back."""
    task = world.tasks("train", 999)[-1]  # 99
    words = ["Find the number. You have 7 guesses; each reply is one number.", "I think of a number from 1 to 100.", "Higher.", "Lower."]
    codec = ChatCodec(fit_tokenizer(words * 2 + [str(n) for n in range(101)], TinySizes()))
    spoken = ["50", "75", "88", "94", "97", "99"]

    def answer(request: Request, version: int, weights: Any) -> Reply:
        ids = codec.reply_ids(spoken[request.turn])
        return Reply(ids, (-0.1,) * len(ids))

    engine = ScriptedEngine(answer, stop_token_ids=codec.stop_token_ids)
    dispatch = Dispatch(1, task.id, task.kind, 0, 0.5, 0.5, None, 0)
    settings = EpisodeSettings(context_limit=2000, reply_tokens=50)
    trajectory = asyncio.run(run_episode(dispatch, task, world.environment(), engine, codec, settings))
    assert isinstance(trajectory, Trajectory)
    assert trajectory.success and trajectory.reason == "success"
    assert [turn.action for turn in trajectory.turns] == spoken


def test_a_configuration_names_it_and_its_options() -> None:
    config = Config.model_validate({"environment": {"name": EXAMPLE, "tasks": 10, "options": {"most": 60}}, "policy": {"model": "x"}})
    assert [task.payload["most"] for task in split_tasks(config, build_world(config), "train")] == [60] * 10
    for options, complaint in (({"most": 1}, "most must be at least 6"), ({"mots": 60}, "unexpected keyword argument 'mots'")):
        with pytest.raises(UserError, match=complaint):
            build_world(Config.model_validate({"environment": {"name": EXAMPLE, "options": options}, "policy": {"model": "x"}}))


def test_a_person_plays_it() -> None:
    lines = ["1"]
    said: list[str] = []
    assert play(EXAMPLE, split="train", number=0, options=["guesses=2"], read=lambda prompt: lines.pop(0), write=said.append)
    assert "I think of a number from 1 to 100." in said


def test_the_page_shows_the_example_as_it_is() -> None:
    code = (Path(__file__).parents[1] / "examples" / "own_world.py").read_text(encoding="utf-8")
    page = DOCUMENT.read_text(encoding="utf-8")
    blocks = [block.removeprefix("python\n").strip() for block in page.split("```")[1::2] if block.startswith("python\n")]
    assert blocks and all(block in code for block in blocks)
