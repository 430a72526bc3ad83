"""Paged attention by a small C kernel (``paged_attention.c``), compiled on first use where the machine has a C compiler.

A decode step of a small model spends most of its time in attention, on many short dot products for which general matrix
kernels are a poor fit; the compiled loop reads every key and value once, at memory speed, without temporaries. Without a
compiler, or wherever its results would differ, ``torch_pages`` does the same work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.rollout.paged_attention import HeadShape, PagedCache, UnsupportedAttention
from headrace.rollout.pages import PAGE, Ints

_SOURCE = Path(__file__).with_name("paged_attention.c")
_FUNCTIONS = {torch.float32: "headrace_attend_f32", torch.bfloat16: "headrace_attend_bf16"}
_LONGEST_HEAD = 512


class NativeUnavailable(RuntimeError):
    """The kernel cannot be compiled or loaded here; the message says why."""


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "shared", "size", "value_size", "window", "pages_per_slot")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")),
        ("scale", ctypes.c_float),
    )


@functools.cache
def load_kernel() -> ctypes.CDLL:
    """The compiled kernel, from the user's cache or compiled now (about two seconds)."""
    compiler = next((path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler (cc, gcc or clang) was found")
    command = [compiler, "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", str(_SOURCE)]
    name = f"paged-attention-{_fingerprint(command)}.so"
    for folder in (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace",
        Path(tempfile.mkdtemp(prefix="headrace-")),
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _load(folder / name, command)
        except OSError:
            continue  # a read-only home, or a file system without executables: the temporary folder may do
    raise NativeUnavailable("the compiled kernel could be neither written nor loaded")


def _load(library: Path, command: list[str]) -> ctypes.CDLL:
    if not library.exists():
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as partial:
            pass
        try:
            done = subprocess.run([*command, "-o", partial.name], capture_output=True, text=True, timeout=120)
            if done.returncode:
                raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
            os.replace(partial.name, library)  # complete or absent, also when several processes compile
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{command[0]} took more than two minutes") from None
        finally:
            Path(partial.name).unlink(missing_ok=True)
    return ctypes.CDLL(str(library))


def _fingerprint(command: list[str]) -> str:
    """Of everything that the machine code depends on: source, command, compiler and processor."""
    processor = platform.processor() + platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        processor += "".join(
            sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "model name", "Features"))})
        )
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=30).stdout
    return hashlib.sha256("\n".join([_SOURCE.read_text(), *command[1:-1], version, processor]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Plan:
    slot_b: Ints
    start_b: Ints
    new_b: Ints
    row_b: Ints
    total: int
    pointers: tuple[ctypes.c_void_p, ...]


class NativePagedCache(PagedCache[_Plan]):
    """Keys as [capacity, key/value heads, size, PAGE], values as [.., PAGE, size]; float32 or bfloat16 on the CPU."""

    def __init__(self, slots: int, context_limit: int) -> None:
        super().__init__(slots, context_limit)
        self._kernel = load_kernel()

    def plan(self, slot_b: Ints, start_b: Ints, new_b: Ints, row_b: Ints) -> _Plan:
        arrays = self.pages.table, slot_b, start_b, new_b, row_b
        return _Plan(slot_b, start_b, new_b, row_b, int(new_b.sum()), tuple(map(_address, arrays)))

    def attend(self, plan: _Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
        name = _FUNCTIONS.get(query.dtype)
        if name is None or query.device.type != "cpu" or max(query.shape[2], value.shape[2]) > _LONGEST_HEAD:
            raise UnsupportedAttention(f"the native kernel does not take {query.dtype} on {query.device} with heads of {query.shape[2]}")
        query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
        keys, values = self.layer(layer, key, HeadShape(key.shape[1], key.shape[2], PAGE), HeadShape(value.shape[1], PAGE, value.shape[2]))
        out = query.new_empty(len(query), query.shape[1], value.shape[2])
        out[plan.total :].zero_()
        sizes = len(plan.slot_b), query.shape[1], key.shape[1], key.shape[2], value.shape[2], window, self.pages.pages_per_slot
        strides = (tensor.stride(i) for tensor in (query, key, value) for i in (0, 1))
        shape = _Shape(*sizes, *strides, scaling)
        tensors = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (query, key, value, keys, values))
        getattr(self._kernel, name)(ctypes.byref(shape), *tensors, *plan.pointers, ctypes.c_void_p(out.data_ptr()))
        return out


def _address(array: Ints) -> ctypes.c_void_p:
    assert array.flags.c_contiguous and array.dtype == np.int64
    return ctypes.c_void_p(array.ctypes.data)
