"""A world small enough to learn within seconds: repeat the colour that you are told, once or several times.

Used through the open door: ``environment.name = "tests/fakes/toy_world.py:toy"``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.worlds import World

COLOURS = ("red", "green", "blue", "white")
TEXTS = [f"say {colour}" for colour in COLOURS] * 8 + ["good", "wrong"] * 8 + [*COLOURS] * 8


class ToyEnvironment:
    """``turns`` right words in a row are a success; a wrong one ends the attempt."""

    system: str | None = None
    tools: Sequence[ToolSpec] = ()

    def __init__(self, turns: int, fail: str, slow: str, seconds: float) -> None:
        self._turns, self._fail, self._slow, self._seconds = turns, fail, slow, seconds

    async def reset(self, task: Task) -> str:
        self._colour, self._done = str(task.payload["colour"]), 0
        if self._fail in ("all", task.id):
            raise ValueError(f"the toy of {task.id} is broken")
        if self._slow == task.id:
            await asyncio.sleep(self._seconds)
        return f"say {self._colour}"

    async def step(self, action: str) -> Step:
        right = action.strip() == self._colour
        self._done += right
        over = not right or self._done == self._turns
        reason = None if not over else "success" if right else "failure"
        return Step("good" if right else "wrong", over, right and over, reason, unmatched=action.strip() not in COLOURS)

    async def close(self) -> None:
        pass


def toy(turns: int = 1, fail: str = "", slow: str = "", seconds: float = 0.0) -> World:
    """``fail``: a task id, or "all", whose reset raises; ``slow``: a task id whose reset takes ``seconds``."""

    def tasks(split: str, count: int) -> list[Task]:
        if split not in ("train", "unseen"):
            raise ValueError("the toy world has the splits train and unseen")
        return [Task(f"{split}-{number}", COLOURS[number % 4], {"colour": COLOURS[number % 4]}) for number in range(count)]

    return World(tasks, lambda: ToyEnvironment(turns, fail, slow, seconds))
