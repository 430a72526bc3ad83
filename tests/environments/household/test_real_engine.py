"""The simulator against the real ALFWorld engine, observation by observation.

Both play the same walk on the same problem; openings, answers, admissible commands and outcomes must be identical. Twenty walks
belong to the default suite, more than two hundred to ``-m slow``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from headrace.environments import alfworld
from headrace.environments.base import Step, Task
from headrace.environments.household import HouseholdEnvironment, expert, from_pddl, read_game, tasks
from headrace.environments.household.layout import layout_of
from headrace.environments.household.pddl import parse_problem, write_problem
from headrace.environments.household.problem import Problem, problem_of

try:
    alfworld.require()
except ImportError as error:
    pytest.skip(f"the differential test needs the real engine. {error}", allow_module_level=True)

DATA = Path(os.environ.get("HEADRACE_DATA", Path(__file__).parents[4] / "shared" / "data"))
REAL = DATA / "alfworld" / "heat-potato-floorplan14"


@dataclass(frozen=True)
class Walk:
    """A seeded walk: how often it follows the expert, and how often it says something impossible or malformed."""

    source: str
    number: int
    steps: int = 25
    follow: float = 0.0
    stray: float = 0.15

    def __str__(self) -> str:
        return f"{self.source}-{self.number}-follow{self.follow}"


def walks(source: str, numbers: range, steps: int) -> Iterator[Walk]:
    """In turn random, expert, and mixtures of both with stray actions."""
    for number in numbers:
        follow, stray = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.3), (0.0, 0.3))[number % 4]
        yield Walk(source, number, steps, follow, stray)


DEFAULT = [*walks("small", range(12), 25), *walks("full", range(100, 103), 20), *walks("odd", range(3), 20), *walks("real", range(2), 20)]
SLOW = [*walks("small", range(1000, 1120), 40), *walks("full", range(1000, 1040), 40), *walks("odd", range(1000, 1040), 40)]
SLOW += [*walks("real", range(1000, 1012), 50)]


@lru_cache(maxsize=512)
def task_for(source: str, number: int) -> Task:
    if source == "real":
        if not REAL.is_dir():
            pytest.skip(f"the real game is not in {REAL}; set HEADRACE_DATA to the folder of shared test data")
        return read_game(REAL)
    if source == "odd":
        return odd_task(number)
    split = ("train", "seen", "unseen", "warmup")[number // 4 % 4]
    some = tasks(split, 64, rooms=source)
    return some[(7 * number) % 64]


def odd_task(number: int) -> Task:
    """A generated problem turned strange: things open, hot, held or in two places at the start, more agents, shared places, other goals."""
    rng = random.Random(f"odd {number}")
    # Kitchens only: each has a sink, a microwave and a fridge, and the engine cannot load a goal that nothing can reach.
    problem = problem_of(rng.choice([task for task in tasks("warmup", 90) if "kitchen" in task.payload["room"]]))
    facts, entities = list(problem.facts), list(problem.entities)
    receptacles = [name for name, kind in entities if kind == "receptacle"]
    objects = [name for name, kind in entities if kind == "object"]
    places = [name for name, kind in entities if kind == "location"]
    facts += [("opened", fact[1]) for fact in problem.facts if fact[0] == "openable" and rng.random() < 0.4]
    for obj in objects:
        facts += [(state, obj) for state in ("isclean", "ishot", "iscool", "istoggled", "issliced", "ison") if rng.random() < 0.15]
        facts += [("inreceptacle", obj, rng.choice(receptacles))] if rng.random() < 0.2 else []
    vessels = [fact[1] for fact in problem.facts if fact[0] == "isreceptacleobject"]
    facts += [("inreceptacleobject", rng.choice(objects), vessel) for vessel in vessels if rng.random() < 0.5]
    if number % 2:
        others = [f"{rng.choice('abx')}gent{n}" for n in (2, 3)]
        entities += [(other, "agent") for other in others]
        facts += [("atlocation", other, rng.choice([*places, *["loc_bar_0"] * len(places)])) for other in others]
    if number % 3 == 0:
        held = rng.choice(objects)
        facts = [fact for fact in facts if fact[0] not in ("inreceptacle", "objectatlocation") or fact[1] != held]
        facts += [("holds", "agent1", held), ("holdsany", "agent1")]
    if number % 5 < 2:
        first, second = rng.sample([i for i, fact in enumerate(facts) if fact[0] == "receptacleatlocation"], 2)
        facts[first] = (*facts[first][:2], facts[second][2])
    if number % 7 == 0:
        facts = [("atlocation", "agent1", rng.choice(places)) if fact[:2] == ("atlocation", "agent1") else fact for fact in facts]
    rng.shuffle(facts)
    goal = parse_problem(f"(define (problem x) (:objects) (:init) (:goal {ODD_GOALS[number % len(ODD_GOALS)]}))").goal
    return from_pddl(write_problem(Problem(tuple(entities), tuple(dict.fromkeys(facts)), goal)), "do it")


ODD_GOALS = (
    "(exists (?a - agent ?o - object) (and (holds ?a ?o) (or (isHot ?o) (isCool ?o) (isSliced ?o)) (exists (?r - receptacle ?l - location)"
    " (and (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (openable ?r)))))",
    "(and (forall (?r - receptacle) (imply (openable ?r) (not (opened ?r)))) (exists (?a - agent) (holdsAny ?a)))",
    "(exists (?o - object ?r - receptacle ?l - location ?a - agent) (and (inReceptacle ?o ?r) (receptacleAtLocation ?r ?l)"
    " (atLocation ?a ?l) (objectAtLocation ?o ?l) (isClean ?o) (checked ?r) (not (holdsAny ?a))))",
    "(exists (?o - object ?p - object ?a - agent) (and (not (= ?o ?p)) (holds ?a ?o) (isClean ?p) (not (exists (?r - receptacle)"
    " (and (opened ?r) (inReceptacle ?p ?r))))))",
)


def stray_action(task: Task, admissible: list[str], rng: random.Random) -> str:
    layout = layout_of(task)
    receptacles, objects = list(layout.receptacle_named), list(layout.object_named)

    def r() -> str:
        return rng.choice(receptacles)

    def o() -> str:
        return rng.choice(objects)

    forms: list[Callable[[], str]] = [
        *(lambda: f"go to {r()}", lambda: f"open {r()}", lambda: f"close {r()}", lambda: f"take {o()} from {r()}"),
        *(
            lambda: f"move {o()} to {r()}",
            lambda: f"heat {o()} with {r()}",
            lambda: f"clean {o()} with {r()}",
            lambda: f"cool {o()} with {r()}",
        ),
        *(lambda: f"use {o()}", lambda: f"examine {o()}", lambda: f"examine {r()}", lambda: f"slice {o()} with {o()}"),
        *(lambda: "", lambda: "take from", lambda: f"put {o()} in/on {r()}", lambda: "go to", lambda: "  look ", lambda: "inventory now"),
        *(lambda: rng.choice(admissible).upper(), lambda: rng.choice(admissible) + " 1", lambda: rng.choice(admissible).replace(" ", "  ")),
    ]
    return rng.choice(forms)()


def next_action(walk: Walk, task: Task, plan: list[str], admissible: list[str], rng: random.Random) -> str:
    if plan and rng.random() < walk.follow:
        return plan.pop(0)
    if rng.random() < walk.stray:
        return stray_action(task, admissible, rng)
    here = [command for command in admissible if not command.startswith("go to")]
    return rng.choice(here if rng.random() < 0.7 else admissible)


def compare(walk: Walk) -> Step:
    """Plays a walk on both; the simulator chooses nothing, its admissible commands only feed the dice after they were compared."""
    task = task_for(walk.source, walk.number)
    rng = random.Random(f"walk {walk}")
    plan = expert(task) if walk.follow and walk.source != "odd" else []
    horizon = walk.steps + 20
    real, simulated = alfworld.AlfworldEnvironment(horizon), HouseholdEnvironment(horizon)
    assert simulated.reset_now(task) == real.reset_now(task)
    said: list[str] = []
    step = None
    for _ in range(walk.steps):
        admissible = real.admissible()
        assert simulated.admissible() == admissible, said
        said.append(next_action(walk, task, plan, admissible, rng))
        step = real.step_now(said[-1])
        assert simulated.step_now(said[-1]) == step, said
        assert (step.observation == "Nothing happens.") == (said[-1].strip() not in admissible), said
        if step.done:
            break
    assert simulated.admissible() == real.admissible()
    assert step is not None
    if walk.follow == 1.0 and walk.source != "odd":
        assert step.success, said
    return step


@pytest.mark.parametrize("walk", DEFAULT, ids=str)
def test_the_simulator_answers_as_the_real_engine_does(walk: Walk) -> None:
    compare(walk)


@pytest.mark.slow
@pytest.mark.parametrize("walk", SLOW, ids=str)
def test_the_simulator_answers_as_the_real_engine_does_on_many_more_walks(walk: Walk) -> None:
    compare(walk)


def test_there_are_as_many_walks_as_promised() -> None:
    assert len(DEFAULT) == 20
    assert len(SLOW) >= 200
