"""Paged attention by the compiled kernel, for float32 and bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.rollout.kernels import LONGEST_HEAD, AttendShape, Kernels
from headrace.rollout.paged_attention import HeadShape, PagedCache, UnsupportedAttention
from headrace.rollout.pages import PAGE, Ints


@dataclass(frozen=True, slots=True)
class NativePlan:
    """``pointers`` point into ``arrays``: the page table, then each sequence's slot, start, count and first row."""

    arrays: tuple[Ints, ...]
    pointers: tuple[int, ...]
    sequences: int
    total: int


class NativePagedCache(PagedCache[NativePlan]):
    """Keys as [capacity, key/value heads, size, PAGE], values as [.., PAGE, size]."""

    def __init__(self, slots: int, context_limit: int, dtype: torch.dtype) -> None:
        super().__init__(slots, context_limit)
        self._dtype = dtype
        self.kernels = Kernels(dtype)

    def plan(self, slot_b: Ints, start_b: Ints, new_b: Ints, row_b: Ints) -> NativePlan:
        arrays = self.pages.table, slot_b, start_b, new_b, row_b
        return NativePlan(arrays, tuple(array.ctypes.data for array in arrays), len(slot_b), int(new_b.sum()))

    def attend(self, plan: NativePlan, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
        heads, size = query.shape[1:]
        shared, value_size = value.shape[1:]
        if query.dtype != self._dtype or query.device.type != "cpu" or max(size, value_size) > LONGEST_HEAD:
            raise UnsupportedAttention(f"the compiled kernel does not take {query.dtype} on {query.device} with heads of {size}")
        query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
        keys, values = self.layer(layer, key, HeadShape(shared, size, PAGE), HeadShape(shared, PAGE, value_size))
        out = query.new_empty(len(query), heads, value_size)
        if plan.total < len(query):
            out[plan.total :].zero_()
        sizes = plan.sequences, heads, shared, size, value_size, window, self.pages.pages_per_slot
        strides = query.stride()[:2] + key.stride()[:2] + value.stride()[:2]
        shape = AttendShape(*sizes, *strides, scaling)
        tensors = query.data_ptr(), key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr()
        self.kernels.attend(ctypes.byref(shape), *tensors, *plan.pointers, out.data_ptr())
        return out
