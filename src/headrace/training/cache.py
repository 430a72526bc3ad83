"""Where things that are expensive to make and the same for many runs are kept, under a hash of what made them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.config import Config


def cache_folder(config: Config) -> Path:
    chosen = config.run.cache or os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace"
    return Path(chosen).expanduser()


def content_hash(facts: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that name ``facts`` (JSON-able)."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_hash(weights: Mapping[str, torch.Tensor]) -> str:
    """16 hexadecimal digits that name a policy by its weights: names, shapes, dtypes and every bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
