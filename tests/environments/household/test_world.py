"""Texts and rules, on a kitchen small enough to check by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.environments.base import Environment, Step, Task
from headrace.environments.household import HouseholdEnvironment, from_pddl

PROBLEM = """
(define (problem kitchen) (:domain alfred)
 (:objects agent1 - agent
   loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_4 loc_bar_5 - location
   Fridge_bar_1 Microwave_bar_1 CounterTop_bar_1 CounterTop_bar_2 Sink_bar_1_bar_SinkBasin Drawer_bar_1 - receptacle
   Apple_bar_1 Apple_bar_2 Knife_bar_1 Mug_bar_1 DeskLamp_bar_1 Spoon_bar_1 - object
   FridgeType MicrowaveType CounterTopType SinkBasinType DrawerType - rtype
   AppleType KnifeType ButterKnifeType MugType DeskLampType SpoonType - otype)
 (:init (atLocation agent1 loc_bar_0) ; the middle of the room
   (receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_1) (openable Fridge_bar_1)
   (receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_bar_2) (openable Microwave_bar_1)
   (receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc_bar_3)
   (receptacleType CounterTop_bar_2 CounterTopType) (receptacleAtLocation CounterTop_bar_2 loc_bar_4)
   (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_5)
   (receptacleType Drawer_bar_1 DrawerType) (receptacleAtLocation Drawer_bar_1 loc_bar_4) (openable Drawer_bar_1)
   (objectType Apple_bar_1 AppleType) (pickupable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (cleanable Apple_bar_1)
   (sliceable Apple_bar_1) (inReceptacle Apple_bar_1 Fridge_bar_1) (objectAtLocation Apple_bar_1 loc_bar_1)
   (objectType Apple_bar_2 AppleType) (pickupable Apple_bar_2) (inReceptacle Apple_bar_2 CounterTop_bar_1)
   (sliceable Apple_bar_2) (objectAtLocation Apple_bar_2 loc_bar_3)
   (objectType Knife_bar_1 KnifeType) (pickupable Knife_bar_1) (inReceptacle Knife_bar_1 CounterTop_bar_1)
   (objectType Spoon_bar_1 SpoonType) (pickupable Spoon_bar_1) (inReceptacle Spoon_bar_1 Drawer_bar_1)
   (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1) (isReceptacleObject Mug_bar_1) (inReceptacle Mug_bar_1 CounterTop_bar_1)
   (inReceptacleObject Spoon_bar_1 Mug_bar_1)
   (objectType DeskLamp_bar_1 DeskLampType) (toggleable DeskLamp_bar_1) (inReceptacle DeskLamp_bar_1 CounterTop_bar_2)
   (canContain FridgeType AppleType) (canContain CounterTopType AppleType) (canContain CounterTopType KnifeType)
   (canContain DrawerType KnifeType) (canContain DrawerType SpoonType) (canContain SinkBasinType AppleType)
   (canContain CounterTopType MugType) (= (distance loc_bar_1 loc_bar_2) 3))
 (:goal (and (exists (?r - receptacle) (exists (?o - object) (and (heatable ?o) (objectType ?o AppleType)
   (receptacleType ?r CounterTopType) (isHot ?o) (inReceptacle ?o ?r)))))))
"""


@pytest.fixture
def kitchen() -> Task:
    return from_pddl(PROBLEM, "put a hot apple in countertop")


def run(task: Task, *actions: str) -> list[Step]:
    world = HouseholdEnvironment(200)
    world.reset_now(task)
    return [world.step_now(action) for action in actions]


def answers(task: Task, *actions: str) -> list[str]:
    return [step.observation for step in run(task, *actions)]


def test_the_opening_lists_receptacles_in_the_order_of_their_ids_and_then_the_task(kitchen: Task) -> None:
    assert HouseholdEnvironment().reset_now(kitchen) == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a countertop 2, a countertop 1, a drawer 1, a fridge 1, "
        "a microwave 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a hot apple in countertop."
    )


def test_an_apple_is_heated_and_put_back(kitchen: Task) -> None:
    steps = run(
        kitchen,
        "go to fridge 1",
        "open fridge 1",
        "take apple 2 from fridge 1",
        "go to microwave 1",
        "heat apple 2 with microwave 1",
        "examine apple 2",
        "go to countertop 2",
        "move apple 2 to countertop 2",
    )
    assert [step.observation for step in steps] == [
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You open the fridge 1. The fridge 1 is open. In it, you see a apple 2.",
        "You pick up the apple 2 from the fridge 1.",
        "You arrive at microwave 1. The microwave 1 is closed.",
        "You heat the apple 2 using the microwave 1.",
        "This is a hot apple 2.",
        "You arrive at countertop 2. On the countertop 2, you see a apple 1, a knife 1, and a mug 1.",
        "You move the apple 2 to the countertop 2.",
    ]
    assert [step.done for step in steps] == [False] * 7 + [True]
    assert (steps[-1].success, steps[-1].reason) == (True, "success")


def test_lists_have_the_comma_of_the_original_even_for_two(kitchen: Task) -> None:
    take = ("go to countertop 2", "take apple 1 from countertop 2", "examine countertop 2")
    assert answers(kitchen, *take)[-1] == "On the countertop 2, you see a knife 1, and a mug 1."


def test_a_place_in_reach_of_two_receptacles_needs_no_second_walk(kitchen: Task) -> None:
    said = answers(kitchen, "go to countertop 1", "look", "go to drawer 1", "open drawer 1", "go to countertop 1")
    assert said[1] == "You are facing the countertop 1, and drawer 1. Next to it, you see nothing."
    assert said[2] == "Nothing happens."
    assert said[3] == "You open the drawer 1. The drawer 1 is open. In it, you see a spoon 1."
    assert said[4] == "Nothing happens."


def test_looking_around_shows_only_what_was_taken_out_and_laid_beside(kitchen: Task) -> None:
    actions = ("go to countertop 1", "open drawer 1", "take spoon 1 from drawer 1", "look", "move spoon 1 to drawer 1", "look")
    said = answers(kitchen, *actions)
    assert said[3] == said[5] == "You are facing the countertop 1, and drawer 1. Next to it, you see nothing."
    knife = ("go to countertop 2", "take knife 1 from countertop 2", "go to drawer 1", "open drawer 1", "move knife 1 to drawer 1")
    again = ("take knife 1 from drawer 1", "move knife 1 to countertop 1", "look")
    assert answers(kitchen, *knife, *again)[-1] == "You are facing the countertop 1, and drawer 1. Next to it, you see a knife 1."


def test_the_middle_of_the_room_shows_nothing_to_a_second_look(kitchen: Task) -> None:
    assert answers(kitchen, "look") == ["You are in the middle of a room. Looking quickly around you, you see nothing."]


def test_a_lamp_is_turned_on_however_often_it_is_used(kitchen: Task) -> None:
    assert answers(kitchen, "go to countertop 1", "use desklamp 1", "use desklamp 1")[1:] == ["You turn on the desklamp 1."] * 2


def test_hands_hold_one_thing_and_the_inventory_says_which(kitchen: Task) -> None:
    said = answers(
        kitchen, "inventory", "go to countertop 2", "take mug 1 from countertop 2", "take apple 1 from countertop 2", "inventory"
    )
    assert said[0] == "You are not carrying anything."
    assert said[3] == "Nothing happens."
    assert said[4] == "You are carrying: a mug 1."


def test_things_are_described_by_what_was_done_to_them(kitchen: Task) -> None:
    fetch = (
        "go to fridge 1",
        "open fridge 1",
        "take apple 2 from fridge 1",
        "examine apple 2",
        "cool apple 2 with fridge 1",
        "examine apple 2",
    )
    wash = ("go to sinkbasin 1", "clean apple 2 with sinkbasin 1", "examine apple 2", "go to microwave 1", "heat apple 2 with microwave 1")
    said = answers(kitchen, *fetch, *wash, "examine apple 2")
    assert said[3] == "There's nothing special about apple 2."
    assert said[5] == "This is a cold apple 2."
    assert said[8] == "This is a cool and clean apple 2."
    assert said[11] == "This is a hot and clean apple 2."
    assert answers(kitchen, "go to countertop 2", "take mug 1 from countertop 2", "examine mug 1")[-1] == (
        "This is a normal mug 1. In it, you see a spoon 1."
    )


def test_only_what_is_held_can_be_examined(kitchen: Task) -> None:
    assert answers(kitchen, "go to countertop 2", "examine apple 1")[-1] == "Nothing happens."


def test_slicing_needs_a_knife_in_hand_and_the_thing_at_the_place(kitchen: Task) -> None:
    said = answers(
        kitchen, "go to countertop 2", "slice apple 1 with knife 1", "take knife 1 from countertop 2", "slice apple 1 with knife 1"
    )
    assert said[1] == "Nothing happens."
    assert said[3] == "You sliced the apple 1 with the knife 1."
    cut = ("move knife 1 to countertop 2", "take apple 1 from countertop 2", "examine apple 1")
    actions = ("go to countertop 2", "take knife 1 from countertop 2", "slice apple 1 with knife 1", *cut)
    assert answers(kitchen, *actions)[-1] == "This is a sliced apple 1."


def test_closed_things_give_and_take_nothing(kitchen: Task) -> None:
    assert answers(kitchen, "go to fridge 1", "take apple 2 from fridge 1")[-1] == "Nothing happens."
    carry = ("go to countertop 2", "take apple 1 from countertop 2", "go to fridge 1", "move apple 1 to fridge 1")
    assert answers(kitchen, *carry)[-1] == "Nothing happens."
    shut = ("open fridge 1", "open fridge 1", "close fridge 1", "close fridge 1")
    assert answers(kitchen, "go to fridge 1", *shut)[1:] == [
        "You open the fridge 1. The fridge 1 is open. In it, you see a apple 2.",
        "Nothing happens.",
        "You close the fridge 1.",
        "Nothing happens.",
    ]


def test_a_receptacle_takes_only_what_fits_it(kitchen: Task) -> None:
    assert answers(
        kitchen, "go to countertop 2", "take mug 1 from countertop 2", "go to drawer 1", "open drawer 1", "move mug 1 to drawer 1"
    )[-1] == ("Nothing happens.")


def test_help_names_every_action(kitchen: Task) -> None:
    (text,) = answers(kitchen, "help")
    assert text.startswith("Available commands:\n  look: ")
    assert text.endswith("slice an object using a sharp object\n")
    assert len(text.splitlines()) == 14


def test_admissible_commands_are_exactly_those_that_do_something(kitchen: Task) -> None:
    world = HouseholdEnvironment(10)
    world.reset_now(kitchen)
    assert world.admissible() == sorted(
        [f"go to {name}" for name in ("countertop 1", "countertop 2", "drawer 1", "fridge 1", "microwave 1", "sinkbasin 1")]
        + ["help", "inventory", "look"]
    )
    world.step_now("go to countertop 1")
    assert world.admissible() == [
        "examine countertop 1",
        "examine drawer 1",
        "go to countertop 2",
        "go to fridge 1",
        "go to microwave 1",
        "go to sinkbasin 1",
        "help",
        "inventory",
        "look",
        "open drawer 1",
        "use desklamp 1",
    ]


@pytest.mark.parametrize(
    "action",
    [
        *(
            "",
            " ",
            "take",
            "take from",
            "take apple 1",
            "take apple 1 from",
            "go",
            "go to",
            "go fridge 1",
            "open",
            "close",
            "use",
            "examine",
        ),
        *("move apple 1 to", "heat with", "clean apple 1", "slice apple 1 with", "look around", "inventory please", "help me", "dance"),
        *("put apple 1 in/on countertop 1", "Go to fridge 1", "LOOK", "go to fridge", "go to fridge 9", "go to apple 1", "go  to fridge 1"),
        *(
            "take apple 7 from fridge 1",
            "take fridge 1 from apple 1",
            "open apple 1",
            "go to fridge 1.",
            "> look",
            "go to fridge 1\nlook",
            "\x00",
        ),
    ],
)
def test_what_is_no_sentence_of_the_world_does_nothing_and_is_marked(kitchen: Task, action: str) -> None:
    step = run(kitchen, action)[0]
    assert (step.observation, step.done, step.unmatched) == ("Nothing happens.", False, True)


@pytest.mark.parametrize(
    "action", ["open fridge 1", "take apple 2 from fridge 1", "heat mug 1 with fridge 1", "slice mug 1 with apple 1", "use mug 1"]
)
def test_a_sentence_that_cannot_be_done_now_does_nothing_and_is_not_marked(kitchen: Task, action: str) -> None:
    step = run(kitchen, action)[0]
    assert (step.observation, step.unmatched) == ("Nothing happens.", False)


def test_spaces_around_an_action_do_not_matter(kitchen: Task) -> None:
    assert answers(kitchen, "  go to fridge 1 \n") == ["You arrive at fridge 1. The fridge 1 is closed."]


@given(action=st.text() | st.from_regex(r"(take|move|go|heat|use|open) ?(to|from|with)? ?(apple|fridge)? ?[0-9]? ?(from|to|with)? ?.{0,9}"))
def test_no_text_breaks_the_parser(action: str) -> None:
    step = run(from_pddl(PROBLEM, "x"), action)[0]
    assert step.done is False


def test_the_world_is_an_environment() -> None:
    world = HouseholdEnvironment()
    assert isinstance(world, Environment)
    assert world.system is None
    assert tuple(world.tools) == ()
