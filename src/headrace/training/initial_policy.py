"""The policy that a run starts from: a Hugging Face name or folder as it is, or one that is warm-started here."""

from __future__ import annotations

from pathlib import Path

from headrace.config import Config
from headrace.training.observer import Observer


def initial_policy(config: Config, observer: Observer) -> str | Path:
    """What ``Policy.load`` should load. With a [warmup] section it is made now, or found in the cache."""
    if config.warmup is None:
        return config.policy.model
    raise NotImplementedError
