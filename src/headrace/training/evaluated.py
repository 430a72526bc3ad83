"""What an evaluation evaluates: a run's policy, a model, or a configuration's policy before training; and under which configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import CONFIG_FILE, Config, load
from headrace.errors import UserError
from headrace.records.run_store import is_run
from headrace.training.saved_policy import FOLDER, saved_updates

_READ = ("environment", "rollout", "engine", "evaluation", "policy", "run.threads", "run.cache")
_WEIGHTS = ("policy.model", "policy.layers", "policy.width", "policy.split_digits", "policy.lora")


@dataclass(frozen=True)
class Evaluated:
    """``source``: the policy to load, None for the configuration's own before training; ``updates`` are behind it."""

    source: str | Path | None
    config: Config
    updates: int = 0


def evaluated(target: str | Path, config: Config | str | Path | None, overrides: Sequence[str] = ()) -> Evaluated:
    """``config`` goes in place of the target's own.

    Raises ``UserError`` for a target without a policy or a configuration, and for an override that could not change anything.
    """
    path = Path(target)
    if is_run(path):
        updates = saved_updates(path)
        if updates is None:
            raise UserError(f"{path} holds no policy yet: the run was stopped before its first checkpoint")
        _check_overrides(overrides, f"the policy of {path}")
        return Evaluated(path / FOLDER, _configuration(config or path / CONFIG_FILE, overrides), updates)
    if path.suffix == ".toml":
        if config is not None:
            raise UserError(f"{path} is a configuration itself; leave --config out, or name a run or a model in its place")
        return Evaluated(None, load(path, overrides))
    if config is None:
        raise UserError(f"{target} is not a run directory; to evaluate a model, name a configuration with --config")
    _check_overrides(overrides, str(target))
    return Evaluated(target, _configuration(config, overrides))


def _configuration(config: Config | str | Path, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load(config, overrides)
    if overrides:
        raise UserError("overrides need a configuration file; change the Config itself")
    return config


def _check_overrides(overrides: Sequence[str], policy: str) -> None:
    """A policy that exists is evaluated as it is: what would make or train another one says so instead of doing nothing."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if _within(key, _WEIGHTS):
            raise UserError(f"--set {override}: {policy} is evaluated as it is; name another run or model instead")
        if not _within(key, _READ):
            raise UserError(f"--set {override}: an evaluation does not read {key}; it reads {', '.join(_READ)}")


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
