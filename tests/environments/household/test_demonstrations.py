"""The explorer that knows only what it has read."""

from __future__ import annotations

import pytest

from headrace.environments.household import HouseholdEnvironment, demonstration, expert, solves, tasks
from headrace.environments.household.demonstrations import Explorer


def test_a_demonstration_is_what_the_world_answers() -> None:
    for task in tasks("warmup", 12):
        world = HouseholdEnvironment(30)
        world.reset_now(task)
        for action, observation in demonstration(task, 1):
            assert world.step_now(action).observation == observation


def test_the_same_seed_gives_the_same_attempt_and_another_another() -> None:
    some = tasks("warmup", 8)
    assert [demonstration(task, 3) for task in some] == [demonstration(task, 3) for task in some]
    assert [demonstration(task, 3) for task in some] != [demonstration(task, 4) for task in some]


@pytest.mark.parametrize("rooms", ["small", "full"])
def test_most_attempts_succeed_and_take_longer_than_the_expert(rooms: str) -> None:
    some = tasks("warmup", 120, rooms=rooms)
    attempts = [demonstration(task, 0, horizon=50) for task in some]
    assert sum(solves(task, [action for action, _ in turns]) for task, turns in zip(some, attempts, strict=True)) >= 114
    assert sum(map(len, attempts)) > 1.3 * sum(len(expert(task)) for task in some)


def test_imperfections_come_as_often_as_asked_for() -> None:
    some = tasks("warmup", 200)

    def failed(slip: float) -> float:
        answers = [observation for task in some for _, observation in demonstration(task, 0, slip=slip)]
        return answers.count("Nothing happens.") / len(answers)

    assert failed(0.0) == 0
    assert 0 < failed(0.05) < failed(0.3)


def test_searching_anywhere_takes_longer_than_where_such_things_lie() -> None:
    some = tasks("warmup", 200)
    sensible = sum(len(demonstration(task, 0, slip=0)) for task in some)
    assert sum(len(demonstration(task, 0, slip=0, order="random")) for task in some) > 1.1 * sensible


def test_an_attempt_stops_at_the_horizon() -> None:
    assert max(len(demonstration(task, 0, horizon=4)) for task in tasks("warmup", 20)) == 4


def test_the_explorer_acts_on_text_alone() -> None:
    """Two worlds with the same opening get the same first action, wherever things lie in them."""
    import random

    from headrace.environments.household.expert import aim_of

    task = tasks("warmup", 1)[0]
    opening = HouseholdEnvironment().reset_now(task)
    first = [Explorer(aim_of(task), opening, random.Random(5)).act() for _ in range(2)]
    assert first[0] == first[1]
    assert first[0].startswith("go to ")


def test_a_slip_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slip is 1\.5"):
        demonstration(tasks("warmup", 1)[0], 0, slip=1.5)
