"""The policy that a run starts from: a Hugging Face name or folder as it is, or one that is warm-started here.

A warm start is kept under a hash of what made it: its settings, the policy that it began with, every demonstration, and the
versions of the libraries that did the arithmetic. It is written aside and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from headrace.config import Config
from headrace.environments.base import Task, ToolSpec
from headrace.environments.worlds import World
from headrace.errors import UserError
from headrace.rollout import clock
from headrace.rollout.attempts import run_attempts
from headrace.rollout.trajectory import Turn
from headrace.training import assemble, evaluation
from headrace.training.cache import cache_folder, content_hash
from headrace.training.observer import Observer
from headrace.training.policy import Policy
from headrace.training.tiny_policy import TinySizes, make_tiny_policy
from headrace.training.warmup import ProbeResult, WarmupProgress, WarmupReport, WarmupSettings, warm_start

TINY = "tiny"
REPORT_FILE = "warmup.json"
_FORMAT = 1
"""Of what is kept; raised when the same facts begin to make another policy."""
_HELD_OUT = 64


def initial_policy(config: Config, observer: Observer) -> str | Path:
    """What ``Policy.load`` should load. With a [warmup] section it is made now, or found in the cache."""
    if config.warmup is None:
        return config.policy.model
    material = _material(config)
    folder = cache_folder(config) / "warmup" / content_hash(_facts(config, material))
    if not _whole(folder):
        _make(config, material, folder, observer)
    observer.note(f"warm start: {_sentence(folder)}")
    return folder


@dataclass(frozen=True)
class _Material:
    """What the world gives: conversations to clone, and tasks of the same split to probe on."""

    world: World
    conversations: tuple[tuple[Turn, ...], ...]
    probe_tasks: tuple[Task, ...]
    system: str | None
    tools: tuple[ToolSpec, ...]

    def texts(self) -> list[str]:
        opening = [self.system] if self.system else []
        return [*opening, *(text for turns in self.conversations for turn in turns for text in (turn.observation, turn.action))]


def _material(config: Config) -> _Material:
    """Demonstrations of the first tasks of the split "warmup"; the tasks after them are for the probe."""
    assert config.warmup is not None
    section, world = config.warmup, assemble.build_world(config)
    if world.demonstrate is None:
        raise UserError(
            f"environment {config.environment.name!r} has no scripted demonstrations, so it cannot warm-start a policy: "
            "remove [warmup] and name a trained model in policy.model"
        )
    probed = section.probe_attempts if section.target_success is not None else 0
    tasks = assemble.split_tasks(config, world, "warmup", section.demonstrations + probed)
    environment = world.environment()
    conversations = [
        tuple(Turn(seen, said) for seen, said in world.demonstrate(task, section.seed)) for task in tasks[: section.demonstrations]
    ]
    told = tuple(turns for turns in conversations if turns)
    if not told:
        raise UserError(
            f"environment {config.environment.name!r} has no scripted demonstration for any of the {len(conversations)} tasks of its split "
            "'warmup', so it cannot warm-start a policy (problems from data need a worked solution or a formula, see docs/worlds.md): "
            "remove [warmup] and name a trained model in policy.model"
        )
    return _Material(
        world=world,
        conversations=told,
        probe_tasks=tuple(tasks[section.demonstrations :]),
        system=environment.system,
        tools=tuple(environment.tools),
    )


def _facts(config: Config, material: _Material) -> dict[str, Any]:
    assert config.warmup is not None
    return {
        "format": _FORMAT,
        "warmup": config.warmup.model_dump(mode="json"),
        "settings": asdict(_settings(config)),
        "policy": config.policy.model_dump(mode="json"),
        "start": asdict(_sizes(config)) if config.policy.model == TINY else _stamp(config.policy.model),
        "environment": [config.environment.name, config.environment.options],
        "system": material.system,
        "tools": [[tool.name, tool.description, dict(tool.parameters)] for tool in material.tools],
        "demonstrations": content_hash({"": [[[turn.observation, turn.action] for turn in turns] for turns in material.conversations]}),
        "probe": [task.id for task in material.probe_tasks],
        "budgets": [config.rollout.context_limit, config.rollout.reply_tokens],
        "threads": torch.get_num_threads(),
        "libraries": [torch.__version__, transformers.__version__, tokenizers.__version__],
    }


def _stamp(model: str) -> Any:
    """What tells a folder's weights from others without reading them; a name stands for itself."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.iterdir()) if file.is_file()]


def _sizes(config: Config) -> TinySizes:
    width = config.policy.width
    heads = max(1, width // 32)
    return TinySizes(
        layers=config.policy.layers,
        width=width,
        heads=heads,
        kv_heads=heads // 2 if heads % 2 == 0 else heads,
        ffn=3 * width,
        context=max(2048, config.rollout.context_limit),
        split_digits=config.policy.split_digits,
    )


def _settings(config: Config) -> WarmupSettings:
    assert config.warmup is not None
    section = config.warmup
    return WarmupSettings(
        steps=section.steps,
        batch_size=section.batch_size,
        optimizer=section.optimizer,
        learning_rate=section.learning_rate,
        matrix_learning_rate=section.matrix_learning_rate,
        observation_weight=section.observation_weight,
        max_tokens=config.learner.max_tokens,
        held_out=min(_HELD_OUT, section.demonstrations // 10),
        target_success=section.target_success,
        probe_every=section.probe_every,
        probe_from=section.probe_from,
        seed=section.seed,
    )


def _make(config: Config, material: _Material, folder: Path, observer: Observer) -> None:
    aside = folder.with_name(f".{folder.name}.making-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        policy = _start(config, material, aside / "start")
        report = _warm(config, material, policy, observer)
        shutil.rmtree(aside)
        policy.save(aside)
        (aside / REPORT_FILE).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        _keep(aside, folder)
    except OSError as error:
        raise UserError(f"the warm start cannot be kept in {folder.parent}: {error}; name another folder in run.cache") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _keep(aside: Path, folder: Path) -> None:
    """Rename ``aside``, unless another process has been as quick; what lies there damaged gives way."""
    if _whole(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.rename(aside, folder)
    except OSError:
        if not _whole(folder):
            raise


def _whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (REPORT_FILE, "config.json", "tokenizer.json"))


def _start(config: Config, material: _Material, folder: Path) -> Policy:
    if config.policy.model != TINY:
        return assemble.load_policy(config, config.policy.model)
    assert config.warmup is not None
    folder = make_tiny_policy(material.texts(), folder, _sizes(config), config.warmup.seed)
    return assemble.load_policy(config, folder, lora=False)  # random weights learn as a whole; adapters come after


def _warm(config: Config, material: _Material, policy: Policy, observer: Observer) -> WarmupReport:
    settings = _settings(config)
    codec = assemble.build_codec(config, policy)
    rows = [codec.demonstrate(turns, system=material.system, tools=material.tools) for turns in material.conversations]
    fitting = [row for row in rows if max(len(part.token_ids) for part in row) <= config.rollout.context_limit]
    if not fitting:
        longest = min(max(len(part.token_ids) for part in row) for row in rows)
        raise UserError(f"no demonstration fits rollout.context_limit = {config.rollout.context_limit}: the shortest has {longest} tokens")
    settings = replace(settings, held_out=min(settings.held_out, len(fitting) // 10))
    observer.phase("warm start", settings.steps)
    found = ""

    def on_progress(progress: WarmupProgress) -> None:
        nonlocal found
        if progress.probe is not None:
            found = f", success {progress.probe.success:.2f}"
        observer.progress(progress.step, f"loss {progress.loss:.3f}{found}")

    probe = _Probe(config, material, policy) if material.probe_tasks else None
    return warm_start(policy, fitting, settings, probe=probe, progress=on_progress)


class _Probe:
    """One sampled attempt at each of the tasks that lie beyond the demonstrations."""

    def __init__(self, config: Config, material: _Material, policy: Policy) -> None:
        self._config = config
        self._material = material
        # An engine copies a plain module; LoRA's weights are merged into one at each probe.
        self._plain = policy if policy.lora is None else assemble.load_policy(config, config.policy.model, lora=False)

    def __call__(self, policy: Policy) -> ProbeResult:
        if self._plain is not policy:
            self._plain.model.load_state_dict(dict(policy.weights()), strict=False)
        results = clock.run(self._attempts())
        found = evaluation.summarize("warmup", 0, results)
        return ProbeResult(found.success, found.attempts, {kind: result.success for kind, result in found.by_kind.items()})

    async def _attempts(self) -> Sequence[Any]:
        config, tasks = self._config, self._material.probe_tasks
        assert config.warmup is not None
        at_once = min(len(tasks), 128)
        bench = assemble.build_bench(config, self._plain, concurrency=at_once, world=self._material.world, placement="local")
        try:
            return await run_attempts(
                tasks,
                1,
                engine=bench.engine,
                codec=bench.codec,
                make_environment=bench.environment,
                settings=bench.settings,
                seed=config.warmup.seed,
                concurrency=at_once,
            )
        finally:
            await bench.engine.close()


def _sentence(folder: Path) -> str:
    report: Mapping[str, Any] = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    success = f", success {report['probes'][-1][1]['success']:.2f} of a probe" if report["probes"] else ""
    held_out = f"loss {report['held_out_loss']:.3f} on demonstrations held out{success}"
    return f"{report['steps']} steps in {report['seconds']:.0f} s, {held_out} ({folder})"
