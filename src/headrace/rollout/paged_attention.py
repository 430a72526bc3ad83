"""Attention over a paged key/value cache, as a registered attention function of transformers.

All new tokens of all sequences go through the model as one row ``[1, N]``. In each layer the attention function writes
their keys and values into pages of ``PAGE`` positions and lets every token attend to the pages of its own sequence:

- sequences with one new token (decoding): one batched product over all their pages at once, then the pages' partial
  softmaxes are combined by their log-sum-exp (Milakov and Gimelshein 2018; split-KV decoding). Nothing is padded but
  each sequence's last page, so ragged lengths cost nothing. Where the pages in use lie densely in the pool, they are read
  in place and not gathered.
- sequences with several new tokens (prompts, observations): their pages are gathered and a masked scaled dot-product
  attention runs for each group of similar shapes.

Query heads that share a key/value head are packed into rows, so keys and values are read once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "headrace_paged"
PAGE = 64
# finite, so that a page without a visible key has a defined softmax and then the weight zero
HIDDEN = -1e30
# a page read in place costs one read; a gathered one about three (read, write, read)
_GATHER_COST = 2.5

Ints = NDArray[np.int64]


class UnsupportedAttention(RuntimeError):
    """The model asks for something that paged attention does not compute (sinks, soft caps, position biases)."""


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence: ``token_ids`` follow the ``start`` tokens that the slot's cache holds; ``sample`` asks
    for the logits after the last of them."""

    slot: int
    start: int
    token_ids: Sequence[int]
    sample: bool = True


class PageTable:
    """Which pages hold which slot's tokens. Pages come from the low end or the high end of the pool, so that the
    sequences of two alternating versions each lie densely."""

    def __init__(self, slots: int, context_limit: int) -> None:
        self.pages_per_slot = -(-context_limit // PAGE)
        self.capacity = slots * self.pages_per_slot
        self.table: Ints = np.zeros((slots, self.pages_per_slot), dtype=np.int64)
        self.used: Ints = np.zeros(slots, dtype=np.int64)
        self._free = bytearray(b"\x01") * self.capacity
        # two heaps over the same free pages; an entry whose page was taken through the other heap is skipped when met
        self._low = list(range(self.capacity))
        self._high = [-page for page in range(self.capacity - 1, -1, -1)]
        self._listed = (bytearray(self._free), bytearray(self._free))

    def grow(self, slot: int, length: int, *, high: bool) -> None:
        """Give ``slot`` pages for ``length`` tokens."""
        for index in range(int(self.used[slot]), -(-length // PAGE)):
            self.table[slot, index] = self._take(high)
            self.used[slot] = index + 1

    def truncate(self, slot: int, length: int) -> None:
        """Free the pages of ``slot`` beyond ``length`` tokens."""
        needed = -(-length // PAGE)
        for index in range(needed, int(self.used[slot])):
            self._give(int(self.table[slot, index]))
        self.used[slot] = min(needed, int(self.used[slot]))

    def _take(self, high: bool) -> int:
        heap, listed = (self._high, self._listed[1]) if high else (self._low, self._listed[0])
        while True:
            page = abs(heapq.heappop(heap))
            listed[page] = 0
            if self._free[page]:
                self._free[page] = 0
                return page

    def _give(self, page: int) -> None:
        self._free[page] = 1
        for heap, listed, entry in ((self._low, self._listed[0], page), (self._high, self._listed[1], -page)):
            if not listed[page]:
                listed[page] = 1
                heapq.heappush(heap, entry)


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token. P pages are looked at; ``owner_p`` names each one's sequence."""

    rows_b: Tensor
    pages_p: Tensor | None  # gathered pages; None: the pool's slice [low, high) in place
    low: int
    high: int
    owner_p: Tensor
    order_bm: Tensor  # [B * M] indices into P, sequence by sequence, padded with any page
    longest: int  # M
    padding_bm1: Tensor | None  # [B, M, 1]: 0 or HIDDEN; None without padding
    first_p1: Tensor  # positions of each page's first key, and of its sequence's query, relative
    query_p1: Tensor
    biases: dict[int, Tensor]

    def bias(self, window: int) -> Tensor:
        """[P, 1, PAGE], added to scores: HIDDEN where the key is later than the query or outside a sliding window (0: none)."""
        found = self.biases.get(window)
        if found is None:
            keys_pk = self.first_p1 + torch.arange(PAGE, device=self.first_p1.device)
            visible_pk = keys_pk <= self.query_p1
            if window:
                visible_pk &= keys_pk > self.query_p1 - window
            found = torch.zeros(visible_pk.shape, device=visible_pk.device).masked_fill_(~visible_pk, HIDDEN)[:, None, :]
            self.biases[window] = found
        return found


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Sequences with several new tokens, of similar shapes: rows padded to n, keys to pages * PAGE."""

    rows_bn: Tensor  # [B * n] indices into the flat row; padding repeats a valid one
    keep: Tensor  # indices into [B * n] that are real
    rows: Tensor  # and their places in the flat row
    size: int
    new: int
    pages_bm: Tensor  # [B * M]
    positions_bn: Tensor
    masks: dict[int, Tensor]

    def mask(self, window: int, groups: int) -> Tensor:
        """Boolean [B, 1, n * groups, M * PAGE]: what each packed query row may see."""
        found = self.masks.get(window)
        if found is None:
            keys_k = torch.arange(len(self.pages_bm) // self.size * PAGE, device=self.pages_bm.device)
            query_bn1 = self.positions_bn[:, :, None]
            found = keys_k <= query_bn1
            if window:
                found &= keys_k > query_bn1 - window
            found = found.repeat_interleave(groups, dim=1)[:, None]
            self.masks[window] = found
        return found


@dataclass(frozen=True, slots=True)
class _Plan:
    cache: PagedCache
    write_page_n: Tensor
    write_offset_n: Tensor
    decode: _Decode | None
    chunks: tuple[_Chunk, ...]


_active: ContextVar[_Plan] = ContextVar("headrace_paged_plan")


class PagedCache:
    """The pages of keys and values of every layer; layers are allocated when first met, from their own shapes."""

    def __init__(self, slots: int, context_limit: int, device: torch.device, *, gather: bool = False) -> None:
        self.pages = PageTable(slots, context_limit)
        self._device = device
        self._gather = gather
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key_nhd: Tensor, value_nhd: Tensor) -> tuple[Tensor, Tensor]:
        """Pages [capacity, key/value heads, PAGE, head size] of a layer. Zeroed: what was never written must be finite."""
        found = self._layers.get(index)
        if found is None:
            capacity = self.pages.capacity
            found = (
                key_nhd.new_zeros(capacity, key_nhd.shape[1], PAGE, key_nhd.shape[2]),
                value_nhd.new_zeros(capacity, value_nhd.shape[1], PAGE, value_nhd.shape[2]),
            )
            self._layers[index] = found
        return found

    @contextmanager
    def attending(self, spans: Sequence[Span], *, high: bool = False) -> Iterator[None]:
        """Within this context the registered attention function computes for ``spans``, flattened in their order."""
        token = _active.set(self._plan(spans, high))
        try:
            yield
        finally:
            _active.reset(token)

    def _plan(self, spans: Sequence[Span], high: bool) -> _Plan:
        slot_b = np.array([span.slot for span in spans], dtype=np.int64)
        start_b = np.array([span.start for span in spans], dtype=np.int64)
        new_b = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        for slot, length in zip(slot_b.tolist(), (start_b + new_b).tolist(), strict=True):
            self.pages.grow(slot, length, high=high)
        first_b = np.cumsum(new_b) - new_b
        owner_n = np.repeat(np.arange(len(spans)), new_b)
        position_n = np.arange(len(owner_n)) - first_b[owner_n] + start_b[owner_n]
        single = new_b == 1
        decode = self._plan_decode(slot_b[single], start_b[single], first_b[single]) if single.any() else None
        chunks = tuple(
            self._plan_chunk(slot_b[group], start_b[group], new_b[group], first_b[group])
            for group in _similar_shapes(start_b, new_b, np.flatnonzero(~single))
        )
        page_n = self.pages.table[slot_b[owner_n], position_n // PAGE]
        return _Plan(self, self._tensor(page_n), self._tensor(position_n % PAGE), decode, chunks)

    def _plan_decode(self, slot_b: Ints, query_b: Ints, row_b: Ints) -> _Decode:
        count_b = query_b // PAGE + 1
        longest = int(count_b.max())
        real_bm = np.arange(longest) < count_b[:, None]
        pages_p = self.pages.table[slot_b, :longest][real_bm]
        owner_p = np.repeat(np.arange(len(slot_b)), count_b)
        index_p = (np.cumsum(real_bm, axis=1) - 1)[real_bm]
        order_bm = np.zeros(real_bm.shape, dtype=np.int64)
        low, high = int(pages_p.min()), int(pages_p.max()) + 1
        in_place = not self._gather and high - low <= _GATHER_COST * len(pages_p)
        if in_place:
            order_bm[real_bm] = pages_p - low
            owner_all, index_all = np.zeros(high - low, dtype=np.int64), np.zeros(high - low, dtype=np.int64)
            owner_all[pages_p - low], index_all[pages_p - low] = owner_p, index_p
            owner_p, index_p = owner_all, index_all
        else:
            order_bm[real_bm] = np.arange(len(pages_p))
        padding = None if real_bm.all() else self._tensor(np.where(real_bm, 0.0, HIDDEN).astype(np.float32))[:, :, None]
        return _Decode(
            rows_b=self._tensor(row_b),
            pages_p=None if in_place else self._tensor(pages_p),
            low=low,
            high=high,
            owner_p=self._tensor(owner_p),
            order_bm=self._tensor(order_bm.reshape(-1)),
            longest=longest,
            padding_bm1=padding,
            first_p1=self._tensor(index_p * PAGE)[:, None],
            query_p1=self._tensor(query_b[owner_p])[:, None],
            biases={},
        )

    def _plan_chunk(self, slot_b: Ints, start_b: Ints, new_b: Ints, row_b: Ints) -> _Chunk:
        new = int(new_b.max())
        longest = int(((start_b + new_b - 1) // PAGE).max()) + 1
        real_bn = np.arange(new) < new_b[:, None]
        column_bn = np.minimum(np.arange(new), new_b[:, None] - 1)
        rows_bn = row_b[:, None] + column_bn
        # pages beyond a slot's own are never visible; page 0 of the table stands in for them
        pages_bm = np.where(np.arange(longest) < self.pages.used[slot_b][:, None], self.pages.table[slot_b, :longest], 0)
        return _Chunk(
            rows_bn=self._tensor(rows_bn.reshape(-1)),
            keep=self._tensor(np.flatnonzero(real_bn)),
            rows=self._tensor(rows_bn[real_bn]),
            size=len(slot_b),
            new=new,
            pages_bm=self._tensor(pages_bm.reshape(-1)),
            positions_bn=self._tensor(start_b[:, None] + column_bn),
            masks={},
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _similar_shapes(start_b: Ints, new_b: Ints, chosen: Ints) -> Iterator[Ints]:
    """Split sequences into groups whose padded area (queries x keys) stays within a quarter of what they need."""
    ordered = chosen[np.lexsort((start_b[chosen], new_b[chosen]))]
    group: list[int] = []
    needed = longest = 0
    for sequence in ordered.tolist():
        new, total = int(new_b[sequence]), int(start_b[sequence] + new_b[sequence])
        padded = new * max(longest, total) * (len(group) + 1)
        if group and padded > 1.25 * (needed + new * total):
            yield np.array(group, dtype=np.int64)
            group, needed, longest = [], 0, 0
        group.append(sequence)
        needed, longest = needed + new * total, max(longest, total)
    if group:
        yield np.array(group, dtype=np.int64)


def _attend_decode(query_bhd: Tensor, plan: _Decode, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention of one query per sequence over its pages; [B, heads, value size]."""
    heads, groups = query_bhd.shape[1], query_bhd.shape[1] // keys.shape[1]
    if plan.pages_p is None:
        keys, values = keys[plan.low : plan.high], values[plan.low : plan.high]
    else:
        keys, values = keys.index_select(0, plan.pages_p), values.index_select(0, plan.pages_p)
    pages, batch = len(keys), len(plan.rows_b)
    query = query_bhd.index_select(0, plan.owner_p).view(-1, groups, query_bhd.shape[2])
    scores_phk = torch.bmm(query, keys.flatten(0, 1).transpose(1, 2)).view(pages, heads, PAGE).float()
    scores_phk += plan.bias(window)
    weights_phk = torch.softmax(scores_phk, dim=-1)
    # log-sum-exp of a page from its largest score and that score's weight
    lse_ph = scores_phk.amax(dim=-1) - weights_phk.amax(dim=-1).log()
    partial = torch.bmm(weights_phk.view(-1, groups, PAGE).to(values.dtype), values.flatten(0, 1)).view(pages, heads, -1)
    lse_bmh = lse_ph.index_select(0, plan.order_bm).view(batch, plan.longest, heads)
    if plan.padding_bm1 is not None:
        lse_bmh = lse_bmh + plan.padding_bm1
    share_bmh1 = torch.softmax(lse_bmh, dim=1)[..., None]
    partial_bmhd = partial.index_select(0, plan.order_bm).view(batch, plan.longest, heads, -1)
    return (partial_bmhd * share_bmh1.to(partial.dtype)).sum(dim=1)


def _attend_chunk(query_nhd: Tensor, plan: _Chunk, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention of several queries per sequence, padding included; [B * n, heads, value size]."""
    heads, size = query_nhd.shape[1:]
    shared = keys.shape[1]
    groups = heads // shared
    query = query_nhd.index_select(0, plan.rows_bn).view(plan.size, plan.new, shared, groups, size)
    query = query.permute(0, 2, 1, 3, 4).reshape(plan.size, shared, plan.new * groups, size)
    gathered = [
        pages.index_select(0, plan.pages_bm)
        .view(plan.size, -1, shared, PAGE, pages.shape[3])
        .transpose(1, 2)
        .reshape(plan.size, shared, -1, pages.shape[3])
        for pages in (keys, values)
    ]
    out = scaled_dot_product_attention(query, gathered[0], gathered[1], attn_mask=plan.mask(window, groups), scale=1.0)
    out = out.view(plan.size, shared, plan.new, groups, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(plan.size * plan.new, heads, -1)


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
    """The registered function: query, key, value are [1, heads, N, size]; returns [1, N, heads, size]."""
    for refused in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(refused) is not None:
            raise UnsupportedAttention(f"the model's attention uses {refused!r}")
    plan = _active.get()
    query_nhd, key_nhd, value_nhd = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    query_nhd = query_nhd * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    layer: Any = module.layer_idx
    keys, values = plan.cache.layer(layer, key_nhd, value_nhd)
    keys.transpose(1, 2)[plan.write_page_n, plan.write_offset_n] = key_nhd
    values.transpose(1, 2)[plan.write_page_n, plan.write_offset_n] = value_nhd
    window = sliding_window or 0
    if plan.decode is not None and not plan.chunks and len(plan.decode.rows_b) == len(query_nhd):
        return _attend_decode(query_nhd, plan.decode, keys, values, window)[None], None
    out = query_nhd.new_empty(len(query_nhd), query_nhd.shape[1], values.shape[3])
    if plan.decode is not None:
        rows = plan.decode.rows_b
        out[rows] = _attend_decode(query_nhd[rows], plan.decode, keys, values, window)
    for chunk in plan.chunks:
        out[chunk.rows] = _attend_chunk(query_nhd, chunk, keys, values, window)[chunk.keep]
    return out[None], None


AttentionInterface.register(NAME, _attention)
