"""A person solves a problem in the terminal, with the tool and the verifier that an agent has."""

from __future__ import annotations

from collections.abc import Callable

from headrace.environments.base import Task
from headrace.environments.math_tool import MathToolEnvironment

_HINT = (
    "Type Python to run it (a line that ends in a colon begins a block, which an empty line ends);\n"
    '"= 42" answers 42; "quit" leaves. You have {turns} turns.'
)


def play(
    task: Task,
    *,
    environment: MathToolEnvironment | None = None,
    read: Callable[[str], str] = input,
    write: Callable[[str], object] = print,
) -> bool:
    """Play one problem: ``write`` shows text, ``read`` asks for a line after a prompt. True if the verifier says so.

    A whole reply as an agent would write it (with ``\\boxed{}`` or a ```python block) is taken as it is. ``quit``, ``exit`` or
    the end of input leaves.
    """
    world = environment or MathToolEnvironment()
    try:
        write(world.reset_now(task))
        write("\n" + _HINT.replace("{turns}", str(world.max_turns)))
        while True:
            action = _action(read)
            if action is None:
                return False
            if not action.strip():
                continue
            step = world.step_now(action)
            if step.observation:
                write(step.observation)
            if step.done:
                write(_ending(step.success, step.reason, str(task.payload["answer"])))
                return step.success
    finally:
        world.close_now()


def _ending(success: bool, reason: str | None, gold: str) -> str:
    if success:
        return "\nRight."
    return f"\nNo verdict; the answer is {gold}." if reason == "grader_error" else f"\nNot solved; the answer is {gold}."


def _action(read: Callable[[str], str]) -> str | None:
    """One action in the form that the world reads; ``None`` to leave."""
    try:
        line = read("\n> ")
        if line.strip() in ("quit", "exit"):
            return None
        if line.strip().startswith("="):
            return f"\\boxed{{{line.strip()[1:].strip()}}}"
        lines = [line]
        if "```" in line or line.rstrip().endswith(":"):
            while following := read(". "):
                lines.append(following)
    except EOFError:
        return None
    text = "\n".join(lines)
    if not text.strip() or "```" in text or "\\boxed" in text:
        return text
    return f"```python\n{text}\n```"
