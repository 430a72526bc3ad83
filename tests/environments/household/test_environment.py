"""Episodes: when they end, and why."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.environments.base import Task
from headrace.environments.household import HouseholdEnvironment, expert, tasks


@pytest.fixture(scope="module")
def task() -> Task:
    return tasks("train", 3)[2]


def test_fifty_harmless_actions_are_no_success(task: Task) -> None:
    world = HouseholdEnvironment(horizon=50)
    world.reset_now(task)
    steps = [world.step_now("look") for _ in range(50)]
    assert [step.done for step in steps] == [False] * 49 + [True]
    assert (steps[-1].success, steps[-1].reason, steps[-1].outcome) == (False, "horizon", None)


@pytest.mark.parametrize(("spare", "success", "reason"), [(1, True, "success"), (0, True, "success"), (-1, False, "horizon")])
def test_a_win_counts_up_to_and_on_the_last_action(task: Task, spare: int, success: bool, reason: str) -> None:
    plan = expert(task)
    world = HouseholdEnvironment(horizon=len(plan) + spare)
    world.reset_now(task)
    steps = []
    for action in plan:
        steps.append(world.step_now(action))
        if steps[-1].done:
            break
    assert len(steps) == len(plan) + min(spare, 0)
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert (steps[-1].success, steps[-1].reason) == (success, reason)


def test_malformed_actions_use_up_the_horizon_too(task: Task) -> None:
    world = HouseholdEnvironment(horizon=2)
    world.reset_now(task)
    assert not world.step_now("take from").done
    assert world.step_now("???").reason == "horizon"


@pytest.mark.parametrize("ending", ["success", "horizon"])
def test_a_step_after_the_end_is_refused(task: Task, ending: str) -> None:
    plan = expert(task)
    world = HouseholdEnvironment(horizon=len(plan) if ending == "success" else 1)
    world.reset_now(task)
    for action in plan if ending == "success" else ["look"]:
        world.step_now(action)
    with pytest.raises(RuntimeError, match="This episode is over: call reset"):
        world.step_now("look")


def test_steps_before_a_reset_and_after_a_close_are_refused(task: Task) -> None:
    world = HouseholdEnvironment()
    with pytest.raises(RuntimeError, match="call reset with a task"):
        world.step_now("look")
    with pytest.raises(RuntimeError, match="call reset with a task"):
        world.admissible()
    world.reset_now(task)
    asyncio.run(world.close())
    with pytest.raises(RuntimeError, match="call reset with a task"):
        world.step_now("look")


def test_a_horizon_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon is 0"):
        HouseholdEnvironment(horizon=0)


def test_an_instance_serves_one_task_after_another_without_remembering(task: Task) -> None:
    world = HouseholdEnvironment()
    first = world.reset_now(task)
    for action in expert(task):
        world.step_now(action)
    assert world.reset_now(task) == first
    assert not world.step_now("look").done
    other = tasks("unseen", 1)[0]
    assert world.reset_now(other) != first


def test_the_protocol_is_the_same_without_asyncio(task: Task) -> None:
    async def episode() -> list[object]:
        world = HouseholdEnvironment()
        said: list[object] = [await world.reset(task)]
        for action in expert(task):
            said.append(await world.step(action))
        await world.close()
        return said

    world = HouseholdEnvironment()
    assert asyncio.run(episode()) == [world.reset_now(task), *(world.step_now(action) for action in expert(task))]


def test_a_task_of_another_world_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a household task"):
        HouseholdEnvironment().reset_now(Task("math-1", "math", {"question": "1+1"}))


def test_a_core_does_fifty_thousand_steps_a_second() -> None:
    plans = [(task, expert(task)) for task in tasks("train", 32)]
    world = HouseholdEnvironment()
    rates = []
    for _ in range(3):
        started, steps = time.process_time(), 0
        for task, plan in plans * 4:
            world.reset_now(task)
            for action in (*["look", "inventory"] * 5, *plan):
                world.step_now(action)
                steps += 1
        rates.append(steps / (time.process_time() - started))
    assert max(rates) > 50_000
