"""A run from its configuration to its last evaluation.

prepare (warm start, offline values) -> evaluate -> Loop -> evaluate
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.algorithms import Recipe
from headrace.config import CONFIG_FILE, Config, load, resolve_recipe, to_toml
from headrace.environments.base import Task
from headrace.errors import RunFailed, UserError
from headrace.files import write_whole
from headrace.records import trackers
from headrace.records.metrics import MetricsFile, read_metrics
from headrace.records.run_store import RunReader, RunStore, is_run
from headrace.records.trackers import TrackedRun, Trackers
from headrace.rollout import clock
from headrace.rollout.scheduler import RolloutStopped
from headrace.rollout.trajectory import Restored
from headrace.training import assemble, checkpoints, evaluation, offline_values
from headrace.training.assemble import Bench
from headrace.training.checkpoints import Checkpoint
from headrace.training.drift import DriftMemory
from headrace.training.evaluation import EVALUATIONS_FILE, Evaluation
from headrace.training.folds import RunState, fold
from headrace.training.heavy_work import give_back_memory
from headrace.training.initial_policy import initial_policy
from headrace.training.jobs import measured_attempts, needs_own_loop, open_bench, prompt_values, run_config, set_threads
from headrace.training.learner import Learner
from headrace.training.loop import Loop, Parts
from headrace.training.meters import Meters
from headrace.training.observer import Observer, Silent
from headrace.training.policy import Policy
from headrace.training.saved_policy import save_policy


@dataclass(frozen=True)
class RunResult:
    """Where the run lies, how many updates it has done in all, and its evaluations."""

    folder: Path
    updates: int
    interrupted: bool
    seconds: float
    evaluations: tuple[Evaluation, ...] = ()
    report: Path | None = None
    """The report, where one was written (``headrace.train`` and the command do)."""

    def summary(self) -> list[str]:
        lines = [f"{'before training' if e.update == 0 else f'after {e.update} updates'}, {e.sentence()}" for e in self.evaluations]
        if self.report is not None:
            lines.append(f"report: {self.report}")
        return [*lines, f"run: {self.folder}"]


def train(
    config: Config | str | Path, *, out: str | Path | None = None, resume: bool = False, observer: Observer | None = None
) -> RunResult:
    """Train as ``config`` says and leave everything in one run directory.

    ``out`` defaults to a new folder below ``runs/``. ``resume`` goes on with the run in ``out``; its configuration must be
    the same but for the number of updates. Raises ``UserError`` for what the caller can mend, ``RunFailed`` where the run
    could not go on; what it left can be resumed.
    """
    needs_own_loop("headrace.train")
    config = config if isinstance(config, Config) else load(config)
    observer = observer or Silent()
    trackers.require(config.trackers.names)
    assemble.check_early(config)
    folder = _run_folder(config, Path(out) if out is not None else None, resume)
    set_threads(config)
    source, initial = _sources(config, folder, resume, observer)
    try:
        return clock.run(_Run(config, folder, resume, source, initial, observer).run(), simulated=config.run.clock == "simulated")
    except asyncio.CancelledError:
        observer.note(f"interrupted; {how_to_go_on(folder)}")
        raise KeyboardInterrupt from None
    except RolloutStopped as error:
        raise RunFailed(f"{folder}: {error}") from error
    except OSError as error:
        raise RunFailed(f"{folder}: {error}; the run can be resumed once that is mended") from error


def how_to_go_on(folder: Path) -> str:
    """The run's own configuration holds whatever was set on the command line too."""
    return f"go on with: headrace train {shlex.quote(str(folder / CONFIG_FILE))} --out {shlex.quote(str(folder))} --resume"


def _sources(config: Config, folder: Path, resume: bool, observer: Observer) -> tuple[str | Path, str | Path | None]:
    """What to load the policy from, and the initial policy where the run needs it.

    A resumed run finds its architecture in its own folder; its weights come from the checkpoint. Not so with LoRA: the folder
    holds the adapters merged, and they would be added a second time. A KL penalty refers to the initial policy.
    """
    own = folder / "policy"
    going_on = resume and _has_checkpoint(folder)
    from_own = going_on and config.policy.lora is None and (own / "config.json").is_file()
    if going_on and config.policy.lora is None and not from_own:
        observer.note(f"{own} is missing: taking the architecture of the initial policy, and the weights of the checkpoint")
    initial = None if from_own and not config.learner.kl_coefficient else initial_policy(config, observer)
    return (own if initial is None or from_own else initial), initial


class _Run:
    def __init__(
        self, config: Config, folder: Path, resume: bool, source: str | Path, initial: str | Path | None, observer: Observer
    ) -> None:
        self.config = config
        self.folder = folder
        self.resume = resume
        self.source = source
        self.initial = initial
        self.observer = observer
        self.recipe: Recipe = resolve_recipe(config)
        self.evaluations: list[Evaluation] = []
        self._began: float | None = None

    async def run(self) -> RunResult:
        began = time.monotonic()
        with _Interrupts(self.observer) as interrupts, self._store() as store:
            checkpoint = self._checkpoint(store) if self.resume else None
            policy = self._policy(checkpoint)
            async with open_bench(self.config, policy, checkpoint) as bench:
                tasks = {task.id: task for task in assemble.split_tasks(self.config, bench.world, self.config.environment.split)}
                if checkpoint is None:
                    await self._begin(store, bench, list(tasks.values()), policy)
                else:
                    await self._make_up_for_evaluation(bench, checkpoint)
                clock.restart()
                self._began = clock.now()
                loop = self._loop(store, checkpoint, bench, policy, tasks)
                if checkpoint is None:
                    await loop.checkpoint()
                give_back_memory()
                interrupts.first = loop.stop
                self.observer.phase(f"training with {self.recipe.name}", self.config.run.updates)
                try:
                    done = await loop.run(on_update=self._evaluate_between(bench))
                finally:
                    loop.parts.meters.close()
                interrupts.first = None
                updates, version = loop.parts.state.next_batch, loop.parts.state.version
                if done:
                    if updates % self.config.run.publish_every:  # what is left behind is what is evaluated
                        version += 1
                        await bench.engine.publish(version, policy.weights())
                    await self._evaluate(bench, updates, version)
        return RunResult(self.folder, updates, not done, time.monotonic() - began, tuple(self.evaluations))

    # --- beginning and going on ---

    @contextmanager
    def _store(self) -> Iterator[RunStore]:
        """The log; its clock counts the seconds of training over all of the run's resumptions, and stands still before."""
        offset = _seconds_so_far(self.folder) if self.resume else 0.0
        self.elapsed: Callable[[], float] = lambda: offset + (0.0 if self._began is None else clock.now() - self._began)
        store = (RunStore.resume if is_run(self.folder) else RunStore.create)(self.folder, clock=self.elapsed)
        try:
            write_whole(self.folder / CONFIG_FILE, to_toml(self.config))
            yield store
        finally:
            store.close()

    def _checkpoint(self, store: RunStore) -> Checkpoint | None:
        """The newest good checkpoint; None where the run was stopped before its first, so that it starts over."""
        if not _has_checkpoint(self.folder):
            return None
        checkpoint, passed_over = checkpoints.load_newest(self.folder / "checkpoints", log_length=len(store))
        for sentence in passed_over:
            self.observer.note(sentence)
        return checkpoint

    def _policy(self, checkpoint: Checkpoint | None) -> Policy:
        """The policy to go on with; a resumed run takes its architecture from its own folder and its weights from the checkpoint."""
        policy = assemble.load_policy(self.config, self.source)
        self.observer.note(f"policy: {policy.describe()}")
        if checkpoint is None:
            save_policy(policy, self.folder, 0)
        return policy

    async def _begin(self, store: RunStore, bench: Bench, tasks: Sequence[Task], policy: Policy) -> None:
        if len(store) > 0:
            store.append(Restored("", 0))
        MetricsFile(self.folder).rewrite(0)
        evaluation.keep(self.folder / EVALUATIONS_FILE, -1)
        if self.recipe.memory is not None and self.config.values.rollouts > 0:
            values = await prompt_values(self.config, bench, tasks, policy, self.observer)
            store.append_all(offline_values.priors(values, self.config.values.mass))
        await self._evaluate(bench, 0, 0)

    def _loop(self, store: RunStore, checkpoint: Checkpoint | None, bench: Bench, policy: Policy, tasks: dict[str, Task]) -> Loop:
        config = self.config
        learner = Learner(policy, self.recipe, assemble.learner_settings(config), reference=self._reference())
        drift = DriftMemory(max_tokens=config.learner.max_tokens) if _measures_drift(self.recipe) else None
        if checkpoint is not None:
            store.append(Restored(checkpoint.name, checkpoint.log_position))
            learner.load_state_dict(checkpoint.learner)
            if drift is not None and checkpoint.drift is not None:
                drift.load_state_dict(checkpoint.drift)
            MetricsFile(self.folder).rewrite(checkpoint.updates)
            evaluation.keep(self.folder / EVALUATIONS_FILE, checkpoint.updates)
        state = fold(store.events(), self.recipe.new_memory())
        parts = Parts(
            config=config,
            recipe=self.recipe,
            tasks=tasks,
            store=store,
            state=state,
            engine=bench.engine,
            attempt=bench.attempt(),
            learner=learner,
            drift=drift,
            costs=assemble.cost_model(config),
            meters=self._meters(state),
            snapshots=dict(checkpoint.snapshots) if checkpoint is not None else {0: _copied(policy)},
        )
        return Loop(parts)

    def _reference(self) -> Policy | None:
        if not self.config.learner.kl_coefficient:
            return None
        assert self.initial is not None
        return assemble.load_policy(self.config, self.initial, lora=False)

    def _meters(self, state: RunState) -> Meters:
        tracked = TrackedRun(self.folder, self.config.trackers.project, self.config.model_dump(mode="json"), state.next_batch)
        return Meters(
            MetricsFile(self.folder),
            self.elapsed,
            world=self.config.environment.name,
            rows=read_metrics(self.folder),
            tracker=Trackers(self.config.trackers.names, tracked, warn=self.observer.note),
            on_update=self.observer.update,
        )

    # --- evaluation and report ---

    async def _evaluate(self, bench: Bench, update: int, version: int) -> None:
        section = self.config.evaluation
        if section.attempts == 0:
            return
        for split in section.splits:
            tasks = assemble.split_tasks(self.config, bench.world, split)
            results = await measured_attempts(
                self.config, bench, tasks, section.attempts, section.seed, version, f"evaluating on {split}", self.observer
            )
            found = evaluation.summarize(split, update, results, answers=bench.world.answers)
            evaluation.append(self.folder / EVALUATIONS_FILE, found)
            self.evaluations.append(found)
            self.observer.note(found.sentence())

    def _evaluate_between(self, bench: Bench) -> Callable[[int, int], Awaitable[object]]:
        async def evaluate(update: int, version: int) -> None:
            if self._due(update):
                await self._evaluate(bench, update, version)
                self.observer.phase(f"training with {self.recipe.name}", self.config.run.updates)
                self.observer.progress(update)

        return evaluate

    def _due(self, update: int) -> bool:
        every = self.config.evaluation.every
        return bool(every) and update > 0 and update % every == 0 and update < self.config.run.updates

    async def _make_up_for_evaluation(self, bench: Bench, checkpoint: Checkpoint) -> None:
        """The evaluation that was due at the checkpoint, where the run was stopped before its end."""
        measured = {row["split"] for row in evaluation.read(self.folder / EVALUATIONS_FILE) if row["update"] == checkpoint.updates}
        if self._due(checkpoint.updates) and not measured.issuperset(self.config.evaluation.splits):
            await self._evaluate(bench, checkpoint.updates, checkpoint.version)


def _run_folder(config: Config, out: Path | None, resume: bool) -> Path:
    """Where the run lies, checked: a new one must not exist, one to resume must, with the same configuration."""
    if resume:
        if out is None:
            raise UserError("--resume needs --out DIR, the run to go on with")
        if not is_run(out):
            raise UserError(f"--resume: {out} is not a run directory; leave --resume out to start a run there")
        if (out / CONFIG_FILE).exists():
            _check_same(config, run_config(out), out)
        elif not _untouched(out):
            raise UserError(f"--resume: {out} has lost its {CONFIG_FILE}, so nobody knows what the run was; put it back")
        return out
    folder = (
        out
        or Path("runs")
        / f"{config.environment.name.split(':')[-1]}-{config.recipe.split(':')[-1].replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if is_run(folder) and not _untouched(folder):
        raise UserError(f"--out {folder} already holds a run; add --resume to go on with it, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror or error}") from error
    return folder


def _check_same(config: Config, before: Config, folder: Path) -> None:
    """``UserError`` naming the keys in which a resumed run's configuration differs, the number of updates aside."""
    ours, theirs = _flat(config.model_dump(mode="json")), _flat(before.model_dump(mode="json"))
    changed = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key) and key != "run.updates")
    if changed:
        shown = ", ".join(f"{key} ({theirs.get(key)!r} -> {ours.get(key)!r})" for key in changed)
        raise UserError(f"--resume: the configuration differs from that of {folder} in {shown}; only run.updates may change")


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _untouched(folder: Path) -> bool:
    """A run that ended before its first event, most likely over a mistake in its configuration, is in nobody's way."""
    with RunReader(folder) as reader:
        return len(reader) == 0 and not _has_checkpoint(folder)


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("update-*"))


def _measures_drift(recipe: Recipe) -> bool:
    """Only a receipt-order memory whose discount follows the drift needs it measured."""
    return recipe.memory == "receipt" and recipe.rho is None


def _seconds_so_far(folder: Path) -> float:
    with RunReader(folder) as reader:
        return max((seconds for _, seconds, _ in reader.timed_events()), default=0.0)


def _copied(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in policy.weights().items()}


class _Interrupts:
    """Ctrl-C and SIGTERM: the first calls ``first`` where the loop has set it, every other cancels what runs."""

    def __init__(self, observer: Observer) -> None:
        self.first: Callable[[], None] | None = None
        self._observer = observer

    def __enter__(self) -> _Interrupts:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not on the main thread: the caller's affair
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.first is not None:
            self._observer.note("stopping after the update under way; once more to stop at once (the run can be resumed either way)")
            stop, self.first = self.first, None
            stop()
        elif self._task is not None:
            self._task.cancel()
