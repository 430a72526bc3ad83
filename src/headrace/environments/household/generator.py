"""Tasks from a seed: rooms, goals, and where things lie. The same call gives the same tasks in every run.

Randomness comes from ``random.Random`` seeded with text, which depends neither on Python's hash randomization nor on how many
tasks are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as counter
from itertools import islice

from headrace.environments.base import Task
from headrace.environments.household.catalogue import (
    CLEANABLE,
    COOLABLE,
    HEATABLE,
    LAMP_PLACES,
    LAMPS,
    MAY_HOLD,
    OPENABLE,
    SLICEABLE,
    VESSELS,
)  # fmt: skip
from headrace.environments.household.problem import KINDS, TREATMENTS, Fact, Formula, Problem
from headrace.environments.household.rooms import Room, rooms_for

SPLITS = {"train": 128, "seen": 64, "unseen": 64, "warmup": None}
SIZES = ("small", "full")
_ABILITIES = {
    "cleanable": CLEANABLE,
    "heatable": HEATABLE,
    "coolable": COOLABLE,
    "sliceable": SLICEABLE,
    "isreceptacleobject": VESSELS,
}
#: The sentences of the original, two for each kind.
_SENTENCES = {
    "pick_and_place_simple": ("put a {obj} in {recep}", "put some {obj} on {recep}"),
    "look_at_obj_in_light": ("look at {obj} under the {recep}", "examine the {obj} with the {recep}"),
    "pick_clean_then_place_in_recep": ("put a clean {obj} in {recep}", "clean some {obj} and put it in {recep}"),
    "pick_heat_then_place_in_recep": ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
    "pick_cool_then_place_in_recep": ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
    "pick_two_obj_and_place": ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked: an object type, and the receptacle type it goes to (for light, the lamp it is looked at under)."""

    kind: str
    object_type: str
    target: str


def tasks(split: str, count: int, rooms: str = "small") -> list[Task]:
    """The first ``count`` tasks of a split.

    ``split``: ``"train"`` (128 tasks), ``"seen"`` (64 other goals in the rooms of train), ``"unseen"`` (64 in rooms of their
    own), ``"warmup"`` (any number, in rooms of their own). ``rooms``: ``"small"`` (8-14 receptacles) or ``"full"`` (the sizes
    of the real floor plans). Splits are disjoint by id and by (room, goal); ``tasks(split, n)`` is a prefix of
    ``tasks(split, m)`` for n <= m. ValueError for an unknown split or size, or more tasks than the split has.
    """
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r} of the household tasks; choose one of {', '.join(SPLITS)}.")
    if rooms not in SIZES:
        raise ValueError(f"There are no {rooms!r} rooms in the household world; choose one of {', '.join(SIZES)}.")
    limit = SPLITS[split]
    if count < 0 or (limit is not None and count > limit):
        raise ValueError(f"The split {split!r} has {limit} tasks; {count} were asked for.")
    if split == "warmup":
        return [task for _, _, task in islice(_stream(rooms, split), count)]
    return [task for _, _, task in _fixed_split(rooms, split)[:count]]


#: A task with the room and the goal that it was made from.
Made = tuple[Room, Goal, Task]


@lru_cache(maxsize=16)
def _fixed_split(rooms: str, split: str) -> tuple[Made, ...]:
    return tuple(islice(_stream(rooms, split), SPLITS[split]))


def _stream(size: str, split: str) -> Iterator[Made]:
    """The tasks of a split, kind after kind in turn, each (room, goal) once; those of ``seen`` avoid those of ``train``."""
    trained = _fixed_split(size, "train") if split == "seen" else ()
    taken = {(room.name, goal) for room, goal, _ in trained}
    seen_rooms = list(dict.fromkeys(room for room, _, _ in trained))
    for index in counter():
        kind = KINDS[index % len(KINDS)]
        choice = [r for r in seen_rooms if kind in r.kinds] if split == "seen" else rooms_for(size, split, kind, index)
        for attempt in range(1000):
            rng = random.Random(f"task {size} {split} {index} {attempt}")
            room = rng.choice(choice)
            goals = [goal for goal in goals_of(room, kind) if (room.name, goal) not in taken]
            if goals:
                goal = rng.choice(goals)
                taken.add((room.name, goal))
                yield room, goal, make_task(size, room, goal, rng)
                break
        else:
            raise RuntimeError(f"The {size} rooms of the split {split!r} have no goal of the kind {kind!r} left for task {index}.")


def goals_of(room: Room, kind: str) -> list[Goal]:
    """Every goal of a kind that makes sense in a room: the object may lie elsewhere, and may be put there."""
    if kind not in room.kinds:
        return []
    placeable = [obj for obj in room.objects if any(obj in MAY_HOLD[receptacle] for receptacle in room.types())]
    if kind == "look_at_obj_in_light":
        return [Goal(kind, obj, lamp) for obj in placeable for lamp in sorted(LAMPS)]
    treatment = TREATMENTS.get(kind)
    appliance = treatment.appliance if treatment else ""
    able = _ABILITIES[treatment.ability] if treatment else frozenset(placeable)
    return [
        Goal(kind, obj, target)
        for obj in placeable
        for target in room.types()
        if obj in able and target != appliance and obj in MAY_HOLD[target] and _may_lie_elsewhere(room, obj, target, appliance)
    ]


def _may_lie_elsewhere(room: Room, obj: str, *others: str) -> bool:
    return any(obj in MAY_HOLD[receptacle] for receptacle in room.types() if receptacle not in others)


def make_task(size: str, room: Room, goal: Goal, rng: random.Random) -> Task:
    """A task of a room and a goal: objects are placed by ``rng``."""
    problem = _problem(room, goal, rng)
    sentence = rng.choice(_SENTENCES[goal.kind]).format(obj=goal.object_type.lower(), recep=goal.target.lower())
    parts = ("household", size, room.name, goal.kind, goal.object_type.lower(), goal.target.lower())
    return Task(id="-".join(parts), kind=goal.kind, payload=problem.payload(sentence) | {"room": room.name})


def _problem(room: Room, goal: Goal, rng: random.Random) -> Problem:
    receptacles = {_receptacle_id(kind, number): kind for kind, amount in room.counts for number in range(1, amount + 1)}
    locations = _locations(room, receptacles, rng)
    objects = _objects(room, goal, rng)
    places = _places(objects, goal, receptacles, rng)
    facts: list[Fact] = [("atlocation", "agent1", "loc_bar_0")]
    for receptacle, kind in receptacles.items():
        facts += [("receptacletype", receptacle, f"{kind.lower()}type"), ("receptacleatlocation", receptacle, locations[receptacle])]
        facts += [("openable", receptacle)] if kind in OPENABLE else []
    for obj, kind in objects.items():
        facts += [("objecttype", obj, f"{kind.lower()}type"), *_abilities(obj, kind)]
        facts += [("inreceptacle", obj, places[obj]), ("objectatlocation", obj, locations[places[obj]])]
    kinds = sorted(set(objects.values()))
    may_hold = [(receptacle, obj) for receptacle in room.types() for obj in kinds if obj in MAY_HOLD[receptacle]]
    facts += [("cancontain", f"{receptacle.lower()}type", f"{obj.lower()}type") for receptacle, obj in may_hold]
    return Problem(_entities(receptacles, objects), tuple(facts), goal_formula(goal))


def _locations(room: Room, receptacles: dict[str, str], rng: random.Random) -> dict[str, str]:
    """A place for each receptacle; in full rooms neighbours share one now and then, as a coffee machine shares the counter's."""
    places: dict[str, str] = {}
    previous: str | None = None
    for number, (receptacle, kind) in enumerate(receptacles.items(), 1):
        shared = room.shares_places and previous is not None and receptacles[previous] == kind and rng.random() < 0.15
        places[receptacle] = places[previous] if shared and previous is not None else f"loc_bar_{number}"
        previous = receptacle
    counters = [receptacle for receptacle, kind in receptacles.items() if kind == "CounterTop"]
    for receptacle, kind in receptacles.items():
        if room.shares_places and counters and kind in ("CoffeeMachine", "Toaster") and rng.random() < 0.5:
            places[receptacle] = places[rng.choice(counters)]
    return places


def _receptacle_id(kind: str, number: int) -> str:
    """Basins carry their sink's id, as in the original, from which their display name comes."""
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin').lower()}_bar_{number:02d}_bar_{kind.lower()}"
    return f"{kind.lower()}_bar_{number:02d}"


def _objects(room: Room, goal: Goal, rng: random.Random) -> dict[str, str]:
    """Object ids with their types: those the goal needs, a lamp where there is light to look in, and others."""
    wanted = [goal.object_type] * (2 if goal.kind == "pick_two_obj_and_place" else 1)
    if goal.kind == "look_at_obj_in_light":
        wanted.append(goal.target)
    kinds = wanted + _others(room, goal, len(wanted), rng)
    numbers: dict[str, int] = {}
    ids: dict[str, str] = {}
    for kind in kinds:
        numbers[kind] = numbers.get(kind, 0) + 1
        ids[f"{kind.lower()}_bar_{numbers[kind]:02d}"] = kind
    return ids


def _others(room: Room, goal: Goal, wanted: int, rng: random.Random) -> list[str]:
    """Objects beside those that the goal needs: up to the room's total, or one to three of each type."""
    placeable = [obj for obj in room.objects if _may_lie_elsewhere(room, obj)]
    if room.total is None:
        return [obj for obj in placeable for _ in range(rng.choice((1, 1, 2, 3)) - (obj == goal.object_type))]
    others = [obj for obj in placeable if obj != goal.object_type]
    return [rng.choice(others if rng.random() < 0.9 else placeable) for _ in range(rng.randint(*room.total) - wanted)]


def _places(objects: dict[str, str], goal: Goal, receptacles: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Where each object lies: never so that a goal is half done, and what the goal needs behind a door more often than not."""
    treatment = TREATMENTS.get(goal.kind)
    appliance = treatment.appliance if treatment else ""
    places: dict[str, str] = {}
    for obj, kind in objects.items():
        if kind in LAMPS:
            fitting = [r for r, rtype in receptacles.items() if rtype in LAMP_PLACES]
        else:
            fitting = [r for r, rtype in receptacles.items() if kind in MAY_HOLD[rtype]]
        if kind == goal.object_type:
            fitting = [r for r in fitting if receptacles[r] not in (goal.target, appliance)]
            closed = [r for r in fitting if receptacles[r] in OPENABLE]
            fitting = closed if closed and rng.random() < 0.7 else fitting
        places[obj] = rng.choice(fitting)
    return places


def _abilities(obj: str, kind: str) -> list[Fact]:
    if kind in LAMPS:
        return [("toggleable", obj)]
    return [("pickupable", obj), ("moveable", obj), *((ability, obj) for ability, kinds in _ABILITIES.items() if kind in kinds)]


def _entities(receptacles: dict[str, str], objects: dict[str, str]) -> tuple[tuple[str, str], ...]:
    needed = {"sinkbasintype": "rtype", "microwavetype": "rtype", "fridgetype": "rtype", "knifetype": "otype", "butterknifetype": "otype"}
    types = needed | {f"{kind.lower()}type": "rtype" for kind in receptacles.values()}
    types |= {f"{kind.lower()}type": "otype" for kind in objects.values()}
    return (
        ("agent1", "agent"),
        *((f"loc_bar_{number}", "location") for number in range(len(receptacles) + 1)),
        *((receptacle, "receptacle") for receptacle in receptacles),
        *((obj, "object") for obj in objects),
        *sorted(types.items()),
    )


def goal_formula(goal: Goal) -> Formula:
    """The goal in the words of the original's library of goals."""
    otype, target = f"{goal.object_type.lower()}type", f"{goal.target.lower()}type"
    if goal.kind == "look_at_obj_in_light":
        on: tuple[Fact, ...] = (("objecttype", "?ot", target), ("toggleable", "?ot"), ("istoggled", "?ot"))
        near: tuple[Fact, ...] = (("receptacleatlocation", "?r", "?l"), ("atlocation", "?a", "?l"), ("inreceptacle", "?ot", "?r"))
        variables = (("?ot", "object"), ("?r", "receptacle"), ("?a", "agent"), ("?l", "location"))
        lamp = ("exists", variables, ("and", *on, *near))
        held = ("exists", (("?o", "object"), ("?a", "agent")), ("and", ("objecttype", "?o", otype), ("holds", "?a", "?o")))
        return ("and", lamp, held)
    if goal.kind == "pick_two_obj_and_place":
        second = ("exists", (("?o2", "object"),), ("and", ("not", ("=", "?o1", "?o2")), *_in_place("?o2", otype, target)))
        first = ("exists", (("?o1", "object"),), ("and", *_in_place("?o1", otype, target), second))
        return ("and", ("exists", (("?r", "receptacle"),), first))
    treatment = TREATMENTS.get(goal.kind)
    treated: tuple[Formula, ...] = ((treatment.ability, "?o"), (treatment.state, "?o")) if treatment else ()
    placed: Formula = ("exists", (("?o", "object"),), ("and", *treated, *_in_place("?o", otype, target)))
    return ("and", ("exists", (("?r", "receptacle"),), placed))


def _in_place(variable: str, otype: str, rtype: str) -> tuple[Fact, ...]:
    return (("objecttype", variable, otype), ("receptacletype", "?r", rtype), ("inreceptacle", variable, "?r"))
