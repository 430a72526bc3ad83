"""A world of your own, in one file: guess a number, told "higher" or "lower" after every guess.

Name it in a configuration as ``examples/own_world.py:world``; ``[environment.options]`` are the arguments of ``world``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.worlds import World

SPLITS = {"train": (0, 1, 2, 3), "warmup": (4,), "test": (5,)}  # which secrets belong to a split, by their remainder modulo 6


def tasks(split: str, count: int, most: int) -> list[Task]:
    """The first ``count`` tasks of a split (fewer if it has fewer). An id names its task in every run, and no other."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; this world has {', '.join(SPLITS)}")
    secrets = [secret for secret in range(1, most + 1) if secret % 6 in SPLITS[split]]
    return [Task(f"guess-{most}/{secret}", "guess", {"secret": secret, "most": most}) for secret in secrets[:count]]


class GuessTheNumber:
    """One game at a time. It says what it is told and nothing of rewards: ``success`` is its own goal test."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, guesses: int) -> None:
        self.system: str | None = f"Find the number. You have {guesses} guesses; each reply is one number."
        self._guesses = guesses

    async def reset(self, task: Task) -> str:
        self._secret: int = task.payload["secret"]
        self._left = self._guesses
        return f"I think of a number from 1 to {task.payload['most']}."

    async def step(self, action: str) -> Step:
        self._left -= 1  # every reply costs a guess, so that an episode always ends
        numbers = re.findall(r"\d{1,9}", action)
        guess = int(numbers[-1]) if numbers else None
        if guess == self._secret:
            return Step("That is it.", done=True, success=True, reason="success")
        if self._left == 0:
            return Step("No more guesses.", done=True, success=False, reason="horizon", unmatched=guess is None)
        if guess is None:
            return Step("That is no number.", done=False, success=False, reason=None, unmatched=True)
        return Step("Higher." if guess < self._secret else "Lower.", done=False, success=False, reason=None)

    async def close(self) -> None:
        """Nothing is held. A world with a process or a connection ends it here."""


def world(most: int = 100, guesses: int = 7) -> World:
    """The world for these options: its tasks, and a fresh environment for every episode."""
    if most < 6 or guesses < 1:
        raise ValueError(f"most must be at least 6 and guesses at least 1, not {most} and {guesses}")
    return World(tasks=lambda split, count: tasks(split, count, most), environment=lambda: GuessTheNumber(guesses))
