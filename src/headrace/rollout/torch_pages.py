"""Paged attention with PyTorch's own operations, on any device and in any precision.

Sequences with few new tokens (decoding, short observations) take one batched product over all their pages at once, then
the pages' partial softmaxes are combined by their log-sum-exp (Milakov and Gimelshein 2018; split-KV decoding). Nothing
is padded but each sequence's last page, so ragged lengths cost nothing; where the pages in use lie densely in the pool,
they are read in place and not gathered. For sequences with many new tokens (prompts, long observations) the pages are
gathered, and a masked scaled dot-product attention runs for each group of similar shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.rollout.paged_attention import HeadShape, PagedCache
from headrace.rollout.pages import PAGE, Ints

# finite, so that a page without a visible key has a defined softmax and then the weight zero
HIDDEN = -1e30
# up to so many new tokens of a sequence, attention goes page by page; above, over gathered pages
SPLIT_UP_TO = 24
# a page read in place costs one read; a gathered one about three (read, write, read)
_GATHER_COST = 2.5


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that attend together: B sequences, new tokens padded to n (padding repeats a sequence's last one)."""

    size: int  # B
    new: int  # n
    rows_bn: Tensor | None  # [B * n] places in the flat row; None: the whole flat row as it is
    keep: Tensor | None  # which of [B * n] are real, None: all
    rows: Tensor | None  # and their places in the flat row
    positions_bn: Tensor


@dataclass(frozen=True, slots=True)
class _Split:
    """Attention page by page, for few new tokens: P pages are looked at, ``owner_p`` names each one's sequence."""

    group: _Group
    pages_p: Tensor | None  # gathered pages; None: the pool's slice [low, high) in place
    low: int
    high: int
    owner_p: Tensor
    first_p: Tensor  # position of each page's first key
    order_bm: Tensor  # [B * M] indices into P, sequence by sequence, padded with any page
    longest: int  # M
    padding_bm: Tensor | None  # [B, M]: 0 or HIDDEN; None without padding
    biases: dict[tuple[int, int], Tensor]

    def bias(self, window: int, groups: int) -> Tensor:
        """[P, 1, n * groups, PAGE], added to scores: HIDDEN where the key is later than the query or outside a sliding
        window (0: none)."""
        found = self.biases.get((window, groups))
        if found is None:
            query_pn1 = self.group.positions_bn.index_select(0, self.owner_p)[:, :, None]
            found = _bias(query_pn1, self.first_p[:, None, None] + torch.arange(PAGE, device=query_pn1.device), window)
            if self.group.new > 1 and groups > 1:
                found = found.repeat_interleave(groups, dim=1)
            found = self.biases[window, groups] = found[:, None]
        return found


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Attention over gathered pages, for many new tokens: keys padded to M pages."""

    group: _Group
    pages_bm: Tensor  # [B * M]
    biases: dict[tuple[int, int], Tensor]

    def bias(self, window: int, groups: int) -> Tensor:
        """[B, 1, n * groups, M * PAGE] as in ``_Split``."""
        found = self.biases.get((window, groups))
        if found is None:
            keys = torch.arange(len(self.pages_bm) // self.group.size * PAGE, device=self.pages_bm.device)
            found = _bias(self.group.positions_bn[:, :, None], keys, window).repeat_interleave(groups, dim=1)
            found = self.biases[window, groups] = found[:, None]
        return found


def _bias(query: Tensor, keys: Tensor, window: int) -> Tensor:
    hidden = keys > query
    if window:
        hidden |= keys <= query - window
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, HIDDEN)


@dataclass(frozen=True, slots=True)
class _Plan:
    total: int
    write_page_n: Tensor
    write_offset_n: Tensor
    parts: tuple[_Split | _Chunk, ...]


class TorchPagedCache(PagedCache[_Plan]):
    """Keys and values as [capacity, key/value heads, PAGE, size]. ``gather``: always, so that a result depends on its sequence alone."""

    def __init__(self, slots: int, context_limit: int, device: torch.device, *, gather: bool = False) -> None:
        super().__init__(slots, context_limit)
        self._device = device
        self._gather = gather

    def plan(self, slot_b: Ints, start_b: Ints, new_b: Ints, row_b: Ints) -> _Plan:
        owner_n = np.repeat(np.arange(len(slot_b)), new_b)
        position_n = np.arange(len(owner_n)) - row_b[owner_n] + start_b[owner_n]
        parts: list[_Split | _Chunk] = []
        for chosen in _similar_shapes(start_b, new_b):
            group = self._group(start_b[chosen], new_b[chosen], row_b[chosen], len(owner_n))
            make = self._split if group.new <= SPLIT_UP_TO else self._chunk
            parts.append(make(group, slot_b[chosen], start_b[chosen] + new_b[chosen]))
        page_n = self.pages.table[slot_b[owner_n], position_n // PAGE]
        return _Plan(len(owner_n), self._tensor(page_n), self._tensor(position_n % PAGE), tuple(parts))

    def attend(self, plan: _Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
        keys, values = self.layer(layer, key, HeadShape(key.shape[1], PAGE, key.shape[2]), HeadShape(value.shape[1], PAGE, value.shape[2]))
        keys.transpose(1, 2)[plan.write_page_n, plan.write_offset_n] = key[: plan.total]
        values.transpose(1, 2)[plan.write_page_n, plan.write_offset_n] = value[: plan.total]
        real = query[: plan.total] * scaling
        out = query.new_zeros(len(query), query.shape[1], value.shape[2])
        for part in plan.parts:
            group = part.group
            rows = real if group.rows_bn is None else real.index_select(0, group.rows_bn)
            if isinstance(part, _Split):
                done = _attend_split(rows, part, keys, values, window)
            else:
                done = _attend_chunk(rows, part, keys, values, window)
            if group.rows is None:
                out[: plan.total] = done
            else:
                out.index_copy_(0, group.rows, done if group.keep is None else done.index_select(0, group.keep))
        return out

    def _group(self, start_b: Ints, new_b: Ints, row_b: Ints, total: int) -> _Group:
        new = int(new_b.max())
        column_bn = np.minimum(np.arange(new), new_b[:, None] - 1)
        real_bn = np.arange(new) < new_b[:, None]
        rows_bn = row_b[:, None] + column_bn
        # a group that is the flat row in order needs no indices
        whole = real_bn.size == total and bool((rows_bn.reshape(-1) == np.arange(total)).all())
        return _Group(
            size=len(new_b),
            new=new,
            rows_bn=None if whole else self._tensor(rows_bn.reshape(-1)),
            keep=None if real_bn.all() else self._tensor(np.flatnonzero(real_bn)),
            rows=None if whole else self._tensor(rows_bn[real_bn]),
            positions_bn=self._tensor(start_b[:, None] + column_bn),
        )

    def _split(self, group: _Group, slot_b: Ints, length_b: Ints) -> _Split:
        count_b = (length_b - 1) // PAGE + 1
        longest = int(count_b.max())
        real_bm = np.arange(longest) < count_b[:, None]
        pages_p = self.pages.table[slot_b, :longest][real_bm]
        owner_p, index_p = np.nonzero(real_bm)
        order_bm = np.zeros(real_bm.shape, dtype=np.int64)
        low, high = int(pages_p.min()), int(pages_p.max()) + 1
        in_place = not self._gather and high - low <= _GATHER_COST * len(pages_p)
        if in_place:
            order_bm[real_bm] = pages_p - low
            owners, indices = np.zeros(high - low, dtype=np.int64), np.zeros(high - low, dtype=np.int64)
            owners[pages_p - low], indices[pages_p - low] = owner_p, index_p
            owner_p, index_p = owners, indices
        else:
            order_bm[real_bm] = np.arange(len(pages_p))
        return _Split(
            group=group,
            pages_p=None if in_place else self._tensor(pages_p),
            low=low,
            high=high,
            owner_p=self._tensor(owner_p),
            first_p=self._tensor(index_p * PAGE),
            order_bm=self._tensor(order_bm.reshape(-1)),
            longest=longest,
            padding_bm=None if real_bm.all() else self._tensor(np.where(real_bm, 0.0, HIDDEN).astype(np.float32)),
            biases={},
        )

    def _chunk(self, group: _Group, slot_b: Ints, length_b: Ints) -> _Chunk:
        longest = (int(length_b.max()) - 1) // PAGE + 1
        # pages beyond a slot's own are never visible; page 0 of the pool stands in for them
        pages_bm = np.where(np.arange(longest) < self.pages.used[slot_b][:, None], self.pages.table[slot_b, :longest], 0)
        return _Chunk(group, self._tensor(pages_bm.reshape(-1)), {})

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _similar_shapes(start_b: Ints, new_b: Ints) -> Iterator[Ints]:
    """Split sequences into groups: single tokens; few tokens, of not too different numbers; many tokens, as long as the
    padded area (queries x keys) stays within a quarter of what is needed."""
    ordered = np.lexsort((start_b, new_b))
    group: list[int] = []
    needed = longest = 0
    for sequence in ordered.tolist():
        new, total = int(new_b[sequence]), int(start_b[sequence] + new_b[sequence])
        if group:
            first = int(new_b[group[0]])
            if new <= SPLIT_UP_TO:
                apart = (first == 1) != (new == 1) or new > 2 * first + 4
            else:
                apart = first <= SPLIT_UP_TO or new * max(longest, total) * (len(group) + 1) > 1.25 * (needed + new * total)
            if apart:
                yield np.array(group, dtype=np.int64)
                group, needed, longest = [], 0, 0
        group.append(sequence)
        needed, longest = needed + new * total, max(longest, total)
    yield np.array(group, dtype=np.int64)


def _attend_split(query: Tensor, plan: _Split, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention page by page; query [B * n, heads, size], result [B * n, heads, value size]."""
    group, heads, shared = plan.group, query.shape[1], keys.shape[1]
    groups, batch = heads // shared, group.size
    width = group.new * groups  # query rows of one key/value head
    if plan.pages_p is None:
        keys, values = keys[plan.low : plan.high], values[plan.low : plan.high]
    else:
        keys, values = keys.index_select(0, plan.pages_p), values.index_select(0, plan.pages_p)
    pages = len(keys)
    query = _packed(query, group, shared).flatten(1).index_select(0, plan.owner_p).view(pages * shared, width, -1)
    scores = torch.bmm(query, keys.flatten(0, 1).transpose(1, 2)).view(pages, shared, width, PAGE).float()
    scores += plan.bias(window, groups)
    weights = torch.softmax(scores, dim=-1)
    # log-sum-exp of a page from its largest score and that score's weight
    lse = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    partial = torch.bmm(weights.view(-1, width, PAGE).to(values.dtype), values.flatten(0, 1)).view(pages, shared * width, -1)
    lse_bmr = lse.view(pages, -1).index_select(0, plan.order_bm).view(batch, plan.longest, -1)
    if plan.padding_bm is not None:
        lse_bmr = lse_bmr + plan.padding_bm[:, :, None]
    share_bmr = torch.softmax(lse_bmr, dim=1)
    partial_bmrd = partial.index_select(0, plan.order_bm).view(batch, plan.longest, shared * width, -1)
    out_brd = (partial_bmrd * share_bmr.to(partial.dtype)[..., None]).sum(dim=1)
    return _unpacked(out_brd, group, shared)


def _attend_chunk(query: Tensor, plan: _Chunk, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention over gathered pages; shapes as in ``_attend_split``."""
    group, shared = plan.group, keys.shape[1]
    groups = query.shape[1] // shared
    gathered = [
        pages.index_select(0, plan.pages_bm)
        .view(group.size, -1, shared, PAGE, pages.shape[3])
        .transpose(1, 2)
        .reshape(group.size, shared, -1, pages.shape[3])
        for pages in (keys, values)
    ]
    bias = plan.bias(window, groups).to(query.dtype)
    out = scaled_dot_product_attention(_packed(query, group, shared), gathered[0], gathered[1], attn_mask=bias, scale=1.0)
    return _unpacked(out, group, shared)


def _packed(query: Tensor, group: _Group, shared: int) -> Tensor:
    """[B * n, heads, size] -> [B, key/value heads, n * queries per head, size]."""
    heads, size = query.shape[1:]
    if group.new == 1:
        return query.view(group.size, shared, heads // shared, size)
    query = query.view(group.size, group.new, shared, heads // shared, size).transpose(1, 2)
    return query.reshape(group.size, shared, -1, size)


def _unpacked(out: Tensor, group: _Group, shared: int) -> Tensor:
    """The inverse of ``_packed`` for results, key/value heads and rows flattened or not."""
    out = out.reshape(group.size, shared, group.new, -1, out.shape[-1])
    return out.transpose(1, 2).reshape(group.size * group.new, -1, out.shape[-1])
