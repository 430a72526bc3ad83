"""LoRA through peft: put in, merge for publication, save alone. peft is imported only here and only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.errors import UserError


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha / rank) B A on the ``targets``.

    ``targets``: module names (endings count), or "all-linear" for every linear layer but the output head.
    ``dropout``: before A, while training only; old log-probabilities are then computed without it. ``seed``: of the random A.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA needs rank >= 1, alpha > 0 and dropout in [0, 1); got {self}")


def insert(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """Put adapters into ``model`` in place (float32, B = 0), freeze everything else, and return peft's wrapper around it."""
    try:
        import peft
    except ImportError as error:
        raise UserError("policy.lora needs the package peft: pip install peft") from error
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    build: Any = peft.LoraConfig  # its alpha is declared an integer, but any number works
    config = build(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            wrapper = peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    except ValueError as error:
        raise UserError(
            f"policy.lora.targets {settings.targets!r} do not fit {type(model).__name__}: {str(error).splitlines()[0]}"
        ) from error
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if hasattr(head, "base_layer"):
        raise UserError("policy.lora.targets: the output head cannot carry an adapter; leave it out")
    return wrapper


@torch.no_grad()
def merged_state(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """The state dict of the model without adapters, their product added to the weights they adapt (sum in float32)."""
    state = model.state_dict()
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    if not adapted:
        return state
    merged = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}
    for name, module in adapted.items():
        weight = module.base_layer.weight
        total = weight.to(torch.float32)
        for adapter in module.active_adapters:
            total = total + module.get_delta_weight(adapter).to(torch.float32)
        merged[f"{name}.weight"] = total.to(weight.dtype)
    return merged
