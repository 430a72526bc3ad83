"""What a world is: a task goes in, text comes out, text is answered with text.

Worlds import no torch and know nothing of tokens, policies or rewards other than their own goal test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Task:
    """A repeatable problem.

    ``id`` is stable: the same task has the same id in every run, so that a prompt value can follow it.
    ``kind`` groups tasks in reports. ``payload`` is plain JSON-able data that only the world itself reads.
    """

    id: str
    kind: str
    payload: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Step:
    """The world's answer to one action.

    ``success`` is the world's own goal test and nothing else; ``reason`` says why the episode is over (``None`` while it
    goes on). ``outcome`` in [0, 1] replaces ``float(success)`` where a world grades in degrees; NaN means unscored.
    ``unmatched`` marks an action that the world's grammar did not recognise: it changes nothing and is counted.
    """

    observation: str
    done: bool
    success: bool
    reason: str | None
    outcome: float | None = None
    unmatched: bool = False


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool in JSON-schema form, rendered by the chat template where it has a place for tools."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)


@runtime_checkable
class Environment(Protocol):
    """One episode at a time: ``reset``, then ``step`` until ``done``. An instance may be reset again for another task.

    ``system`` and ``tools`` go through the chat template; a world that derives from this class has neither unless it says so.
    """

    system: str | None = None
    tools: Sequence[ToolSpec] = ()

    async def reset(self, task: Task) -> str: ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None: ...
