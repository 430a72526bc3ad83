"""An engine's own copy of a model: no gradients, no dropout, low-rank adapters merged into the weights they adapt."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A deep copy with the parameter names of the base model. Layers with adapters are recognised as peft makes them: a
    ``base_layer`` and ``get_delta_weight``; sums are taken in float32."""
    own: PreTrainedModel = copy.deepcopy(model).train(False).requires_grad_(False)
    for name, module in list(own.named_modules()):
        if isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "get_delta_weight"):
            parent, _, child = name.rpartition(".")
            setattr(own.get_submodule(parent), child, _merged(module))
    return own


def has_adapters(model: nn.Module) -> bool:
    return any(hasattr(module, "get_delta_weight") for module in model.modules())


@torch.no_grad()
def _merged(adapted: Any) -> nn.Module:
    base: nn.Module = adapted.base_layer
    weight: Any = base.weight
    total = weight.data.float()
    for adapter in adapted.active_adapters:
        total = total + adapted.get_delta_weight(adapter).float()
    weight.data = total.to(weight.dtype)
    return base
