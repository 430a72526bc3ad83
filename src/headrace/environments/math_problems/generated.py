"""Offline sources: the generators here, and reasoning-gym's, as an endless supply cut into splits."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.environments.base import Task
from headrace.environments.math_problems.generators import GENERATORS, LEVELS
from headrace.environments.math_problems.problem import Problem, split_of
from headrace.environments.optional import MissingPackage

_TRIES_PER_PROBLEM = 200

# Sets of reasoning-gym in which one answer is right, so that comparing with it is a fair test.
SINGLE_ANSWER = (
    "basic_arithmetic", "chain_sum", "complex_arithmetic", "count_primes", "decimal_arithmetic", "decimal_chain_sum", "dice",
    "fraction_simplification", "gcd", "gsm_symbolic", "lcm", "leg_counting", "number_sequence", "products", "simple_equations",
    "simple_geometry",
)  # fmt: skip


def generated(kinds: Sequence[str], levels: Sequence[int], split: str, count: int, seed: int) -> list[Task]:
    """The first ``count`` problems of ``split``, taking kinds and levels in turn.

    Splits are disjoint by question. ``ValueError`` where a kind and level has too few different problems.
    """
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"math problems have levels {LEVELS[0]} to {LEVELS[-1]}, not {level}")
    supplies = [(kind, level, _distinct(_draw(kind, level, seed), split)) for level in levels for kind in kinds]
    tasks: list[Task] = []
    while len(tasks) < count:
        for kind, level, supply in supplies[: count - len(tasks)]:
            try:
                tasks.append(next(supply).task(kind))
            except _Exhausted as end:
                raise ValueError(
                    f"{kind} of level {level} has only {end} different problems in split {split!r} within reach; "
                    f"asked for about {-(-count // len(supplies))}: ask for fewer tasks or for more levels"
                ) from None
    return tasks


class _Exhausted(Exception):
    """No new problem turned up for a long time; the argument is how many there were."""


def _draw(kind: str, level: int, seed: int) -> Callable[[int], Problem]:
    return lambda number: GENERATORS[kind](random.Random(f"{kind} {level} {seed} {number}"), level)


def _distinct(draw: Callable[[int], Problem], split: str) -> Iterator[Problem]:
    """Problems number 0, 1, 2, ... without repetitions and those of other splits."""
    seen: set[str] = set()
    number = last = 0
    while number - last < _TRIES_PER_PROBLEM:
        problem = draw(number)
        number += 1
        if problem.digest not in seen and split_of(problem.digest) == split:
            seen.add(problem.digest)
            last = number
            yield problem
    raise _Exhausted(str(len(seen)))


def reasoning_gym(names: Sequence[str], split: str, count: int, seed: int) -> list[Task]:
    """Problems of the package reasoning-gym (an extra), its sets in turn, at their default difficulty."""
    for name in names:
        if name not in SINGLE_ANSWER:
            known = ", ".join(SINGLE_ANSWER)
            raise ValueError(f"reasoning-gym's {name!r} is not used here: answers are compared with one gold, which is fair for {known}")
    try:
        library = importlib.import_module("reasoning_gym")
    except ImportError:
        raise MissingPackage("The source reasoning-gym needs its package: `pip install 'headrace[reasoning-gym]'`.") from None
    size = -(-count // len(names)) * _TRIES_PER_PROBLEM
    supplies = [_distinct(_from_set(library.create_dataset(name, seed=seed, size=size)), split) for name in names]
    tasks: list[Task] = []
    while len(tasks) < count:
        for name, supply in zip(names, supplies, strict=True):
            if len(tasks) < count:
                try:
                    tasks.append(next(supply).task(f"reasoning-gym/{name}"))
                except (_Exhausted, IndexError):
                    raise ValueError(f"reasoning-gym's {name} has too few different problems for {count} tasks of {split!r}") from None
    return tasks


def _from_set(dataset: Any) -> Callable[[int], Problem]:
    def draw(number: int) -> Problem:
        entry = dataset[number]
        return Problem(entry["question"].strip(), str(entry["answer"]).strip())

    return draw
