"""Imperfect scripted demonstrations: an explorer that knows only what it has read.

It knows the task (which type of object, where to) and the receptacles of the opening sentence, searches them one after another,
remembers what it saw, and now and then does something useless or impossible. What it writes is what a policy that reads the same
text can learn to write.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from headrace.environments.base import Task
from headrace.environments.household.catalogue import MAY_HOLD
from headrace.environments.household.environment import HouseholdEnvironment
from headrace.environments.household.expert import Aim, aim_of
from headrace.environments.household.problem import TREATMENTS

Order = Literal["sensible", "random"]
_HOLDS = {receptacle.lower(): frozenset(obj.lower() for obj in objects) for receptacle, objects in MAY_HOLD.items()}
_SEEN = re.compile(r"you see (.*?)\.")
_ITEM = re.compile(r"\ba ([a-z]+ \d+)")


def demonstration(task: Task, seed: int, *, order: Order = "sensible", slip: float = 0.05, horizon: int = 30) -> list[tuple[str, str]]:
    """One attempt of the explorer as (action, the world's answer to it) pairs, at most ``horizon`` of them.

    ``order``: ``"sensible"`` looks first where such an object may lie, ``"random"`` anywhere. ``slip`` is the probability of a
    useless or impossible action at each turn. The same arguments give the same attempt; it may fail, which ``solves`` tells.
    ValueError for a task outside the six kinds.
    """
    if not 0 <= slip < 1:
        raise ValueError(f"slip is {slip}; it is a probability below 1.")
    world = HouseholdEnvironment(horizon)
    rng = random.Random(f"demonstration {task.id} {seed}")
    explorer = Explorer(aim_of(task), world.reset_now(task), rng, order)
    turns: list[tuple[str, str]] = []
    while True:
        action = explorer.slip() if rng.random() < slip else explorer.act()
        step = world.step_now(action)
        turns.append((action, step.observation))
        if step.done:
            return turns
        explorer.read(action, step.observation)


class Explorer:
    """Chooses the next action from what has been read so far."""

    def __init__(self, aim: Aim, opening: str, rng: random.Random, order: Order = "sensible") -> None:
        self._aim = aim
        self._rng = rng
        self._object = _base_of_type(aim.object_type)
        self._target = _base_of_type(aim.receptacle_type) if aim.receptacle_type else None
        self._lamp = _base_of_type(aim.lamp_type) if aim.lamp_type else None
        self._receptacles = _items(opening)
        self._order = order
        self._unsearched = self._search_order()
        self._contents: dict[str, list[str]] = {}
        self._closed: set[str] = set()
        self._at: str | None = None
        self._holding: str | None = None
        self._treated = False
        self._placed: list[str] = []
        self._goal_place: str | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, action: str, observation: str) -> None:
        """Takes in the world's answer to an action."""
        if action.startswith("go to ") and (observation.startswith("You arrive at ") or action.removeprefix("go to ") in self._receptacles):
            # "Nothing happens." on the way to a known receptacle: it is in reach from where we stand.
            self._at = action.removeprefix("go to ")
        elif observation.startswith("You pick up the "):
            self._holding, source = action.removeprefix("take ").split(" from ")
            self._contents[source] = [name for name in self._contents.get(source, []) if name != self._holding]
            self._treated = False
        elif observation.startswith("You move the "):
            moved, place = action.removeprefix("move ").split(" to ")
            self._contents.setdefault(place, []).append(moved)
            self._placed.append(moved)
            self._goal_place = place
            self._holding = None
        elif observation.startswith(("You clean the ", "You heat the ", "You cool the ")):
            self._treated = True
        self._look(observation)

    def _look(self, observation: str) -> None:
        if self._at is None or "facing" in observation:
            return
        if "is closed" in observation or observation.startswith("You close"):
            self._closed.add(self._at)
        elif "you see" in observation and (f"the {self._at}, you see" in observation or "In it, you see" in observation):
            self._closed.discard(self._at)
            self._contents[self._at] = _items(observation)
            if self._at in self._unsearched:
                self._unsearched.remove(self._at)

    # -- acting --------------------------------------------------------------------------------------------------------

    def act(self) -> str:
        """The next step towards the goal, as far as it is known."""
        if self._holding is None:
            return self._fetch()
        if self._lamp is not None:
            return self._light()
        treatment = TREATMENTS.get(self._aim.kind)
        if treatment and not self._treated:
            place = self._nearest(treatment.appliance.lower())
            return f"{treatment.verb} {self._holding} with {place}" if self._at == place else f"go to {place}"
        return self._place()

    def _fetch(self) -> str:
        for receptacle, contents in self._contents.items():
            wanted = [name for name in contents if _base(name) == self._object and name not in self._placed]
            if (
                wanted
                and receptacle != self._goal_place
                and (self._aim.kind != "pick_two_obj_and_place" or _base(receptacle) != self._target)
            ):
                return self._at_open(receptacle, f"take {wanted[0]} from {receptacle}")
        return self._search()

    def _light(self) -> str:
        for receptacle, contents in self._contents.items():
            for name in contents:
                if _base(name) == self._lamp:
                    return f"use {name}" if self._at == receptacle else f"go to {receptacle}"
        return self._search()

    def _place(self) -> str:
        place = self._goal_place or self._nearest(self._target or "")
        return self._at_open(place, f"move {self._holding} to {place}")

    def _at_open(self, receptacle: str, action: str) -> str:
        if self._at != receptacle:
            return f"go to {receptacle}"
        return f"open {receptacle}" if receptacle in self._closed else action

    def _search(self) -> str:
        if self._at in self._closed and self._at in self._unsearched:
            return f"open {self._at}"
        if not self._unsearched:
            self._unsearched = [name for name in self._search_order() if name != self._at]
        if not self._unsearched:
            return "look"
        return f"examine {self._at}" if self._unsearched[0] == self._at else f"go to {self._unsearched[0]}"

    def _nearest(self, base: str) -> str:
        """Where we stand if it is of the type, else the first of its kind that we know of."""
        if self._at is not None and _base(self._at) == base:
            return self._at
        return next((name for name in reversed(self._receptacles) if _base(name) == base), f"{base} 1")

    def _search_order(self) -> list[str]:
        names = list(self._receptacles)
        self._rng.shuffle(names)
        if self._order == "sensible":
            names.sort(key=lambda name: self._object not in _HOLDS.get(_base(name), frozenset()))
        return names

    def slip(self) -> str:
        """Something useless or impossible, as a distracted agent would write it."""
        place = self._rng.choice(self._receptacles)
        choices: Sequence[str] = ("look", "inventory", f"examine {self._at or place}", f"go to {place}", f"open {place}")
        if self._holding is None:
            choices = (*choices, f"take {self._object} 1 from {self._at or place}")
        return self._rng.choice(choices)


def _items(observation: str) -> list[str]:
    """The numbered things that a sentence lists after "you see"."""
    found = _SEEN.search(observation)
    return _ITEM.findall(found.group(1)) if found else []


def _base(name: str) -> str:
    return name.rsplit(" ", 1)[0]


def _base_of_type(type_name: str) -> str:
    return type_name.removesuffix("type")
