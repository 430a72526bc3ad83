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
from headrace.environments.household.problem import KINDS, Fact, Formula, Problem
from headrace.environments.household.rooms import SMALL, Room, Style, draw_room

SPLITS = {"train": 128, "seen": 64, "unseen": 64, "warmup": None}
_STYLES = {"small": SMALL}
_TREATMENTS = {
    "pick_clean_then_place_in_recep": ("cleanable", "isclean", CLEANABLE),
    "pick_heat_then_place_in_recep": ("heatable", "ishot", HEATABLE),
    "pick_cool_then_place_in_recep": ("coolable", "iscool", COOLABLE),
}
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
    if rooms not in _STYLES:
        raise ValueError(f"There are no {rooms!r} rooms in the household world; choose one of {', '.join(_STYLES)}.")
    limit = SPLITS[split]
    if count < 0 or (limit is not None and count > limit):
        raise ValueError(f"The split {split!r} has {limit} tasks; {count} were asked for.")
    if split == "warmup":
        return list(islice(_stream(rooms, "warmup"), count))
    return list(_fixed_split(rooms, split)[:count])


@lru_cache(maxsize=16)
def _fixed_split(rooms: str, split: str) -> tuple[Task, ...]:
    limit = SPLITS[split]
    if split == "seen":
        used = frozenset((_room_of(task), _goal_of(task)) for task in _fixed_split(rooms, "train"))
        return tuple(islice(_stream(rooms, "seen", used), limit))
    return tuple(islice(_stream(rooms, split), limit))


def _room_of(task: Task) -> str:
    return str(task.payload["room"])


def _goal_of(task: Task) -> Goal:
    return Goal(task.kind, *task.payload["asked"])


def _stream(rooms: str, split: str, used: frozenset[tuple[str, Goal]] = frozenset()) -> Iterator[Task]:
    """The tasks of a split, kind after kind in turn, each (room, goal) once."""
    taken = set(used)
    for index in counter():
        kind = KINDS[index % len(KINDS)]
        for attempt in counter():
            rng = random.Random(f"task {rooms} {split} {index} {attempt}")
            room = _pick_room(rooms, split, kind, index, rng)
            goals = [goal for goal in goals_of(room, kind) if (room.name, goal) not in taken]
            if goals:
                goal = rng.choice(goals)
                taken.add((room.name, goal))
                yield make_task(rooms, room, goal, rng)
                break


def _pick_room(rooms: str, split: str, kind: str, index: int, rng: random.Random) -> Room:
    """One of the split's rooms that suits the kind: ten of each style for train and seen, five for unseen, new ones for warm-up."""
    styles = [style for style in _STYLES[rooms] if kind in style.kinds]
    style = rng.choice(styles)
    number = {"train": rng.randrange(10), "seen": rng.randrange(10), "unseen": 10 + rng.randrange(5)}.get(split, 1000 + index)
    return _room(rooms, style.name, number)


@lru_cache(maxsize=4096)
def _room(rooms: str, style_name: str, number: int) -> Room:
    style = next(style for style in _STYLES[rooms] if style.name == style_name)
    name = f"{style_name}{number:02d}"
    return draw_room(style, name, f"{rooms} {name}")


def goals_of(room: Room, kind: str) -> list[Goal]:
    """Every goal of a kind that makes sense in a room: the object may lie elsewhere, and may be put there."""
    if kind not in room.style.kinds:
        return []
    if kind == "look_at_obj_in_light":
        return [Goal(kind, obj, lamp) for obj in room.style.objects for lamp in sorted(LAMPS)]
    able = _TREATMENTS[kind][2] if kind in _TREATMENTS else frozenset(room.style.objects)
    return [
        Goal(kind, obj, target)
        for obj in room.style.objects
        for target in room.types()
        if obj in able and obj in MAY_HOLD[target] and any(obj in MAY_HOLD[other] for other in room.types() if other != target)
    ]


def make_task(rooms: str, room: Room, goal: Goal, rng: random.Random) -> Task:
    """A task of a room and a goal: objects are placed by ``rng``."""
    problem = _problem(room, goal, rng)
    sentence = rng.choice(_SENTENCES[goal.kind]).format(obj=goal.object_type.lower(), recep=goal.target.lower())
    payload = problem.payload(sentence)
    payload["room"] = room.name
    payload["asked"] = [goal.object_type, goal.target]
    parts = ("household", rooms, room.name, goal.kind, goal.object_type.lower(), goal.target.lower())
    return Task(id="-".join(parts), kind=goal.kind, payload=payload)


def _problem(room: Room, goal: Goal, rng: random.Random) -> Problem:
    receptacles = {_receptacle_id(kind, number): kind for kind, amount in room.counts for number in range(1, amount + 1)}
    objects = _objects(room.style, goal, rng)
    places = {obj: _place(kind, goal, receptacles, rng) for obj, kind in objects.items()}
    facts: list[Fact] = [("atlocation", "agent1", "loc_bar_0")]
    for number, (receptacle, kind) in enumerate(receptacles.items(), 1):
        facts += [("receptacletype", receptacle, f"{kind.lower()}type"), ("receptacleatlocation", receptacle, f"loc_bar_{number}")]
        facts += [("openable", receptacle)] if kind in OPENABLE else []
    locations = {receptacle: f"loc_bar_{number}" for number, receptacle in enumerate(receptacles, 1)}
    for obj, kind in objects.items():
        facts += [("objecttype", obj, f"{kind.lower()}type"), *_abilities(obj, kind)]
        facts += [("inreceptacle", obj, places[obj]), ("objectatlocation", obj, locations[places[obj]])]
    kinds = sorted(set(objects.values()))
    facts += [
        ("cancontain", f"{receptacle.lower()}type", f"{obj.lower()}type")
        for receptacle in room.types() for obj in kinds if obj in MAY_HOLD[receptacle]
    ]  # fmt: skip
    return Problem(_entities(receptacles, objects), tuple(facts), goal_formula(goal))


def _receptacle_id(kind: str, number: int) -> str:
    """Basins carry their sink's id, as in the original, from which their display name comes."""
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin').lower()}_bar_{number:02d}_bar_{kind.lower()}"
    return f"{kind.lower()}_bar_{number:02d}"


def _objects(style: Style, goal: Goal, rng: random.Random) -> dict[str, str]:
    """Object ids with their types: those the goal needs, a lamp where there is light to look in, and others."""
    wanted = [goal.object_type] * (2 if goal.kind == "pick_two_obj_and_place" else 1)
    if goal.kind == "look_at_obj_in_light":
        wanted.append(goal.target)
    total = rng.randint(*style.object_count)
    others = [kind for kind in style.objects if kind != goal.object_type]
    kinds = wanted + [rng.choice(others if rng.random() < 0.9 else style.objects) for _ in range(total - len(wanted))]
    numbers: dict[str, int] = {}
    ids: dict[str, str] = {}
    for kind in kinds:
        numbers[kind] = numbers.get(kind, 0) + 1
        ids[f"{kind.lower()}_bar_{numbers[kind]:02d}"] = kind
    return ids


def _place(kind: str, goal: Goal, receptacles: dict[str, str], rng: random.Random) -> str:
    """A receptacle in which such an object may lie; never one that would have the goal half done."""
    if kind in LAMPS:
        return rng.choice([r for r, rtype in receptacles.items() if rtype in LAMP_PLACES])
    fitting = [r for r, rtype in receptacles.items() if kind in MAY_HOLD[rtype]]
    return rng.choice([r for r in fitting if kind != goal.object_type or receptacles[r] != goal.target])


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
    ability, state, _ = _TREATMENTS.get(goal.kind, ("", "", frozenset()))
    treated: tuple[Formula, ...] = ((ability, "?o"), (state, "?o")) if ability else ()
    placed: Formula = ("exists", (("?o", "object"),), ("and", *treated, *_in_place("?o", otype, target)))
    return ("and", ("exists", (("?r", "receptacle"),), placed))


def _in_place(variable: str, otype: str, rtype: str) -> tuple[Fact, ...]:
    return (("objecttype", variable, otype), ("receptacletype", "?r", rtype), ("inreceptacle", variable, "?r"))
