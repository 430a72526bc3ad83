"""A world of your own, in one file: guess a number, told "higher" or "lower" after every guess.

Name it in a configuration as ``examples/own_world.py:world``; ``[environment.options]`` are the arguments of ``world``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.worlds import Exchange, World

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
        return self.reset_now(task)

    async def step(self, action: str) -> Step:
        return self.step_now(action)

    async def close(self) -> None:
        """Nothing is held. A world with a process or a connection ends it here."""

    def reset_now(self, task: Task) -> str:
        self._secret: int = task.payload["secret"]
        self._left = self._guesses
        return f"I think of a number from 1 to {task.payload['most']}."

    def step_now(self, action: str) -> Step:
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


def demonstrate(task: Task, seed: int, guesses: int) -> list[Exchange]:
    """One imperfect attempt for a cold start, as (what was seen, what was then said) pairs: bisection that is now and then off."""
    source, game = random.Random(f"{task.id} {seed}"), GuessTheNumber(guesses)
    seen, low, high = game.reset_now(task), 1, task.payload["most"]
    exchanges: list[Exchange] = []
    while True:
        guess = source.randint(low, high) if source.random() < 0.2 else (low + high) // 2
        exchanges.append((seen, str(guess)))
        step = game.step_now(str(guess))
        if step.done:
            return exchanges
        low, high = (guess + 1, high) if step.observation == "Higher." else (low, guess - 1)
        seen = step.observation


def world(most: int = 100, guesses: int = 7) -> World:
    """The world for these options: its tasks, and a fresh environment for every episode."""
    if most < 6 or guesses < 1:
        raise ValueError(f"most must be at least 6 and guesses at least 1, not {most} and {guesses}")
    return World(
        tasks=lambda split, count: tasks(split, count, most),
        environment=lambda: GuessTheNumber(guesses),
        demonstrate=lambda task, seed: demonstrate(task, seed, guesses),
    )
