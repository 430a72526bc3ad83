"""Many attempts at given tasks under one snapshot, outside any training: for evaluation, offline values and probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b

from headrace.environments.base import Environment, Task
from headrace.rollout.agent_loop import EpisodeSettings, run_attempt
from headrace.rollout.chat import ChatCodec
from headrace.rollout.engine import Engine
from headrace.rollout.trajectory import Dispatch, Failure, Trajectory

FIRST_NUMBER = 1 << 40
"""Attempts outside training are numbered from here, so that they never meet a training dispatch in an engine."""


def attempt_seed(seed: int, task_id: str, attempt: int) -> int:
    """The 63-bit seed of one attempt: the same for the same (seed, task, attempt), whatever else is evaluated."""
    digest = blake2b(f"{seed}:{attempt}:{task_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


async def run_attempts(
    tasks: Sequence[Task],
    attempts: int,
    *,
    engine: Engine,
    codec: ChatCodec,
    make_environment: Callable[[], Environment],
    settings: EpisodeSettings,
    version: int = 0,
    seed: int = 0,
    concurrency: int = 128,
    on_result: Callable[[Trajectory | Failure], None] | None = None,
) -> list[Trajectory | Failure]:
    """``attempts`` attempts at each task, at most ``concurrency`` at once; results in task order, attempt by attempt."""
    work = [(task, attempt) for task in tasks for attempt in range(attempts)]
    results: list[Trajectory | Failure | None] = [None] * len(work)
    queue = iter(enumerate(work))

    async def worker() -> None:
        for index, (task, attempt) in queue:
            dispatch = Dispatch(FIRST_NUMBER + index, task.id, task.kind, version, None, None, None, attempt_seed(seed, task.id, attempt))
            result = await run_attempt(dispatch, task, make_environment, engine, codec, settings)
            results[index] = result
            if on_result is not None:
                on_result(result)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(work))):
                group.create_task(worker())
    except ExceptionGroup as errors:  # one cause, met by several workers at once
        raise errors.exceptions[0] from None
    return [result for result in results if result is not None]
