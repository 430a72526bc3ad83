"""The smaller jobs around a run (warm start, offline values, evaluation) and what they share with it: many attempts on a bench."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from headrace.config import CONFIG_FILE, Config, load
from headrace.environments.base import Task
from headrace.errors import RunFailed, UserError
from headrace.records.run_store import is_run
from headrace.rollout import clock
from headrace.rollout.attempts import run_attempts
from headrace.rollout.trajectory import Failure, Trajectory
from headrace.training import assemble, evaluation, offline_values
from headrace.training.assemble import Bench
from headrace.training.cache import cache_folder, content_hash, weights_hash
from headrace.training.checkpoints import Checkpoint
from headrace.training.evaluation import Evaluation
from headrace.training.initial_policy import initial_policy
from headrace.training.observer import Observer, Silent
from headrace.training.policy import Policy
from headrace.training.saved_policy import saved_updates


def warm_start(config: Config, observer: Observer | None = None) -> Path:
    """The folder of the warm-started policy of ``config``, made now or found in the cache."""
    if config.warmup is None:
        raise UserError("the configuration has no [warmup] section, so there is nothing to warm-start")
    set_threads(config)
    return Path(initial_policy(config, observer or Silent()))


def measure_values(config: Config, observer: Observer | None = None) -> list[offline_values.TaskValue]:
    """The offline values of ``config``, measured now or found in the cache."""
    needs_own_loop("measure_values")
    observer = observer or Silent()
    set_threads(config)
    policy = assemble.load_policy(config, initial_policy(config, observer), lora=False)

    async def measure() -> list[offline_values.TaskValue]:
        async with open_bench(config, policy, None) as bench:
            tasks = assemble.split_tasks(config, bench.world, config.environment.split)
            return await prompt_values(config, bench, tasks, policy, observer)

    return clock.run(measure())


def evaluate(
    target: str | Path,
    config: Config | None = None,
    observer: Observer | None = None,
    *,
    split: str = "train",
    tasks: int | None = None,
    attempts: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
) -> Evaluation:
    """Success of a run's policy, or of a Hugging Face folder or name, on a split of the configuration's world."""
    needs_own_loop("evaluate")
    observer = observer or Silent()
    source, config, update = _evaluated(target, config)
    set_threads(config)
    policy = assemble.load_policy(config, source, lora=False)
    section = config.evaluation

    async def run() -> Evaluation:
        async with open_bench(config, policy, None, greedy=greedy) as bench:
            chosen = assemble.split_tasks(config, bench.world, split, tasks)
            count = attempts or section.attempts or 4
            wanted = section.seed if seed is None else seed
            results = await measured_attempts(config, bench, chosen, count, wanted, 0, f"evaluating on {split}", observer)
            return evaluation.summarize(split, update, results)

    return clock.run(run())


def run_config(folder: Path) -> Config:
    """The resolved configuration of a run."""
    return load(folder / CONFIG_FILE)


def _evaluated(target: str | Path, config: Config | None) -> tuple[str | Path, Config, int]:
    """What to load, the configuration to evaluate it under, and how many updates it has behind it."""
    folder = Path(target)
    if is_run(folder):
        updates = saved_updates(folder)
        if updates is None:
            raise UserError(f"{folder} holds no policy yet: the run was stopped before its first checkpoint")
        return folder / "policy", config or run_config(folder), updates
    if config is None:
        raise UserError(f"{target} is not a run directory; to evaluate a model, name a configuration with --config")
    return target, config, 0


# --- shared by all -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_bench(config: Config, policy: Policy, checkpoint: Checkpoint | None, *, greedy: bool = False) -> AsyncIterator[Bench]:
    """World, tokens and an engine that is closed in the end. A resumed run's engine holds the checkpoint's snapshots."""
    plain = policy if policy.lora is None else assemble.load_policy(config, policy.name, lora=False)
    snapshots = dict(sorted(checkpoint.snapshots.items())) if checkpoint is not None else {}
    first = min(snapshots, default=0)
    if snapshots:
        plain.model.load_state_dict(dict(snapshots.pop(first)), strict=False)
    bench = assemble.build_bench(config, plain, version=first, greedy=greedy, snapshots=len(snapshots) + 1)
    try:
        for version, weights in snapshots.items():
            await bench.engine.publish(version, weights)
        yield bench
    finally:
        await bench.engine.close()


async def prompt_values(
    config: Config, bench: Bench, tasks: Sequence[Task], policy: Policy, observer: Observer
) -> list[offline_values.TaskValue]:
    section, env = config.values, config.environment
    facts = {
        "policy": weights_hash(policy.weights()),
        "environment": env.model_dump(mode="json"),
        "tasks": [task.id for task in tasks],
        "rollouts": section.rollouts,
        "seed": section.seed,
        "context_limit": config.rollout.context_limit,
        "reply_tokens": config.rollout.reply_tokens,
    }
    path = cache_folder(config) / "values" / f"{content_hash(facts)}.json"

    async def measure() -> Sequence[Trajectory | Failure]:
        return await measured_attempts(config, bench, tasks, section.rollouts, section.seed, 0, "measuring offline values", observer)

    values, found = await offline_values.measure_or_load(path, tasks, measure, warn=observer.note)
    mean = offline_values.mean_success(values)
    observer.note(f"offline values: mean success {mean:.3f} over {section.rollouts} x {len(tasks)} rollouts{' (cached)' if found else ''}")
    return values


async def measured_attempts(
    config: Config, bench: Bench, tasks: Sequence[Task], count: int, seed: int, version: int, name: str, observer: Observer
) -> list[Trajectory | Failure]:
    observer.phase(name, len(tasks) * count)
    done = 0

    def on_result(_: Trajectory | Failure) -> None:
        nonlocal done
        done += 1
        observer.progress(done)

    results = await run_attempts(
        tasks,
        count,
        engine=bench.engine,
        codec=bench.codec,
        make_environment=bench.environment,
        settings=bench.settings,
        version=version,
        seed=seed,
        concurrency=config.evaluation.concurrency or config.rollout.concurrency,
        on_result=on_result,
    )
    if results and all(isinstance(result, Failure) for result in results):
        last = results[-1]
        assert isinstance(last, Failure)
        raise RunFailed(f"{name}: every attempt failed; the last ({last.reason}): {last.detail}")
    return results


def needs_own_loop(what: str) -> None:
    """``UserError`` inside a coroutine or a notebook's cell: these jobs run on an event loop of their own."""
    if clock.inside_a_loop():
        raise UserError(
            f"{what}: an event loop is already running here; call it on a thread of its own: await asyncio.to_thread({what}, ...)"
        )


def set_threads(config: Config) -> None:
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
