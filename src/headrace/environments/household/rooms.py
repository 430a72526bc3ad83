"""Rooms: which receptacles there are, and which objects are found there.

Small rooms are drawn from a style and a number; full rooms are the floor plans of ALFRED. Either way a room is the same in every
run. Each split has rooms of its own, except ``seen``, which stays in those of ``train``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from headrace.environments.household.catalogue import LAMP_PLACES, LAMPS
from headrace.environments.household.problem import KINDS

_PLACE, _LIGHT, _CLEAN, _HEAT, _COOL, _TWO = KINDS


@dataclass(frozen=True, slots=True)
class Room:
    """A room: receptacle types with counts, object types, how many objects in all (None: one to three of each type)."""

    name: str
    counts: tuple[tuple[str, int], ...]
    objects: tuple[str, ...]
    kinds: tuple[str, ...]
    total: tuple[int, int] | None = None
    #: Whether neighbouring receptacles may be in reach from one place, as in real games.
    shares_places: bool = False

    def types(self) -> tuple[str, ...]:
        return tuple(receptacle for receptacle, _ in self.counts)


@dataclass(frozen=True, slots=True)
class Style:
    """A sort of small room: how few and how many there are of each receptacle type."""

    furniture: Mapping[str, tuple[int, int]]
    objects: tuple[str, ...]
    kinds: tuple[str, ...]


_STYLES = {
    "kitchen": Style(
        furniture={
            "Fridge": (1, 1),
            "Microwave": (1, 1),
            "SinkBasin": (1, 1),
            "CounterTop": (1, 2),
            "DiningTable": (0, 1),
            "Cabinet": (2, 4),
            "Drawer": (1, 3),
            "GarbageCan": (0, 1),
            "Shelf": (0, 1),
            "StoveBurner": (0, 1),
        },
        objects=(
            *("Apple", "Bowl", "Bread", "Cup", "Egg", "Fork", "Knife", "Lettuce", "Mug"),
            *("Pan", "Plate", "Potato", "SaltShaker", "Spoon", "Tomato"),
        ),
        kinds=(_PLACE, _CLEAN, _HEAT, _COOL, _TWO),
    ),
    "bedroom": Style(
        furniture={
            "Bed": (1, 1),
            "Desk": (1, 1),
            "Drawer": (2, 4),
            "Shelf": (1, 3),
            "SideTable": (1, 2),
            "Dresser": (0, 1),
            "GarbageCan": (1, 1),
            "Safe": (0, 1),
            "ArmChair": (0, 1),
        },
        objects=(
            *("AlarmClock", "Book", "CD", "CellPhone", "CreditCard", "KeyChain"),
            *("Laptop", "Pen", "Pencil", "Pillow", "Vase", "Watch"),
        ),
        kinds=(_LIGHT, _PLACE, _TWO),
    ),
}
_SMALL_RECEPTACLES = (8, 14)
_SMALL_OBJECTS = (9, 11)
#: Room numbers of each style in small rooms; warm-up counts up from its number without end.
_SMALL_NUMBERS = {"train": range(10), "unseen": range(10, 15)}
_WARMUP_FROM = 1000


def rooms_for(size: str, split: str, kind: str, index: int) -> list[Room]:
    """The rooms that task ``index`` of a split may be set in: those of the split that suit the kind. ``seen`` has none of its own."""
    if size == "small":
        names = [name for name, style in _STYLES.items() if kind in style.kinds]
        numbers = _SMALL_NUMBERS.get(split, range(_WARMUP_FROM + index, _WARMUP_FROM + index + 1))
        return [small_room(name, number) for name in names for number in numbers]
    plans = [room for room in _floor_plans() if kind in room.kinds]
    if split == "warmup":
        return [_varied(room, _WARMUP_FROM + index) for room in plans]
    return [room for room in plans if _is_unseen(room) == (split == "unseen")]


@lru_cache(maxsize=4096)
def small_room(style_name: str, number: int) -> Room:
    """A small room: 8-14 receptacles, 9-11 objects."""
    style = _STYLES[style_name]
    rng = random.Random(f"room small {style_name} {number}")
    low, high = _SMALL_RECEPTACLES
    while True:
        counts = tuple((receptacle, rng.randint(*limits)) for receptacle, limits in style.furniture.items())
        if low <= sum(count for _, count in counts) <= high:
            present = tuple((receptacle, count) for receptacle, count in counts if count)
            return Room(f"{style_name}{number:02d}", present, style.objects, style.kinds, _SMALL_OBJECTS)


@lru_cache(maxsize=1)
def _floor_plans() -> tuple[Room, ...]:
    text = files("headrace.environments.household").joinpath("floorplans.txt").read_text(encoding="utf-8")
    return tuple(_floor_plan(line) for line in text.splitlines() if line and not line.startswith("#"))


def _floor_plan(line: str) -> Room:
    number, _, rest = line.partition(": ")
    receptacles, _, objects = rest.partition(" | ")
    words = receptacles.split()
    counts = tuple((receptacle, int(count)) for receptacle, count in zip(words[::2], words[1::2], strict=True))
    present = {receptacle for receptacle, _ in counts}
    things = objects.split()
    needs = {_CLEAN: "SinkBasin" in present, _HEAT: "Microwave" in present, _COOL: "Fridge" in present}
    needs[_LIGHT] = bool(LAMPS.intersection(things) and present.intersection(LAMP_PLACES))
    kinds = tuple(kind for kind in KINDS if needs.get(kind, True))
    return Room(f"floorplan{number}", counts, tuple(thing for thing in things if thing not in LAMPS), kinds, shares_places=True)


def _is_unseen(room: Room) -> bool:
    """The first six floor plans of each sort of room are kept for ``unseen``."""
    return 1 <= int(room.name.removeprefix("floorplan")) % 100 <= 6


def _varied(room: Room, number: int) -> Room:
    """A floor plan of its own that resembles a real one: some of its furniture more or less."""
    rng = random.Random(f"room full {room.name} {number}")
    counts = tuple((receptacle, max(1, count + rng.choice((-1, 0, 0, 1))) if count > 1 else count) for receptacle, count in room.counts)
    return Room(f"{room.name}v{number}", counts, room.objects, room.kinds, shares_places=True)
