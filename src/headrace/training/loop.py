"""The whole flow of a run, on one page.

      choose a task,            engine and environment          the first 128
      freeze its value            take turns                    that finish
          │                           │                             │
      ┌───▼────┐   attempts    ┌──────▼──────┐    receipts    ┌─────▼─────┐
      │dispatch├──────────────►│   episode   ├───────────────►│   batch   │
      └───▲────┘               └──────▲──────┘                └─────┬─────┘
          │ a place is free           │ weights                     │ advantage (under the actor's measure)
          │                    ┌──────┴──────┐                ┌─────▼─────┐
          └────────────────────┤   publish   │◄───────────────┤  update   │
                               └─────────────┘   new policy   └───────────┘

Who produces: the scheduler's attempts. Who waits for whom: the loop waits for a batch (``next_batch``), attempts wait for
the engine and their environment. What frees them: every wait of an attempt has a deadline, every end of an attempt sends
the next one, and an update that raises ends the run. In real time the update runs on a thread of its own, so that
attempts go on under the old policy meanwhile; in simulated time it runs at once and its cost is charged to the clock.

Each arrow leaves an event in the log before anything acts on it; ``RunState`` is the fold over that log, so what the loop
knows is what a resumed run will know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.algorithms import Recipe, UncertaintySampler
from headrace.config import Config
from headrace.environments.base import Task
from headrace.errors import RunFailed
from headrace.records.run_store import RunStore
from headrace.rollout import clock
from headrace.rollout.clock import CostModel
from headrace.rollout.engine import Engine
from headrace.rollout.scheduler import Attempt, Scheduler, SchedulerSettings
from headrace.rollout.trajectory import Consumption, Event, Publication, Receipt, Trajectory
from headrace.training import checkpoints
from headrace.training.checkpoints import Checkpoint
from headrace.training.credit import Credit, credit
from headrace.training.drift import DriftMemory
from headrace.training.folds import RunState
from headrace.training.heavy_work import WorkThread
from headrace.training.learner import Learner, UpdateResult
from headrace.training.meters import Meters
from headrace.training.saved_policy import save_policy

Weights = Mapping[str, torch.Tensor]


@dataclass
class Parts:
    """Everything a run is made of; ``headrace.training.assemble`` puts it together from a configuration."""

    config: Config
    recipe: Recipe
    tasks: Mapping[str, Task]
    store: RunStore
    state: RunState
    engine: Engine
    attempt: Attempt
    learner: Learner
    drift: DriftMemory | None
    costs: CostModel
    meters: Meters
    snapshots: dict[int, Weights] = field(default_factory=dict)
    """Weights of the published versions that unfinished attempts may still be pinned to, the newest included."""


class Loop:
    """``await Loop(parts).run()`` trains until ``run.updates`` updates are done, or until ``stop()`` is called."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._stop = asyncio.Event()
        self._heavy = WorkThread("learner")
        self._kept: tuple[int, int] | None = None
        self._values = _ValuesByTask(parts)
        self._sampler = UncertaintySampler(parts.config.seed)
        self._sampler.drawn = parts.state.next_dispatch // parts.recipe.group_size
        self.scheduler = Scheduler(
            scheduler_settings(parts.config, parts.recipe),
            parts.tasks,
            attempt=parts.attempt,
            choose_tasks=self._choose_tasks,
            freeze_value=self._values.freeze,
            log=self._log,
            version=parts.state.version,
            next_dispatch=parts.state.next_dispatch,
            batches_taken=parts.state.next_batch % parts.config.run.publish_every,
        )

    async def run(self, *, on_update: Callable[[int, int], Awaitable[object]] | None = None) -> bool:
        """True when all updates are done, False when ``stop()`` came first. Either way what is left can be resumed."""
        try:
            return await self._run(on_update)
        finally:
            self._heavy.close()

    async def _run(self, on_update: Callable[[int, int], Awaitable[object]] | None) -> bool:
        parts = self.parts
        self._take_up()
        try:
            while parts.state.next_batch < parts.config.run.updates:
                batch = await self._batch_or_stop()
                if batch is None:
                    break
                await self._update(batch)
                if on_update is not None:
                    await on_update(parts.state.next_batch, parts.state.version)
        finally:
            await self.scheduler.close()
        await self.checkpoint()
        return parts.state.next_batch >= parts.config.run.updates

    def stop(self) -> None:
        """End after the update under way; attempts in flight are given up and leave again when the run is resumed."""
        self._stop.set()

    # --- one update ---

    async def _update(self, batch: Sequence[Trajectory]) -> None:
        parts = self.parts
        number, newest = parts.state.next_batch, parts.state.version
        credits = credit(batch, parts.recipe)
        result, drifts = await self._learn(number, batch, credits)
        self._consume(number, batch, credits, drifts)
        if parts.state.next_batch % parts.config.run.publish_every == 0:
            await self._publish(number)
        parts.meters.updated(number, batch, credits, result, parts.state.drops_by_reason, parts.state.version, newest)
        if parts.state.next_batch % parts.config.run.checkpoint_every == 0:
            await self.checkpoint()

    async def _learn(self, number: int, batch: Sequence[Trajectory], credits: Credit) -> tuple[UpdateResult, Sequence[float | None]]:
        parts = self.parts

        def work() -> tuple[UpdateResult, Sequence[float | None]]:
            result = parts.learner.update(number, batch, credits)
            drifts: Sequence[float | None] = [None] * len(batch)
            if parts.drift is not None:
                drifts = parts.drift.after_update(parts.learner.policy, batch)
            return result, drifts

        with parts.meters.time("training"):
            if not clock.is_simulated():
                return await self._heavy.run(work)
            done = work()
            await clock.charge(parts.costs.update + parts.costs.train_token * sum(t.context_tokens for t in batch))
            return done

    async def _publish(self, number: int) -> None:
        parts = self.parts
        with parts.meters.time("publication"):
            if parts.engine.weight_slots == 1:
                await self.scheduler.drain()
            version = parts.state.version + 1
            weights = parts.learner.policy.weights()
            await parts.engine.publish(version, weights)
            self._log(Publication(version, number))
            self._keep_snapshot(version, weights)
            self.scheduler.publish(version)

    async def _batch_or_stop(self) -> list[Trajectory] | None:
        """The next batch, or None as soon as the run is asked to stop."""
        if self._stop.is_set():
            return None
        with self.parts.meters.time("waiting"):
            batch = asyncio.ensure_future(self.scheduler.next_batch())
            stop = asyncio.ensure_future(self._stop.wait())
            try:
                await asyncio.wait((batch, stop), return_when=asyncio.FIRST_COMPLETED)
                return batch.result() if batch.done() else None
            finally:
                batch.cancel()
                stop.cancel()

    # --- the log and what hangs on it ---

    def _log(self, event: Event, trajectory: Trajectory | None = None) -> None:
        store = self.parts.store
        if isinstance(event, Receipt) and trajectory is not None:
            self._apply(event, store.append_receipt(event, trajectory))
        else:
            self._apply(event, store.append(event))

    def _consume(self, number: int, batch: Sequence[Trajectory], credits: Credit, drifts: Sequence[float | None]) -> None:
        """A batch's consumptions enter the log together or not at all."""
        events = [
            Consumption(trajectory.dispatch.number, number, advantage, drift)
            for trajectory, advantage, drift in zip(batch, credits.advantages, drifts, strict=True)
        ]
        first = self.parts.store.append_all(events)
        for offset, event in enumerate(events):
            self._apply(event, first + offset)

    def _apply(self, event: Event, position: int) -> None:
        task = self._task_of(event)
        self.parts.state.apply(event, position)
        if task is not None:
            self._values.refresh(task)

    def _task_of(self, event: Event) -> str | None:
        """The task whose value this event may change; asked before the event is applied."""
        match event:
            case Receipt():
                return self.parts.state.in_flight[event.dispatch].task
            case Consumption():
                return self.parts.state.waiting[event.dispatch].dispatch.task
            case _:
                return None

    def _choose_tasks(self, count: int, in_flight: Collection[str]) -> list[str]:
        return self._sampler.choose(self._values.by_task, count, in_flight)

    def _take_up(self) -> None:
        """Attempts that the log knows: received ones wait, those in flight leave again."""
        parts = self.parts
        unknown = {dispatch.task for dispatch in parts.state.in_flight.values()} - parts.tasks.keys()
        if unknown:
            raise RunFailed(f"the log names tasks that the world no longer has ({min(unknown)}, {len(unknown)} in all): start a new run")
        waiting = [parts.store.trajectory(number) for number in parts.state.waiting]
        order = {group: place for place, group in enumerate(parts.state.completed_groups)}
        if order:
            waiting.sort(key=lambda t: order.get(t.dispatch.group or 0, len(order)))
        self.scheduler.restore(list(parts.state.in_flight.values()), waiting)

    def _keep_snapshot(self, version: int, weights: Weights) -> None:
        parts = self.parts
        parts.snapshots[version] = {name: tensor.detach().clone() for name, tensor in weights.items()}
        for old in parts.snapshots.keys() - self._pinned():
            del parts.snapshots[old]

    def _pinned(self) -> set[int]:
        """The newest version, and those of attempts under way, however slow: they may have to leave again from a checkpoint."""
        state = self.parts.state
        if self.parts.config.rollout.publication == "continue":
            return {state.version}
        return {dispatch.version for dispatch in state.in_flight.values()} | {state.version}

    async def checkpoint(self) -> None:
        """Keep what the run is now, unless the last checkpoint holds just that. Nobody updates before it is written."""
        parts = self.parts
        now = (parts.state.next_batch, parts.state.log_length)
        if now == self._kept:
            return
        with parts.meters.time("checkpoint"):
            pinned = self._pinned()
            point = Checkpoint(
                updates=parts.state.next_batch,
                version=parts.state.version,
                log_position=parts.state.log_length,
                learner=parts.learner.state_dict(copy=False),
                drift=parts.drift.state_dict() if parts.drift is not None else None,
                snapshots={version: weights for version, weights in parts.snapshots.items() if version in pinned},
            )
            if clock.is_simulated():
                self._write(point)
            else:
                await self._heavy.run(lambda: self._write(point))
        self._kept = now

    def _write(self, point: Checkpoint) -> None:
        parts = self.parts
        checkpoints.save(parts.store.folder / "checkpoints", point, keep=parts.config.run.keep_checkpoints)
        save_policy(parts.learner.policy, parts.store.folder, point.updates)


class _ValuesByTask:
    """Today's value of every task, refreshed for a task when an event changed it.

    Between events all evidence of a task fades alike, so its value alpha / (alpha + beta) stands still and the table needs
    no refresh at publications.
    """

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self.by_task = {task: self._read(task) for task in parts.tasks}

    def freeze(self, task: str, version: int) -> tuple[float, float] | None:
        if self._state.memory is None:
            return None
        value = self._state.memory.read(task, version)
        return value.alpha, value.beta

    def refresh(self, task: str) -> None:
        self.by_task[task] = self._read(task)

    def _read(self, task: str) -> float:
        """Recipes without a memory draw uniformly: every value is the same."""
        memory = self._state.memory
        return 0.5 if memory is None else memory.read(task, self._state.version).value


def scheduler_settings(config: Config, recipe: Recipe) -> SchedulerSettings:
    """Raises ``ValueError`` where the batch or the concurrency does not fit the recipe's groups."""
    rollout = config.rollout
    return SchedulerSettings(
        batch_size=rollout.batch_size,
        concurrency=rollout.concurrency,
        group_size=recipe.group_size,
        requests_per_prompt=rollout.requests_per_prompt,
        max_staleness=rollout.max_staleness,
        batches_per_version=config.run.publish_every,
        publication=rollout.publication,
        max_consecutive_failures=rollout.max_consecutive_failures,
        seed=config.seed,
    )
