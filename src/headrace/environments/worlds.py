"""The table of worlds: a name and its options -> tasks and environments.

A world of the user's own (``file.py:name`` in a configuration) is anything callable with its options as keyword
arguments that returns a ``World``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from headrace.environments.base import Environment, Task
from headrace.environments.math_options import MathOptions

Exchange = tuple[str, str]
"""What the agent saw, and what it then did."""


@dataclass(frozen=True, slots=True)
class Answers:
    """How to vote on a world's final answers: ``read(reply)`` is the answer in an attempt's last reply (None: it gives none),
    ``same(one, other)`` whether two are one answer."""

    read: Callable[[str], str | None]
    same: Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class World:
    """``tasks(split, count)`` gives the first ``count`` tasks of a split, always the same; ``environment()`` a fresh environment.

    ``demonstrate(task, seed)``, where a world has it, is one scripted, imperfect attempt for a cold start (see the split
    "warmup"): observations and actions in turn. ``answers``, where attempts end in one, lets an evaluation report maj@k.
    """

    tasks: Callable[[str, int], list[Task]]
    environment: Callable[[], Environment]
    demonstrate: Callable[[Task, int], list[Exchange]] | None = None
    answers: Answers | None = None


@dataclass(frozen=True, slots=True)
class HouseholdOptions:
    """``rooms``: "small" (8-14 receptacles) or "full" (real floor plans); ``horizon``: actions before an attempt is over."""

    rooms: Literal["small", "full"] = "small"
    horizon: int = 50

    def __post_init__(self) -> None:
        if self.rooms not in ("small", "full"):
            raise ValueError(f'environment.options.rooms must be "small" or "full", not {self.rooms!r}')
        _positive("horizon", self.horizon)


@dataclass(frozen=True, slots=True)
class AlfworldOptions:
    horizon: int = 50

    def __post_init__(self) -> None:
        _positive("horizon", self.horizon)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"environment.options.{name} must be a whole number above 0, not {value!r}")


def _household(options: HouseholdOptions) -> World:
    from headrace.environments import household

    def demonstrate(task: Task, seed: int) -> list[Exchange]:
        opening = household.HouseholdEnvironment(horizon=options.horizon).reset_now(task)
        return exchanges(opening, household.demonstration(task, seed, horizon=options.horizon))

    return World(
        tasks=lambda split, count: household.tasks(_split(split, ("train", "seen", "unseen", "warmup")), count, rooms=options.rooms),
        environment=lambda: household.HouseholdEnvironment(horizon=options.horizon),
        demonstrate=demonstrate,
    )


def _math(options: MathOptions) -> World:
    options.environment().close_now()  # refuses at once what this machine cannot run
    return World(options.tasks, options.environment, options.demonstration, Answers(options.read_answer, options.same_answer))


def exchanges(opening: str, attempt: Sequence[tuple[str, str]]) -> list[Exchange]:
    """(action, the world's answer) pairs after an opening -> (what was seen, action) pairs."""
    seen = [opening, *(answer for _, answer in attempt)]
    return [(observation, action) for observation, (action, _) in zip(seen, attempt, strict=False)]


def _alfworld(options: AlfworldOptions) -> World:
    from headrace.environments import alfworld

    return World(
        tasks=lambda split, count: alfworld.tasks(_split(split, ("train", "seen", "unseen")), count),
        environment=lambda: alfworld.AlfworldEnvironment(horizon=options.horizon),
    )


def _split(split: str, known: tuple[str, ...]) -> Any:
    if split not in known:
        raise ValueError(f"unknown split {split!r}; this world has {', '.join(known)}")
    return split


WORLDS: Mapping[str, tuple[type[Any], Callable[[Any], World]]] = {
    "household": (HouseholdOptions, _household),
    "alfworld": (AlfworldOptions, _alfworld),
    "math": (MathOptions, _math),
}


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an unknown built-in world or bad options, without loading the world."""
    _options(name, options)


def make(name: str, options: Mapping[str, Any]) -> World:
    _, build = WORLDS[_known(name)]
    return build(_options(name, options))


def _known(name: str) -> str:
    if name in WORLDS:
        return name
    near = difflib.get_close_matches(name, WORLDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"environment.name: unknown world {name!r} (known: {', '.join(sorted(WORLDS))}, or file.py:name){hint}")


def _options(name: str, options: Mapping[str, Any]) -> Any:
    kind, _ = WORLDS[_known(name)]
    names = [entry.name for entry in fields(kind)]
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"unknown key `environment.options.{key}`{hint} (the {name} world has {', '.join(names)})")
    return kind(**options)
