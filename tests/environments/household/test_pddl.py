"""PDDL problems in and out."""

from __future__ import annotations

import pytest

from headrace.environments.base import Task
from headrace.environments.household import HouseholdEnvironment, expert, from_pddl, solves, tasks, to_pddl
from headrace.environments.household.naming import numbered_names
from headrace.environments.household.pddl import parse_problem, write_problem
from headrace.environments.household.problem import problem_of

TINY = """(define (problem x) (:domain alfred)
 (:objects A - agent L0 L1 - location Shelf_bar_1 - receptacle Cup_bar_1 - object ShelfType - rtype CupType - otype)
 (:init (atLocation A L0) (receptacleAtLocation Shelf_bar_1 L1) (receptacleType Shelf_bar_1 ShelfType) {facts})
 (:goal {goal}))"""
GOAL = "(exists (?o - object ?a - agent) (and (objectType ?o CupType) (holds ?a ?o)))"


def tiny(facts: str = "", goal: str = GOAL) -> Task:
    return from_pddl(TINY.format(facts=facts, goal=goal), "hold a cup")


@pytest.mark.parametrize("rooms", ["small", "full"])
def test_a_task_survives_the_way_through_pddl(rooms: str) -> None:
    for task in tasks("train", 12, rooms=rooms):
        back = from_pddl(*to_pddl(task))
        assert problem_of(back) == problem_of(task)
        assert (back.kind, back.payload["instruction"]) == (task.kind, task.payload["instruction"])
        assert solves(back, expert(task))
        assert HouseholdEnvironment().reset_now(back) == HouseholdEnvironment().reset_now(task)


def test_an_imported_tasks_id_is_made_of_its_problem_and_its_instruction() -> None:
    problem, instruction = to_pddl(tasks("train", 1)[0])
    assert from_pddl(problem, instruction).id == from_pddl(problem.replace("    ", "\t"), instruction).id
    assert from_pddl(problem, instruction).id != from_pddl(problem, "do something else").id
    assert from_pddl(*to_pddl(tasks("train", 2)[1])).id != from_pddl(problem, instruction).id


def test_case_comments_and_repeated_facts_do_not_matter() -> None:
    loud = TINY.format(facts="(INRECEPTACLE CUP_BAR_1 SHELF_BAR_1) ; a comment )\n (inReceptacle Cup_bar_1 Shelf_bar_1)", goal=GOAL)
    quiet = TINY.format(facts="(inreceptacle cup_bar_1 shelf_bar_1)", goal=GOAL)
    assert parse_problem(loud) == parse_problem(quiet)


def test_writing_and_reading_again_changes_nothing() -> None:
    problem = parse_problem(TINY.format(facts="", goal="(and (forall (?r - receptacle) (imply (openable ?r) (not (opened ?r)))) (or))"))
    assert parse_problem(write_problem(problem)) == problem


def test_the_instruction_stands_before_the_engines_own_full_stop() -> None:
    assert HouseholdEnvironment().reset_now(tiny()).endswith("\n\nYour task is to: hold a cup.")


def test_numbers_fall_along_the_alphabet_and_basins_are_told_from_sinks() -> None:
    ids = ["mug_bar_b", "mug_bar_a", "mug_bar_c", "sink_bar_1", "sink_bar_1_bar_sinkbasin", "mugtype", "loc_bar_1"]
    assert numbered_names(ids) == {
        "mug_bar_a": "mug 3",
        "mug_bar_b": "mug 2",
        "mug_bar_c": "mug 1",
        "sink_bar_1": "sink 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "mugtype": "mugtype ",
        "loc_bar_1": "loc 1",
    }


def test_kinds_are_read_off_the_goal() -> None:
    for task in tasks("unseen", 12):
        assert from_pddl(*to_pddl(task)).kind == task.kind
    assert tiny().kind == "other"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "This is not a PDDL problem"),
        ("(hello)", "This is not a PDDL problem"),
        ("(define (problem x)", "leaves 1 bracket"),
        ("(define (problem x)))", "closes a bracket that was never opened"),
        ("(define (problem x) (:objects) (:init))", "has no :goal section"),
        ("(define (problem x) (:objects a - robot) (:init) (:goal (and)))", "type 'robot', which the ALFRED domain lacks"),
        ("(define (problem x) (:objects a -) (:init) (:goal (and)))", "ends after '-'"),
        ("(define (problem x) (:objects) (:init what) (:goal (and)))", "must list facts in brackets; found 'what'"),
        ("(define (problem x) (:objects) (:init (p (q))) (:goal (and)))", "a predicate with names"),
        ("(define (problem x) (:objects) (:init) (:goal (when (a) (b))))", "formula that PDDL lacks"),
        ("(define (problem x) (:objects) (:init) (:goal (a) (b)))", "exactly one formula"),
        (
            "(define (problem x) (:objects) (:init) (:goal (hods a b)))",
            "predicate 'hods', which the ALFRED domain lacks; did you mean 'holds'",
        ),
        ("(define (problem x) (:objects) (:init) (:goal (holds a)))", r"holds \(holds a\); holds relates 2 name\(s\), not 1"),
        ("(define (problem x) (:objects) (:init (isHot)) (:goal (and)))", "ishot relates 1"),
        ("(define oops)", "consists of sections in brackets"),
    ],
)
def test_what_is_no_problem_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_pddl(text, "x")


@pytest.mark.parametrize(
    ("facts", "goal", "sentence"),
    [
        ("(receptacleAtLocation Shelf_bar_1 L0)", GOAL, "is at two locations"),
        ("(atLocation A L1)", GOAL, "agent of the problem is at two locations"),
        ("", "(and (holds ?a Cup_bar_1))", r"uses '\?a' in \(holds \?a cup_bar_1\) outside the quantifier"),
    ],
)
def test_what_the_world_cannot_run_is_refused_when_it_starts(facts: str, goal: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        HouseholdEnvironment().reset_now(tiny(facts, goal))


def test_a_problem_without_an_agent_in_the_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no agent at a location"):
        HouseholdEnvironment().reset_now(from_pddl(TINY.format(facts="", goal=GOAL).replace("(atLocation A L0)", ""), "x"))


def test_the_expert_says_so_where_it_knows_no_plan() -> None:
    with pytest.raises(ValueError, match="not of the six household kinds"):
        expert(tiny())
    goal = "(exists (?r - receptacle ?o - object) (and (inReceptacle ?o ?r) (objectType ?o CupType) (receptacleType ?r ShelfType)))"
    with pytest.raises(ValueError, match="No scripted plan solves"):
        expert(tiny(goal=goal))
