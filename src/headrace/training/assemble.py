"""A configuration -> the things it names. Every mapping from a configuration section to a component stands here, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.environments import worlds
from headrace.environments.base import Environment, Task
from headrace.environments.worlds import World
from headrace.errors import UserError
from headrace.open_doors import is_reference, load_object
from headrace.rollout.agent_loop import EpisodeSettings, run_attempt
from headrace.rollout.chat import ChatCodec
from headrace.rollout.clock import CostModel
from headrace.rollout.engine import Engine
from headrace.rollout.local_engine import LocalEngine
from headrace.rollout.scheduler import Attempt
from headrace.rollout.trajectory import Dispatch, Failure, Trajectory
from headrace.training.adapters import LoraSettings
from headrace.training.learner import LearnerSettings
from headrace.training.policy import Policy
from headrace.training.pretrained import resolve_device


@dataclass(frozen=True)
class Bench:
    """World, tokens and engine: what attempts need, with or without training."""

    world: World
    codec: ChatCodec
    engine: Engine
    settings: EpisodeSettings

    def attempt(self) -> Attempt:
        async def attempt(dispatch: Dispatch, task: Task) -> Trajectory | Failure:
            return await run_attempt(dispatch, task, self.environment, self.engine, self.codec, self.settings)

        return attempt

    @property
    def environment(self) -> Callable[[], Environment]:
        return self.world.environment


def build_world(config: Config) -> World:
    name, options = config.environment.name, config.environment.options
    try:
        if not is_reference(name):
            return worlds.make(name, options)
        world = load_object(name, "environment")(**options)
    except (ValueError, TypeError) as error:
        raise UserError(f"environment {name!r}: {error}") from error
    if not isinstance(world, World):
        raise UserError(f"environment {name!r} gave a {type(world).__name__}, not a headrace.environments.worlds.World")
    return world


def split_tasks(config: Config, world: World, split: str, count: int | None = None) -> list[Task]:
    """The tasks of ``split``: as many as asked for, else as configured, else 64 (the training split: all training tasks)."""
    if count is None:
        own = config.environment.tasks if split == config.environment.split else 64
        count = config.evaluation.tasks.get(split, own)
    try:
        tasks = world.tasks(split, count)
    except ValueError as error:
        raise UserError(f"environment {config.environment.name!r}: {error}") from error
    if not tasks:
        raise UserError(f"environment {config.environment.name!r} has no tasks in split {split!r}")
    if len({task.id for task in tasks}) < len(tasks):
        raise UserError(f"environment {config.environment.name!r} repeats a task id in split {split!r}")
    return tasks


def check_early(config: Config) -> None:
    """``UserError`` for a split that the world does not have or a device that is not there, before anything costly begins."""
    resolve_device(config.policy.device)
    world = build_world(config)
    evaluated = config.evaluation.splits if config.evaluation.attempts else ()
    for split in dict.fromkeys((config.environment.split, *evaluated)):
        split_tasks(config, world, split)


def load_policy(config: Config, folder: str | Path, *, lora: bool = True) -> Policy:
    section = config.policy
    adapter = None
    if section.lora is not None and lora:
        adapter = LoraSettings(section.lora.rank, section.lora.alpha, section.lora.dropout, section.lora.targets)
    return Policy.load(
        folder, dtype=section.dtype, device=section.device, lora=adapter, gradient_checkpointing=section.gradient_checkpointing and lora
    )


def build_codec(config: Config, policy: Policy) -> ChatCodec:
    if policy.tokenizer is None or not getattr(policy.tokenizer, "chat_template", None):
        raise UserError(f"policy {policy.name}: its tokenizer has no chat template; take an instruction-tuned model or add one")
    section = config.policy
    return ChatCodec(policy.tokenizer, history=section.history, template_arguments=section.template_arguments)


def build_engine(
    config: Config,
    policy: Policy,
    codec: ChatCodec,
    *,
    version: int = 0,
    greedy: bool = False,
    concurrency: int | None = None,
    placement: str | None = None,
    snapshots: int = 1,
) -> Engine:
    """An engine that holds ``policy``'s weights as ``version``; it keeps a module of its own. ``snapshots``: how many it must be
    able to hold before any attempt has pinned one (a resumed run brings some)."""
    options: dict[str, Any] = {
        "stop_token_ids": codec.stop_token_ids,
        "slots": concurrency or most_at_once(config),
        "context_limit": config.rollout.context_limit,
        "keep": max(config.rollout.max_staleness + 1, snapshots),
        "tick_tokens": config.engine.tick_tokens,
        "cache_on_publish": config.engine.cache_on_publish,
        "exact": config.engine.exact,
        "greedy": greedy,
        "version": version,
    }
    if (placement or config.engine.placement) == "process":
        from headrace.rollout.process_engine import ProcessEngine

        return ProcessEngine(policy.model, threads=config.engine.threads, **options)
    return LocalEngine(policy.model, costs=cost_model(config), **options)


def most_at_once(config: Config) -> int:
    return max(config.rollout.concurrency, config.evaluation.concurrency or 0)


def build_bench(
    config: Config,
    policy: Policy,
    *,
    version: int = 0,
    greedy: bool = False,
    concurrency: int | None = None,
    world: World | None = None,
    placement: str | None = None,
    snapshots: int = 1,
) -> Bench:
    codec = build_codec(config, policy)
    engine = build_engine(
        config, policy, codec, version=version, greedy=greedy, concurrency=concurrency, placement=placement, snapshots=snapshots
    )
    return Bench(world or build_world(config), codec, engine, episode_settings(config))


def episode_settings(config: Config) -> EpisodeSettings:
    rollout = config.rollout
    return EpisodeSettings(
        context_limit=rollout.context_limit,
        reply_tokens=rollout.reply_tokens,
        environment_deadline=rollout.environment_deadline,
        engine_deadline=rollout.engine_deadline,
        episode_deadline=rollout.episode_deadline,
        mixed_versions=rollout.publication == "continue",
        costs=cost_model(config),
    )


def cost_model(config: Config) -> CostModel:
    """Costs are charged in simulated time only, so a configuration may always carry them."""
    return CostModel(**config.costs.model_dump())


def learner_settings(config: Config) -> LearnerSettings:
    section = config.learner
    return LearnerSettings(
        learning_rate=section.learning_rate,
        betas=section.betas,
        weight_decay=section.weight_decay,
        clip_norm=section.clip_norm,
        warmup_steps=section.warmup_steps,
        minibatches=section.minibatches,
        epochs=section.epochs,
        max_tokens=section.max_tokens,
        old=section.old,
        kl_coefficient=section.kl_coefficient,
        entropy=section.entropy,
        seed=config.seed,
    )
