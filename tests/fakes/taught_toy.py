"""The toy world with a demonstrator, so that a policy can be warm-started in it.

``environment.name = "tests/fakes/taught_toy.py:taught"``.
"""

from __future__ import annotations

from fakes.toy_world import COLOURS, ToyEnvironment
from headrace.environments.base import Task
from headrace.environments.worlds import World


def taught(words: str = "", wrong_every: int = 0) -> World:
    """``words`` are added to every answer; every ``wrong_every``-th demonstration names another colour."""

    def tasks(split: str, count: int) -> list[Task]:
        return [
            Task(f"{split}-{number}", COLOURS[number % 4], {"colour": COLOURS[number % 4], "number": number}) for number in range(count)
        ]

    def demonstrate(task: Task, seed: int) -> list[tuple[str, str]]:
        wrong = bool(wrong_every) and (task.payload["number"] + seed) % wrong_every == 0
        colour = COLOURS[(task.payload["number"] + wrong) % 4]
        return [(f"say {task.payload['colour']}", f"{colour}{words}")]

    return World(tasks, lambda: ToyEnvironment(1, "", "", 0.0), demonstrate)
