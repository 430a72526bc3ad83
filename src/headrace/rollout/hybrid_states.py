"""States of linear-attention and convolution layers by slot, for models that mix such layers with attention.

Such a layer sums its past up in tensors of fixed size (transformers: conv states and recurrent states), so sequences of any
lengths can share a forward as long as they feed equally many tokens. Between forwards each slot's states are kept here;
for a forward they are stacked into the cache object that the model expects. Keys and values do not pass through that
object: the paged attention function keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer


class UnsupportedStates(RuntimeError):
    """The model's layers keep something that is neither keys and values nor a state of fixed size."""


class _PassThrough(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """In place of an attention layer's keys and values."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


# by layer: the kinds of states ("conv" or "recurrent") and their numbers within the layer
_Key = tuple[int, str, int]


class SlotStates:
    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._config = model.config.get_text_config()
        self._slots = slots
        self._stored: dict[_Key, Tensor] = {}
        for layer in self._empty().layers:
            if not isinstance(layer, LinearAttentionLayer | _PassThrough):
                raise UnsupportedStates(f"the model keeps a {type(layer).__name__}")

    def _empty(self) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        for number, layer in enumerate(cache.layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                cache.layers[number] = _PassThrough()  # type: ignore[no-untyped-call]
        return cache

    def load(self, slots: Sequence[int], *, fresh: bool) -> DynamicCache:
        """A cache object with the states of ``slots`` as a batch; ``fresh``: sequences without a past."""
        cache = self._empty()
        if fresh:
            return cache
        index = torch.tensor(slots)
        for (number, kind, state), stored in self._stored.items():
            layer: Any = cache.layers[number]
            values = stored.index_select(0, index.to(stored.device))
            layer.device, layer.dtype = values.device, values.dtype
            getattr(layer, f"{kind}_states")[state] = values
            getattr(layer, f"is_{kind}_states_initialized")[state] = True
            layer.has_previous_state[state] = True
            if kind == "conv":
                layer.conv_kernel_size[state] = values.shape[-1]
        return cache

    def save(self, slots: Sequence[int], cache: DynamicCache) -> None:
        """Keep what the forward left in ``cache``."""
        index = torch.tensor(slots)
        for number, layer in enumerate(cache.layers):
            if not isinstance(layer, LinearAttentionLayer):
                continue
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                for state, values in states.items():
                    if values is None:
                        continue
                    key = number, kind, state
                    if key not in self._stored:
                        self._stored[key] = values.new_zeros(self._slots, *values.shape[1:])
                    self._stored[key].index_copy_(0, index.to(values.device), values)
