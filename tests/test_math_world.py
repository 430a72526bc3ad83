"""The math world under the agent loop: tokens in, tokens out, the verifier's word as outcome."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from headrace.environments import math_tool
from headrace.environments.base import Task
from headrace.environments.grading import GradingError
from headrace.environments.math_demonstrations import expert
from headrace.environments.worlds import World, make
from headrace.rollout.agent_loop import EpisodeSettings, run_episode
from headrace.rollout.chat import ChatCodec
from headrace.rollout.engine import Request
from headrace.rollout.scripted_engine import Reply, ScriptedEngine
from headrace.rollout.trajectory import Dispatch, Failure, Trajectory
from headrace.training.tiny_policy import TinySizes, fit_tokenizer

pytest.importorskip("pydantic_monty")
SETTINGS = EpisodeSettings(context_limit=4000, reply_tokens=400)


@pytest.fixture(scope="module")
def world() -> World:
    return make("math", {"source": "word-problems", "levels": [3], "texts": "terse", "max_turns": 4, "slip": 0.3})


@pytest.fixture(scope="module")
def codec(world: World) -> ChatCodec:
    tasks = world.tasks("warmup", 50)
    texts = [str(task.payload["question"]) for task in tasks] + [action for task in tasks for action in expert(task)]
    return ChatCodec(fit_tokenizer(texts, TinySizes(split_digits=True)))


def attempt(world: World, codec: ChatCodec, number: int, actions: list[str]) -> Trajectory | Failure:
    task = world.tasks("train", number + 1)[number]

    def answer(request: Request, version: int, weights: Any) -> Reply:
        ids = codec.reply_ids(actions[request.turn])
        return Reply(ids, (-0.1,) * len(ids))

    engine = ScriptedEngine(answer, stop_token_ids=codec.stop_token_ids)
    dispatch = Dispatch(number, task.id, task.kind, 0, 0.5, 0.5, None, 0)
    return asyncio.run(run_episode(dispatch, task, world.environment(), engine, codec, SETTINGS))


def test_the_expert_succeeds_token_by_token(world: World, codec: ChatCodec) -> None:
    for number in range(5):
        task = world.tasks("train", number + 1)[number]
        trajectory = attempt(world, codec, number, expert(task))
        assert isinstance(trajectory, Trajectory)
        assert (trajectory.success, trajectory.outcome, trajectory.reason) == (True, 1.0, "answered")
        assert len(trajectory.turns) == 3 and trajectory.turns[2].observation.strip().isdigit()


def test_the_world_demonstrates_verified_solutions_only(world: World, codec: ChatCodec) -> None:
    assert world.demonstrate is not None
    found = {task: world.demonstrate(task, 0) for task in world.tasks("warmup", 40)}
    assert 20 < sum(map(bool, found.values())) < 40  # some slipped and failed
    for task, exchanges in found.items():
        assert not exchanges or (exchanges[0][0] == task.payload["question"] and task.payload["answer"] in exchanges[-1][1])
    assert world.demonstrate(Task("t/1", "t", {"question": "?", "answer": "1"}), 0) == []


def test_a_wrong_answer_and_running_out_of_turns_earn_nothing(world: World, codec: ChatCodec) -> None:
    wrong = attempt(world, codec, 0, [r"\boxed{-1}"])
    late = attempt(world, codec, 0, ["```python\n1\n```"] * 4)
    for trajectory, reason in ((wrong, "answered"), (late, "horizon")):
        assert isinstance(trajectory, Trajectory)
        assert (trajectory.success, trajectory.outcome, trajectory.reason) == (False, 0.0, reason)


def test_a_grader_error_is_an_unscored_attempt(world: World, codec: ChatCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_verdict(answer: str | None, gold: str, *, seconds: float) -> bool:
        raise GradingError("no verdict")

    monkeypatch.setattr(math_tool, "equivalent_async", no_verdict)
    trajectory = attempt(world, codec, 0, [r"\boxed{1}"])
    assert isinstance(trajectory, Trajectory)
    assert math.isnan(trajectory.outcome) and not trajectory.scored and trajectory.reason == "grader_error"


def test_options_that_this_machine_cannot_meet_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.environments import bubblewrap

    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    bubblewrap.require_bubblewrap.cache_clear()
    with pytest.raises(ValueError, match="install the package bubblewrap"):
        make("math", {"python": "cpython"})
    bubblewrap.require_bubblewrap.cache_clear()


def test_the_world_reads_and_compares_answers_as_its_environment_does() -> None:
    answers = make("math", {}).answers
    loose = make("math", {"require_box": False}).answers
    assert answers is not None and loose is not None
    assert answers.read(r"so \boxed{\frac12} it is") == r"\frac12"
    assert answers.read("```python\nprint(1)\n```") is None and answers.read("The answer is 5") is None
    assert loose.read("The answer is 5") == "5"
    assert answers.same(r"\frac12", "0.5") and not answers.same("1/3", "0.33")


def test_answers_without_a_verdict_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.environments import grading

    def no_verdict(answer: str | None, gold: str, *, seconds: float) -> bool:
        raise GradingError("no verdict")

    monkeypatch.setattr(grading, "equivalent", no_verdict)
    answers = make("math", {}).answers
    assert answers is not None and not answers.same("1", "1.0")
