"""A person plays in the terminal, with the same text that an agent reads."""

from __future__ import annotations

from collections.abc import Callable

from headrace.environments.base import Task
from headrace.environments.household.environment import HouseholdEnvironment

_HINT = 'Type an action as in "go to fridge 1"; "?" lists what is possible now, "quit" leaves.'


def play(task: Task, *, horizon: int = 50, read: Callable[[str], str] = input, write: Callable[[str], object] = print) -> bool:
    """Plays one task: ``write`` shows text, ``read`` asks for a line after a prompt. True if the task was solved.

    ``?`` lists the admissible commands without costing an action; ``quit``, ``exit`` or the end of input leaves.
    """
    world = HouseholdEnvironment(horizon)
    write(world.reset_now(task))
    write(f"\n{_HINT}")
    left = horizon
    while True:
        try:
            line = read(f"\n[{left} left] > ").strip()
        except EOFError:
            return False
        if line in ("quit", "exit"):
            return False
        if line == "?":
            write("\n".join(world.admissible()))
            continue
        if not line:
            continue
        step = world.step_now(line)
        left -= 1
        write(step.observation)
        if step.done:
            write("\nSolved." if step.success else f"\nNot solved within {horizon} actions.")
            return step.success
