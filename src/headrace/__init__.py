"""Headrace: train language-model agents online from a stream of single attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.api import train
    from headrace.config import Config

__version__ = "0.1.0"
__all__ = ["Config", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """``train`` and ``Config`` are imported when they are first asked for, so that ``import headrace`` stays quick."""
    if name == "train":
        from headrace.api import train

        return train
    if name == "Config":
        from headrace.config import Config

        return Config
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
