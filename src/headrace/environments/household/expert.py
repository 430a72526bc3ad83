"""A scripted expert that knows where everything is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from headrace.environments.base import Task
from headrace.environments.household.layout import Layout, layout_of
from headrace.environments.household.problem import TREATMENTS, atoms_of, kind_of, problem_of
from headrace.environments.household.world import Unmatched, World


@dataclass(frozen=True, slots=True)
class Aim:
    """What a task of the six kinds is about, as entity types (``"mugtype"``); None where the kind has no such thing."""

    kind: str
    object_type: str
    receptacle_type: str | None
    lamp_type: str | None


def aim_of(task: Task) -> Aim:
    """Reads a task's aim from its goal; ValueError for goals outside the six kinds."""
    goal = problem_of(task).goal
    kind = kind_of(goal)
    otypes = {atom[1]: atom[2] for atom in atoms_of(goal) if atom[0] == "objecttype"}
    rtypes = [atom[2] for atom in atoms_of(goal) if atom[0] == "receptacletype"]
    lamps = [atom[1] for atom in atoms_of(goal) if atom[0] == "istoggled"]
    objects = [otype for variable, otype in otypes.items() if variable not in lamps]
    if kind == "other" or not objects or not (rtypes or lamps):
        raise ValueError(f"Task {task.id!r} is not of the six household kinds; the scripted expert knows only those.")
    return Aim(kind, objects[0], rtypes[0] if rtypes else None, otypes.get(lamps[0]) if lamps else None)


def expert(task: Task) -> list[str]:
    """Actions that solve the task, among the scripted plans the shortest; ValueError if none does."""
    plans = sorted(_plans(layout_of(task), aim_of(task)), key=lambda plan: (len(plan), plan))
    for plan in plans:
        if solves(task, plan):
            return plan
    raise ValueError(f"No scripted plan solves task {task.id!r}.")


def solves(task: Task, actions: Sequence[str]) -> bool:
    """Whether the goal holds at some point while the actions are done in turn from the start."""
    world = World(layout_of(task))
    for action in actions:
        try:
            world.act(action)
        except Unmatched:
            continue
        if world.won:
            return True
    return False


def _plans(layout: Layout, aim: Aim) -> Iterator[list[str]]:
    start = World(layout)
    objects = _with_type(layout, "objecttype", aim.object_type)
    if aim.lamp_type is not None:
        for lamp in _with_type(layout, "objecttype", aim.lamp_type):
            for obj in objects:
                yield from _light_plan(start, obj, lamp)
        return
    for receptacle in _with_type(layout, "receptacletype", aim.receptacle_type or ""):
        groups = permutations(objects, 2) if aim.kind == "pick_two_obj_and_place" else ((obj,) for obj in objects)
        for group in groups:
            yield from _place_plan(start, group, receptacle, aim.kind)


def _with_type(layout: Layout, predicate: str, type_name: str) -> list[str]:
    return sorted(fact[1] for fact in layout.initial if fact[0] == predicate and fact[2] == type_name)


class _Plan:
    """Actions so far, with what they have opened and where they have led."""

    def __init__(self, start: World) -> None:
        self.world = start
        self.layout = start.layout
        self.actions: list[str] = []
        self.place: str | None = start.at[start.layout.agents[0]]
        self.opened = set(start.opened)

    def go(self, receptacle: str) -> bool:
        place = self.layout.location_of.get(receptacle)
        if place is None:
            return False
        if place != self.place:
            self.actions.append(f"go to {self.layout.name_of[receptacle]}")
            self.place = place
        return True

    def open(self, receptacle: str) -> None:
        if receptacle in self.layout.openable and receptacle not in self.opened:
            self.actions.append(f"open {self.layout.name_of[receptacle]}")
            self.opened.add(receptacle)

    def fetch(self, obj: str) -> bool:
        holder = next((r for r in self.layout.receptacles if obj in self.world.inside.get(r, ())), None)
        if holder is None or not self.go(holder):
            return False
        self.open(holder)
        self.actions.append(f"take {self.layout.name_of[obj]} from {self.layout.name_of[holder]}")
        return True

    def put(self, obj: str, receptacle: str) -> bool:
        if not self.go(receptacle):
            return False
        self.open(receptacle)
        self.actions.append(f"move {self.layout.name_of[obj]} to {self.layout.name_of[receptacle]}")
        return True


def _light_plan(start: World, obj: str, lamp: str) -> Iterator[list[str]]:
    plan = _Plan(start)
    stand = next((r for r in start.layout.receptacles if lamp in start.inside.get(r, ())), None)
    if stand is not None and plan.fetch(obj) and plan.go(stand):
        yield [*plan.actions, f"use {start.layout.name_of[lamp]}"]


def _place_plan(start: World, group: tuple[str, ...], receptacle: str, kind: str) -> Iterator[list[str]]:
    treatment = TREATMENTS.get(kind)
    appliances = start.layout.appliances(treatment.verb) if treatment else frozenset()
    for appliance in sorted(appliances) if treatment else [None]:
        plan = _Plan(start)
        done = True
        for obj in group:
            if len(group) > 1 and obj in start.inside.get(receptacle, ()):
                continue
            done = done and plan.fetch(obj)
            if done and treatment and appliance is not None:
                done = plan.go(appliance)
                plan.actions.append(f"{treatment.verb} {start.layout.name_of[obj]} with {start.layout.name_of[appliance]}")
            done = done and plan.put(obj, receptacle)
        if done:
            yield plan.actions
