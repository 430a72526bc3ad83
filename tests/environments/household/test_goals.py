"""Grounded goals against a plain evaluator of formulas, over random formulas and random walks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.environments.household import HouseholdEnvironment, tasks
from headrace.environments.household.layout import compile_layout, layout_of
from headrace.environments.household.problem import Formula, Problem, problem_of
from headrace.environments.household.world import Unmatched, World

TASK = tasks("train", 4)[3]
PROBLEM = problem_of(TASK)


def facts_now(world: World) -> set[tuple[str, ...]]:
    """The state as plain facts, rebuilt from the world's relations."""
    changing = {"atlocation", "inreceptacle", "holds", "objectatlocation"}
    single = ("holdsany", "opened", "isclean", "ishot", "iscool", "ison", "istoggled", "issliced", "checked")
    facts = {fact for fact in world.layout.initial if fact[0] not in changing and fact[0] not in single}
    facts |= {("atlocation", agent, place) for agent, place in world.at.items()}
    facts |= {("inreceptacle", obj, r) for r, contents in world.inside.items() for obj in contents}
    facts |= {("holds", agent, obj) for agent, held in world.hands.items() for obj in held}
    facts |= {("objectatlocation", obj, place) for place, lying in world.lying.items() for obj in lying}
    return facts | {(name, entity) for name in single for entity in getattr(world, name)}


def holds(formula: Formula, facts: set[tuple[str, ...]], binding: dict[str, str]) -> bool:
    head = formula[0]
    if head in ("exists", "forall"):
        results: Iterable[bool] = (holds(formula[2], facts, {**binding, **chosen}) for chosen in assignments(formula[1]))
        return any(results) if head == "exists" else all(results)
    if head == "and":
        return all(holds(part, facts, binding) for part in formula[1:])
    if head == "or":
        return any(holds(part, facts, binding) for part in formula[1:])
    if head == "not":
        return not holds(formula[1], facts, binding)
    if head == "imply":
        return not holds(formula[1], facts, binding) or holds(formula[2], facts, binding)
    fact = tuple(binding.get(part, part) for part in formula)
    return fact[1] == fact[2] if head == "=" else fact in facts


def assignments(variables: tuple[tuple[str, str], ...]) -> Iterable[dict[str, str]]:
    if not variables:
        yield {}
        return
    (name, type_name), rest = variables[0], variables[1:]
    for entity, kind in PROBLEM.entities:
        if type_name in (kind, "object"):
            for other in assignments(rest):
                yield {name: entity, **other}


ATOMS = [
    *(("inreceptacle", "?o", "?r"), ("holds", "?a", "?o"), ("opened", "?r"), ("ishot", "?o"), ("openable", "?r"), ("=", "?o", "?r")),
    *(("objecttype", "?o", "appletype"), ("receptacletype", "?r", "fridgetype"), ("atlocation", "?a", "loc_bar_0"), ("checked", "?r")),
    *(("objectatlocation", "?o", "loc_bar_2"), ("pickupable", "?o"), ("holdsany", "?a"), ("heatable", "?o"), ("full", "?r")),
]
VARIABLES = (("?o", "object"), ("?r", "receptacle"), ("?a", "agent"))


def formulas(bound: frozenset[str]) -> st.SearchStrategy[Any]:
    atoms = [atom for atom in ATOMS if {part for part in atom if part.startswith("?")} <= bound]
    leaf: st.SearchStrategy[Any] = st.sampled_from(atoms) if atoms else st.just(("and",))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["and", "or"]), inner, inner),
            st.tuples(st.just("not"), inner),
            st.tuples(st.just("imply"), inner, inner),
        ),
        max_leaves=4,
    )


@st.composite
def goals(draw: st.DrawFn) -> Formula:
    outer = tuple(draw(st.lists(st.sampled_from(VARIABLES), min_size=1, max_size=2, unique=True)))
    left = tuple(variable for variable in VARIABLES if variable not in outer)
    inner = tuple(draw(st.lists(st.sampled_from(left), min_size=1, max_size=len(left), unique=True)))
    some, every = frozenset(name for name, _ in outer), frozenset(name for name, _ in (*outer, *inner))
    nested = (draw(st.sampled_from(["exists", "forall"])), inner, draw(formulas(every)))
    body = (draw(st.sampled_from(["and", "or"])), draw(formulas(some)), nested)
    return (draw(st.sampled_from(["exists", "forall"])), outer, body)


@settings(max_examples=60, deadline=None)
@given(goal=goals(), seed=st.integers(0, 10**6))
def test_a_grounded_goal_agrees_with_a_plain_evaluator_after_every_action(goal: Formula, seed: int) -> None:
    world = World(compile_layout(Problem(PROBLEM.entities, PROBLEM.facts, goal), "x"))
    rng = random.Random(seed)
    for _ in range(8):
        assert world.won == holds(goal, facts_now(world), {})
        commands = [command for command in world.admissible() if not command.startswith("go to")]
        world.act(rng.choice(commands if rng.random() < 0.7 else world.admissible()))


def test_a_goal_is_tested_only_after_actions_that_could_change_it() -> None:
    assert layout_of(TASK).goal_actions == {"take", "move", "heat", "cool"}


def test_a_goal_that_holds_at_the_start_is_won_by_any_first_action() -> None:
    world = World(compile_layout(Problem(PROBLEM.entities, PROBLEM.facts, ("and",)), "x"))
    assert world.won
    try:
        world.act("nonsense")
    except Unmatched:
        assert world.won


def test_kinds_other_than_light_do_not_look_at_where_the_agent_stands() -> None:
    light = next(task for task in tasks("train", 6) if task.kind == "look_at_obj_in_light")
    assert "go" in layout_of(light).goal_actions
    assert "go" not in layout_of(TASK).goal_actions
    assert HouseholdEnvironment().reset_now(light)
