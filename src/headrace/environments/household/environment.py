"""The household world behind the environment protocol, and the same thing without asyncio."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.household.layout import layout_of
from headrace.environments.household.world import NOTHING_HAPPENS, Unmatched, World


class HouseholdEnvironment:
    """One episode at a time of at most ``horizon`` actions; whatever the agent says counts as one.

    Success is the world's goal test after an action, on the last one too. Running out of actions is ``done`` without success,
    reason ``"horizon"``. ``reset_now`` and ``step_now`` are the same without asyncio.
    """

    system: str | None = None
    tools: Sequence[ToolSpec] = ()

    def __init__(self, horizon: int = 50) -> None:
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}; an episode needs at least one action.")
        self.horizon = horizon
        self._world: World | None = None
        self._taken = 0
        self._done = False

    async def reset(self, task: Task) -> str:
        return self.reset_now(task)

    async def step(self, action: str) -> Step:
        return self.step_now(action)

    async def close(self) -> None:
        self._world = None

    def reset_now(self, task: Task) -> str:
        """Starts an episode and returns the opening: the room's receptacles and the task."""
        self._world = World(layout_of(task))
        self._taken = 0
        self._done = False
        return self._world.opening()

    def step_now(self, action: str) -> Step:
        world = self._world
        if world is None:
            raise RuntimeError("The household environment has no episode: call reset with a task before step.")
        if self._done:
            raise RuntimeError("This episode is over: call reset with a task before the next step.")
        unmatched = False
        try:
            answer = world.act(action)
        except Unmatched:
            answer, unmatched = None, True
        self._taken += 1
        reason = "success" if world.won else "horizon" if self._taken >= self.horizon else None
        self._done = reason is not None
        return Step(NOTHING_HAPPENS if answer is None else answer, self._done, world.won, reason, None, unmatched)

    def admissible(self) -> list[str]:
        """Every command that would do something after the latest observation, sorted."""
        if self._world is None:
            raise RuntimeError("The household environment has no episode: call reset with a task before admissible.")
        return self._world.admissible()
