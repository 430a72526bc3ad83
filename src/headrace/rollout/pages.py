"""Pages of a key/value cache: which of them hold which sequence's tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE = 64
Ints = NDArray[np.int64]


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
