"""Who is sent out, who is waited for, and what frees a place.

    fill ──dispatch──► attempt (one asyncio task each) ──► receipt ──► waiting ──► next_batch
      ▲                     │ error, deadline: Drop                      │ too stale: Drop
      └──── a place is free ┴────────────────────────────────────────────┘

Every attempt ends (its waits have deadlines), every end frees its prompt and calls ``fill``, and the number of attempts
out or waiting is bounded, so neither a slow prompt nor a slow learner can make work pile up. The scheduler draws
everything it needs to know from callables: it knows neither the mathematics nor the store.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.environments.base import Task
from headrace.rollout.trajectory import Dispatch, Drop, Event, Failure, Receipt, Trajectory

Attempt = Callable[[Dispatch, Task], Awaitable[Trajectory | Failure]]
ChooseTasks = Callable[[int, Collection[str]], Sequence[str]]
"""(count, task ids in flight) -> up to ``count`` ids that are free."""
FreezeValue = Callable[[str, int], tuple[float, float] | None]
"""(task id, version) -> the prompt value's (alpha, beta) at this dispatch, None without a memory."""
Log = Callable[[Event, Trajectory | None], None]


class RolloutStopped(RuntimeError):
    """Attempts fail one after another, or none can be sent: the run cannot go on. The message carries the last culprit."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """``group_size`` 1 sends single attempts; above, that many siblings leave together and are waited for together."""

    batch_size: int
    concurrency: int
    group_size: int = 1
    max_staleness: int = 1
    requests_per_prompt: int = 1
    batches_per_version: int = 1
    publication: Literal["drain", "abort", "continue"] = "drain"
    max_consecutive_failures: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size % self.group_size:
            raise ValueError(f"rollout.batch_size ({self.batch_size}) must be a multiple of the group size ({self.group_size})")
        if self.concurrency < self.group_size:
            raise ValueError(f"rollout.concurrency ({self.concurrency}) must be at least the group size ({self.group_size})")

    def most_unconsumed(self, batches_taken: int) -> int:
        """How many attempts may be out or waiting when ``batches_taken`` batches were taken since the last publication.

        What leaves now is usable until ``max_staleness`` more versions are out; that is so many batches from here, and
        with more attempts than those batches hold, the last in the queue would be too stale when their turn came.
        """
        return self.batch_size * max(0, self.batches_per_version * (self.max_staleness + 1) - batches_taken)


@dataclass
class _Group:
    """Siblings of one prompt; a single attempt is a group of one."""

    task: str
    size: int
    members: list[Trajectory]
    ended: int = 0

    @property
    def complete(self) -> bool:
        return self.ended == self.size


class Scheduler:
    def __init__(
        self,
        settings: SchedulerSettings,
        tasks: Mapping[str, Task],
        *,
        attempt: Attempt,
        choose_tasks: ChooseTasks,
        freeze_value: FreezeValue,
        log: Log,
        version: int = 0,
        next_dispatch: int = 0,
        batches_taken: int = 0,
    ) -> None:
        """``batches_taken``: since the last publication, where a run goes on between two of them."""
        self.settings = settings
        self.version = version
        self._tasks = tasks
        self._attempt = attempt
        self._choose_tasks = choose_tasks
        self._freeze_value = freeze_value
        self._log = log
        self._next_dispatch = next_dispatch
        self._running: dict[int, tuple[Dispatch, asyncio.Task[None]]] = {}
        self._groups: dict[int, _Group] = {}
        self._ready: list[list[Trajectory]] = []
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._consecutive_failures = 0
        self._dispatching = False
        self._batches_taken = batches_taken
        self._aborting: set[int] = set()

    # --- what the loop calls ---

    async def next_batch(self) -> list[Trajectory]:
        """The first ``batch_size`` usable attempts (or complete groups) in receipt order. Returns as soon as they are there."""
        wanted = self.settings.batch_size // self.settings.group_size
        self._dispatching = True
        while True:
            self._drop_stale()
            if self._failure is not None:
                raise self._failure
            if len(self._ready) >= wanted:
                batch, self._ready = self._ready[:wanted], self._ready[wanted:]
                self._batches_taken += 1
                self._fill()
                return [trajectory for group in batch for trajectory in group]
            self._fill()
            if not self._running:
                raise RolloutStopped(
                    f"no attempt is out and none can be sent: {len(self._tasks)} tasks, {len(self._ready)} of {wanted} results waiting"
                )
            self._changed.clear()
            await self._changed.wait()

    def publish(self, version: int) -> None:
        """From here on attempts leave under ``version``; what happens to those under way is ``settings.publication``'s word."""
        self.version = version
        self._batches_taken = 0
        self._dispatching = True
        if self.settings.publication == "abort":
            for number, (dispatch, task) in list(self._running.items()):
                if dispatch.version < version:
                    self._aborting.add(number)
                    task.cancel()
        self._drop_stale()
        self._fill()

    async def drain(self) -> None:
        """Send nothing more and wait until every attempt under way has ended (an engine with one weight slot needs this)."""
        self._dispatching = False
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Cancel what is under way; its dispatches stay in flight in the log, so that a resumed run sends them again."""
        self._dispatching = False
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def restore(self, in_flight: Sequence[Dispatch], waiting: Sequence[Trajectory]) -> None:
        """Take up a stopped run: ``waiting`` outcomes are usable at once, ``in_flight`` dispatches leave again from reset
        under the same number and frozen value, and are not logged a second time."""
        for dispatch in in_flight:
            self._group_of(dispatch).size += 1
        for trajectory in waiting:
            group = self._group_of(trajectory.dispatch)
            group.size += 1
            group.ended += 1
            group.members.append(trajectory)
        for key, group in list(self._groups.items()):
            if group.complete:
                self._ready.append(group.members)
                del self._groups[key]
        for dispatch in in_flight:
            self._start(dispatch)

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(len(group) for group in self._ready)

    # --- sending ---

    def _fill(self) -> None:
        size = self.settings.group_size
        while self._dispatching and self._failure is None:
            out = len(self._running)
            unconsumed = out + self.waiting + sum(len(group.members) for group in self._groups.values())
            allowed = self.settings.most_unconsumed(self._batches_taken)
            places = min(self.settings.concurrency - out, allowed - unconsumed) // size
            if places <= 0:
                return
            chosen = self._choose_tasks(places, self._busy())
            if not chosen:
                return
            for task_id in chosen:
                self._dispatch(task_id)

    def _busy(self) -> set[str]:
        """Prompts that have all the requests in flight that they may have."""
        out = Counter(group.task for group in self._groups.values())
        return {task for task, count in out.items() if count >= self.settings.requests_per_prompt}

    def _dispatch(self, task_id: str) -> None:
        task = self._tasks[task_id]
        value = self._freeze_value(task_id, self.version)
        alpha, beta = value if value is not None else (None, None)
        first = self._next_dispatch
        group = first if self.settings.group_size > 1 else None
        self._groups[first] = _Group(task_id, self.settings.group_size, [])
        for number in range(first, first + self.settings.group_size):
            dispatch = Dispatch(number, task_id, task.kind, self.version, alpha, beta, group, episode_seed(self.settings.seed, number))
            self._log(dispatch, None)
            self._start(dispatch)
        self._next_dispatch = first + self.settings.group_size

    def _start(self, dispatch: Dispatch) -> None:
        work = asyncio.get_running_loop().create_task(self._follow(dispatch), name=f"attempt {dispatch.number} at {dispatch.task}")
        self._running[dispatch.number] = (dispatch, work)

    def _group_of(self, dispatch: Dispatch) -> _Group:
        key = dispatch.number if dispatch.group is None else dispatch.group
        return self._groups.setdefault(key, _Group(dispatch.task, 0, []))

    # --- receiving ---

    async def _follow(self, dispatch: Dispatch) -> None:
        result: Trajectory | Failure
        try:
            result = await self._attempt(dispatch, self._tasks[dispatch.task])
        except asyncio.CancelledError:
            if dispatch.number not in self._aborting:
                self._running.pop(dispatch.number, None)
                self._changed.set()
                raise
            result = Failure(dispatch, "aborted", f"version {self.version} was published")
        except BaseException as error:  # whatever it is, an attempt that has ended must not count as one under way
            self._running.pop(dispatch.number, None)
            self._fail(error)
            return
        self._aborting.discard(dispatch.number)
        self._receive(result)

    def _receive(self, result: Trajectory | Failure) -> None:
        dispatch = result.dispatch
        del self._running[dispatch.number]
        key = dispatch.number if dispatch.group is None else dispatch.group
        group = self._groups[key]
        group.ended += 1
        try:
            failure = result if isinstance(result, Failure) else _without_outcome(result)
            if failure is not None:
                self._drop(dispatch, failure.reason, failure.detail)
                self._count_failure(failure)
            elif isinstance(result, Trajectory):
                self._consecutive_failures = 0
                self._log(receipt_of(result), result)
                group.members.append(result)
            if group.complete:
                del self._groups[key]
                if group.members:
                    self._ready.append(group.members)
                    self._drop_stale()
            self._fill()
        except Exception as error:
            self._fail(error)
        self._changed.set()

    def _drop_stale(self) -> None:
        """Groups are kept or dropped whole; siblings share a version."""
        oldest = self.version - self.settings.max_staleness
        fresh = []
        for group in self._ready:
            if group[0].dispatch.version >= oldest:
                fresh.append(group)
                continue
            for trajectory in group:
                self._drop(trajectory.dispatch, "stale", f"version {trajectory.dispatch.version} at version {self.version}")
        self._ready = fresh

    def _drop(self, dispatch: Dispatch, reason: str, detail: str) -> None:
        self._log(Drop(dispatch.number, reason, detail), None)

    def _count_failure(self, failure: Failure) -> None:
        if failure.reason == "aborted":
            return
        self._consecutive_failures += 1
        if self._consecutive_failures >= self.settings.max_consecutive_failures:
            self._fail(
                RolloutStopped(
                    f"{self._consecutive_failures} attempts failed one after another; the last was attempt {failure.dispatch.number} "
                    f"at task {failure.dispatch.task} ({failure.reason}): {failure.detail}"
                )
            )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()


def _without_outcome(trajectory: Trajectory) -> Failure | None:
    """Attempts without a score or without a sampled token never become an outcome; where all are like that, nothing can be learned."""
    if not trajectory.scored:
        return Failure(trajectory.dispatch, "unscored", f"the world gave no score ({trajectory.reason})")
    if trajectory.action_tokens == 0:
        detail = f"it ended ({trajectory.reason}) before the policy sampled a token"
        if trajectory.reason == "context":
            detail += "; the first prompt and a whole reply do not fit the context limit (rollout.context_limit, rollout.reply_tokens)"
        return Failure(trajectory.dispatch, "no_action_tokens", detail)
    return None


def receipt_of(trajectory: Trajectory) -> Receipt:
    return Receipt(trajectory.dispatch.number, trajectory.outcome, trajectory.success, trajectory.action_tokens, trajectory.reason)


def episode_seed(seed: int, dispatch: int) -> int:
    """A 63-bit episode seed from the run's seed and the dispatch number (SplitMix64 finaliser), the same on every machine."""
    mixed = (seed * 0x9E3779B97F4A7C15 + dispatch * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
