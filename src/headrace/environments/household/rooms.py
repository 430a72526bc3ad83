"""Rooms: which receptacles there are. A room is drawn from its style and number alone, so it is the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.environments.household.catalogue import Furniture


@dataclass(frozen=True, slots=True)
class Style:
    """A sort of room: its furniture, the limits on how much of it there is, and the objects found there."""

    name: str
    furniture: Furniture
    receptacles: tuple[int, int]
    objects: tuple[str, ...]
    object_count: tuple[int, int]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """A room by name with how many receptacles of each type it has."""

    name: str
    style: Style
    counts: tuple[tuple[str, int], ...]

    def types(self) -> tuple[str, ...]:
        return tuple(receptacle for receptacle, _ in self.counts)


_PLACE, _LIGHT, _CLEAN = "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep"
_HEAT, _COOL, _TWO = "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place"

SMALL = (
    Style(
        name="kitchen",
        furniture={
            "Fridge": (1, 1), "Microwave": (1, 1), "SinkBasin": (1, 1), "CounterTop": (1, 2), "DiningTable": (0, 1),
            "Cabinet": (2, 4), "Drawer": (1, 3), "GarbageCan": (0, 1), "Shelf": (0, 1), "StoveBurner": (0, 1),
        },
        receptacles=(8, 14),
        objects=("Apple", "Bowl", "Bread", "Cup", "Egg", "Fork", "Knife", "Lettuce", "Mug", "Pan", "Plate", "Potato", "SaltShaker", "Spoon",
                 "Tomato"),
        object_count=(9, 11),
        kinds=(_PLACE, _CLEAN, _HEAT, _COOL, _TWO),
    ),
    Style(
        name="bedroom",
        furniture={
            "Bed": (1, 1), "Desk": (1, 1), "Drawer": (2, 4), "Shelf": (1, 3), "SideTable": (1, 2), "Dresser": (0, 1),
            "GarbageCan": (1, 1), "Safe": (0, 1), "ArmChair": (0, 1),
        },
        receptacles=(8, 14),
        objects=("AlarmClock", "Book", "CD", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Pen", "Pencil", "Pillow", "Vase", "Watch"),
        object_count=(9, 11),
        kinds=(_LIGHT, _PLACE, _TWO),
    ),
)  # fmt: skip


def draw_room(style: Style, name: str, seed: str) -> Room:
    """A room of a style whose receptacle count lies within the style's limits."""
    rng = random.Random(f"room {seed}")
    low, high = style.receptacles
    while True:
        counts = tuple((receptacle, rng.randint(*limits)) for receptacle, limits in style.furniture.items())
        if low <= sum(count for _, count in counts) <= high:
            return Room(name, style, tuple((receptacle, count) for receptacle, count in counts if count))
