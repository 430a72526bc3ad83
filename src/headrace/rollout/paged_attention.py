"""Attention over a paged key/value cache, as a registered attention function of transformers.

All new tokens of all sequences go through the model as one row ``[1, N]``. In each layer the attention function writes
their keys and values into pages and lets every token attend to the pages of its own sequence. Query heads that share a
key/value head are taken together, so keys and values are read once. How the pages lie in memory and what computes with
them is a ``PagedCache``'s own affair: ``native_pages`` (compiled, CPU) or ``torch_pages`` (everywhere).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from headrace.rollout.pages import Ints, PageTable, Span

NAME = "headrace_paged"

P = TypeVar("P")


class UnsupportedAttention(RuntimeError):
    """The model asks for something that paged attention does not compute (sinks, soft caps, position biases)."""


class HeadShape(NamedTuple):
    """What one page of one layer holds: key/value heads, then keys (or values) and coordinates in either order."""

    heads: int
    first: int
    second: int


class PagedCache(ABC, Generic[P]):
    """Keys and values of every layer in pages; a layer's pages are allocated when it is first met, from its own shapes."""

    def __init__(self, slots: int, context_limit: int) -> None:
        self.pages = PageTable(slots, context_limit)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def plan(self, slot_b: Ints, start_b: Ints, new_b: Ints, row_b: Ints) -> P:
        """Whatever all layers need to know: sequence b in ``slot_b`` has ``new_b`` tokens from row ``row_b`` on, after ``start_b``."""

    @abstractmethod
    def attend(self, plan: P, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
        """Write and attend. Arguments are [rows, heads, size], where rows beyond the plan's are padding (results there are
        finite); ``window`` 0 means none. The result is contiguous, [rows, heads, value size]."""

    def layer(self, index: int, like: Tensor, keys: HeadShape, values: HeadShape) -> tuple[Tensor, Tensor]:
        """The layer's pages [capacity, *shape]. Zeroed, because what was never written must be finite."""
        found = self._layers.get(index)
        if found is None:
            found = _zeros(like, (self.pages.capacity, *keys)), _zeros(like, (self.pages.capacity, *values))
            self._layers[index] = found
        return found

    @contextmanager
    def attending(self, spans: Sequence[Span], *, high: bool = False) -> Iterator[P]:
        """Within this context the registered attention function computes for ``spans``, flattened in their order: the plan."""
        slot_b = np.array([span.slot for span in spans], dtype=np.int64)
        start_b = np.array([span.start for span in spans], dtype=np.int64)
        new_b = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        for slot, length in zip(slot_b.tolist(), (start_b + new_b).tolist(), strict=True):
            self.pages.grow(slot, length, high=high)
        plan = self.plan(slot_b, start_b, new_b, np.cumsum(new_b) - new_b)
        token = _active.set((self, plan))
        try:
            yield plan
        finally:
            _active.reset(token)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """On the CPU memory that the system hands out zeroed when it is first touched, aligned to cache lines."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    raw = np.zeros(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + size]).view(like.dtype).view(shape)


_active: ContextVar[tuple[PagedCache[Any], Any]] = ContextVar("headrace_paged")


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function: query, key, value are [B, heads, N, size], whose B * N tokens are the spans' one after another;
    returns [B, N, heads, size]."""
    for refused in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(refused) is not None:
            raise UnsupportedAttention(f"the model's attention uses {refused!r}")
    cache, plan = _active.get()
    index: Any = module.layer_idx
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    batch, _, length, _ = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    done = cache.attend(plan, index, query, key, value, scaling, sliding_window or 0)
    return done.view(batch, length, *done.shape[1:]), None


AttentionInterface.register(NAME, _attention)
