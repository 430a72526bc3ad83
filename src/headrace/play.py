"""A person plays a task: the quickest way to understand a world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.config import toml_value
from headrace.environments import worlds
from headrace.environments.base import Environment, Task
from headrace.environments.worlds import World
from headrace.errors import UserError
from headrace.open_doors import is_reference, load_object

Read = Callable[[str], str]
Write = Callable[[str], object]


def play(world: str, *, split: str, number: int, options: Sequence[str], read: Read = input, write: Write = print) -> bool:
    """Play task ``number`` of ``split``; ``options`` are NAME=VALUE of the world. True if it was solved."""
    chosen = _options(options)
    try:
        built = load_object(world, "world")(**chosen) if is_reference(world) else worlds.make(world, chosen)
        tasks = built.tasks(split, number + 1)
    except (ValueError, TypeError) as error:
        raise UserError(f"play {world}: {error}") from None
    if len(tasks) <= number:
        raise UserError(f"play {world}: split {split!r} has {len(tasks)} tasks, so --task goes up to {len(tasks) - 1}")
    try:
        return _play(world, built, tasks[number], chosen, read, write)
    except (ImportError, RuntimeError) as error:  # what a world needs and this installation lacks
        raise UserError(f"play {world}: {error}") from error


def _play(world: str, built: World, task: Task, chosen: dict[str, object], read: Read, write: Write) -> bool:
    if world == "household":
        from headrace.environments.household.play import play as play_household

        return play_household(task, horizon=int(str(chosen.get("horizon", 50))), read=read, write=write)
    if world == "math":
        from headrace.environments.math_play import play as play_math
        from headrace.environments.math_tool import MathToolEnvironment

        environment = built.environment()
        assert isinstance(environment, MathToolEnvironment)
        return play_math(task, environment=environment, read=read, write=write)
    return asyncio.run(play_any(built.environment(), task, read, write))


async def play_any(environment: Environment, task: Task, read: Read, write: Write) -> bool:
    """Any world: observations are shown, lines are actions; an empty line ends one of several lines, ``quit`` leaves."""
    try:
        if environment.system:
            write(environment.system + "\n")
        write(await environment.reset(task))
        while True:
            action = _action(read)
            if action is None:
                return False
            step = await environment.step(action)
            write(step.observation)
            if step.done:
                write(f"\n{'Solved.' if step.success else 'Not solved.'} ({step.reason})")
                return step.success
    finally:
        await environment.close()


def _action(read: Read) -> str | None:
    """One action: a line, or several up to an empty one where the first opens a code block; None to leave."""
    try:
        lines = [read("\n> ")]
        if lines[0].strip() in ("quit", "exit"):
            return None
        if "```" in lines[0] or "<tool_call>" in lines[0]:
            while line := read(". "):
                lines.append(line)
    except EOFError:
        return None
    return "\n".join(lines)


def _options(options: Sequence[str]) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise UserError(f"--set {option}: write it as name=value")
        chosen[name.strip()] = toml_value(value.strip())
    return chosen
