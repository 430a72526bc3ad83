"""The compiled kernels of ``kernels.c``: found in the user's cache, or compiled on first use where there is a C compiler.

A decode step of a small model spends most of its time in attention, on many short dot products for which general matrix
kernels are a poor fit, and in the dispatch of small operations. The compiled loops read every key and value once, at
memory speed, without temporaries.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("kernels.c")
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
LONGEST_HEAD = 512

_int, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class NativeUnavailable(RuntimeError):
    """The kernels cannot be compiled, loaded or used here; the message says why."""


class AttendShape(ctypes.Structure):
    """The C struct ``Shape``: sizes, then strides in elements."""

    _fields_ = (
        *((name, _int) for name in ("sequences", "heads", "shared", "size", "value_size", "window", "pages_per_slot")),
        *((name, _int) for name in ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")),
        ("scale", _float),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "attend": [ctypes.POINTER(AttendShape), *[_pointer] * 11],
    "norm": [_int, _int, _int, _pointer, _pointer, _pointer, _float, _pointer],
    "rotate": [_int, _int, _int, _int, _pointer, _pointer, _pointer],
    "gate": [_int, _int, _pointer, _pointer],
}


class Kernels:
    """The kernels for one precision. ``attend`` is the C function itself; the others take tensors with contiguous rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _SUFFIXES:
            raise NativeUnavailable(f"there are no kernels for {dtype}, only for float32 and bfloat16")
        library = _library()
        functions = {name: getattr(library, f"headrace_{name}_{_SUFFIXES[dtype]}") for name in _SIGNATURES}
        for name, function in functions.items():
            function.argtypes, function.restype = _SIGNATURES[name], None
        self.attend = functions["attend"]
        self._norm, self._rotate, self._gate = functions["norm"], functions["rotate"], functions["gate"]

    def norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """x += delta; out = x / sqrt(mean(x^2) + eps) * weight over the last axis, [rows, size]."""
        rows, size = x.shape
        self._norm(rows, size, size, x.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), eps, out.data_ptr())
        return out

    def norm_heads(self, x: Tensor, first: int, heads: int, size: int, weight: Tensor, eps: float) -> None:
        """The same in place for heads ``first`` .. ``first + heads`` of every row of x [rows, heads * size]."""
        width = x.shape[1]
        start = x.data_ptr() + first * size * x.element_size()
        for head in range(heads):
            place = start + head * size * x.element_size()
            self._norm(len(x), width, size, place, None, weight.data_ptr(), eps, place)

    def rotate(self, x: Tensor, heads: int, size: int, cosine: Tensor, sine: Tensor) -> None:
        """Rotary embedding in place on the first ``heads`` heads of every row; cosine and sine float32 [rows, size / 2]."""
        self._rotate(len(x), x.shape[1], heads, size, x.data_ptr(), cosine.data_ptr(), sine.data_ptr())

    def gate(self, both: Tensor, out: Tensor) -> Tensor:
        """silu(first half) * second half of every row."""
        self._gate(len(both), out.shape[1], both.data_ptr(), out.data_ptr())
        return out


@functools.cache
def _library() -> ctypes.CDLL:
    """From the user's cache, or compiled now (a few seconds)."""
    compiler = next((path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable("no C compiler (cc, gcc or clang) was found")
    command = [compiler, "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", str(_SOURCE), "-lm"]
    name = f"kernels-{_fingerprint(command)}.so"
    for folder in (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace",
        Path(tempfile.mkdtemp(prefix="headrace-")),
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _load(folder / name, command)
        except OSError:
            continue  # a read-only home, or a file system without executables: the temporary folder may do
    raise NativeUnavailable("the compiled kernels could be neither written nor loaded")


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
    return hashlib.sha256("\n".join([_SOURCE.read_text(), *command[1:-2], version, processor]).encode()).hexdigest()[:16]
