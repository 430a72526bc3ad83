"""A household problem as plain data: typed entities, initial facts, a goal formula.

This is what a PDDL problem of the ALFRED domain says, without its syntax. Everything is lower case, as the planner behind
the real engine reads it. ``Task.payload`` is this record as JSON-able data, plus the instruction the agent is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from headrace.environments.base import Task

#: A goal: ``("and", f, ...)``, ``("or", f, ...)``, ``("not", f)``, ``("imply", f, g)``, ``("exists", ((variable, type), ...), f)``,
#: ``("forall", ...)``, ``("=", a, b)`` or an atom ``(predicate, argument, ...)``; variables start with ``?``.
Formula: TypeAlias = tuple[Any, ...]
Fact: TypeAlias = tuple[str, ...]

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)


@dataclass(frozen=True, slots=True)
class Treatment:
    """What three of the kinds ask to be done to the object first: the action, the ability it needs, the state it gives, and where."""

    verb: str
    ability: str
    state: str
    appliance: str


TREATMENTS = {
    "pick_clean_then_place_in_recep": Treatment("clean", "cleanable", "isclean", "SinkBasin"),
    "pick_heat_then_place_in_recep": Treatment("heat", "heatable", "ishot", "Microwave"),
    "pick_cool_then_place_in_recep": Treatment("cool", "coolable", "iscool", "Fridge"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Entities as (name, type), facts true at the start, and the goal."""

    entities: tuple[tuple[str, str], ...]
    facts: tuple[Fact, ...]
    goal: Formula

    def payload(self, instruction: str) -> dict[str, Any]:
        """JSON-able form for ``Task.payload``."""
        by_type: dict[str, list[str]] = {}
        for name, type_name in self.entities:
            by_type.setdefault(type_name, []).append(name)
        return {
            "instruction": instruction,
            "entities": by_type,
            "facts": [list(fact) for fact in self.facts],
            "goal": _as_lists(self.goal),
        }


def problem_of(task: Task) -> Problem:
    """The problem inside a task's payload; ValueError if the payload is not one of a household task."""
    payload = task.payload
    try:
        return Problem(
            entities=tuple((name, type_name) for type_name, names in payload["entities"].items() for name in names),
            facts=tuple(tuple(fact) for fact in payload["facts"]),
            goal=_as_tuples(payload["goal"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"Task {task.id!r} is not a household task ({error}): make tasks with tasks() or from_pddl().") from None


def instruction_of(payload: Mapping[str, Any]) -> str:
    """What the agent is told to do, without the engine's final full stop."""
    return str(payload["instruction"])


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def atoms_of(formula: Formula) -> list[Fact]:
    """Every atom of a formula, in order of appearance, with its variables unbound."""
    head = formula[0]
    if head in ("and", "or", "not", "imply"):
        return [atom for part in formula[1:] for atom in atoms_of(part)]
    if head in ("exists", "forall"):
        return atoms_of(formula[2])
    return [formula]


def kind_of(goal: Formula) -> str:
    """The ALFRED name of the task kind that a goal belongs to, or ``"other"``.

    The six kinds differ in what they ask of the object: light needs a toggled lamp, clean, heat and cool a treatment, and two
    objects are two different ones.
    """
    atoms = atoms_of(goal)
    predicates = {atom[0] for atom in atoms}
    if "issliced" in predicates or "inreceptacleobject" in predicates:
        return "other"
    for predicate, kind in (
        ("istoggled", "look_at_obj_in_light"),
        ("isclean", "pick_clean_then_place_in_recep"),
        ("ishot", "pick_heat_then_place_in_recep"),
        ("iscool", "pick_cool_then_place_in_recep"),
        ("=", "pick_two_obj_and_place"),
        ("inreceptacle", "pick_and_place_simple"),
    ):
        if predicate in predicates:
            return kind
    return "other"
