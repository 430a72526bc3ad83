"""The smaller jobs around a run (warm start, offline values, evaluation) and what they share with it: many attempts on a bench."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from headrace.config import CONFIG_FILE, Config, load
from headrace.environments.base import Task
from headrace.environments.worlds import World
from headrace.errors import RunFailed, UserError
from headrace.rollout import clock
from headrace.rollout.attempts import run_attempts
from headrace.rollout.trajectory import Failure, Trajectory
from headrace.training import assemble, evaluation, offline_values
from headrace.training.assemble import Bench
from headrace.training.cache import cache_folder, content_hash, weights_hash
from headrace.training.checkpoints import Checkpoint
from headrace.training.evaluated import evaluated
from headrace.training.evaluation import Evaluation
from headrace.training.initial_policy import initial_policy
from headrace.training.observer import Observer, Silent
from headrace.training.policy import Policy


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
    config: Config | str | Path | None = None,
    observer: Observer | None = None,
    *,
    overrides: Sequence[str] = (),
    split: str = "train",
    tasks: int | None = None,
    attempts: int | None = None,
    k: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
) -> Evaluation:
    """Success, mean@k, pass@k and maj@k of a policy on a split of the world of its configuration, changed by ``overrides``.

    ``target``: a run, a configuration file (its policy before training), or a Hugging Face folder or name with a ``config``.
    ``k`` defaults to the number of attempts at each task.
    """
    needs_own_loop("evaluate")
    observer = observer or Silent()
    chosen = evaluated(target, config, overrides)
    section = chosen.config.evaluation
    count = attempts or section.attempts or 4
    if k is not None and k > count:
        raise UserError(f"--k {k} is more than the {count} attempts at each task; add --attempts {k} or lower --k")
    set_threads(chosen.config)
    world = assemble.build_world(chosen.config)
    problems = assemble.split_tasks(chosen.config, world, split, tasks)
    source = initial_policy(chosen.config, observer) if chosen.source is None else chosen.source
    policy = assemble.load_policy(chosen.config, source, lora=False)

    async def run() -> Sequence[Trajectory | Failure]:
        async with open_bench(chosen.config, policy, None, greedy=greedy, world=world) as bench:
            wanted = section.seed if seed is None else seed
            return await measured_attempts(chosen.config, bench, problems, count, wanted, 0, f"evaluating on {split}", observer)

    return evaluation.summarize(split, chosen.updates, clock.run(run()), k=k, answers=world.answers)


def run_config(folder: Path) -> Config:
    """The resolved configuration of a run."""
    return load(folder / CONFIG_FILE)


# --- shared by all -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_bench(
    config: Config, policy: Policy, checkpoint: Checkpoint | None, *, greedy: bool = False, world: World | None = None
) -> AsyncIterator[Bench]:
    """World, tokens and an engine that is closed in the end. A resumed run's engine holds the checkpoint's snapshots."""
    plain = policy if policy.lora is None else assemble.load_policy(config, policy.name, lora=False)
    snapshots = dict(sorted(checkpoint.snapshots.items())) if checkpoint is not None else {}
    first = min(snapshots, default=0)
    if snapshots:
        plain.model.load_state_dict(dict(snapshots.pop(first)), strict=False)
    bench = assemble.build_bench(config, plain, version=first, greedy=greedy, world=world, snapshots=len(snapshots) + 1)
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
        "tasks": [[task.id, json.dumps(dict(task.payload), sort_keys=True, default=str)] for task in tasks],  # a gold may be corrected
        "chat": [config.policy.history, config.policy.template_arguments],
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
