"""Float32 linear layers on CPUs through oneDNN where that is faster.

PyTorch sends float32 products to MKL, whose kernels use half of the vector width on processors that are not Intel's;
oneDNN, which PyTorch also carries, compiles AVX-512 kernels for every shape it meets. From 16 rows on it is up to twice
as fast there and never much slower elsewhere. A kernel for a new shape takes about a millisecond and a megabyte, so the
number of rows must come from a short list: ``padded_rows``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

_LEAST_ROWS = 16


def padded_rows(rows: int) -> int:
    """The next number of rows from a list with at most an eighth more (steps of an eighth of the next power of two, at least 16)."""
    if rows < _LEAST_ROWS:
        return rows
    step = max(_LEAST_ROWS, 1 << max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def accelerate_linears(model: nn.Module) -> int:
    """Let the plain linear layers of ``model`` use oneDNN for float32 inputs; the number of layers changed (0: no use here)."""
    if not _useful():
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [..., in] times weight [out, in] plus bias, for inference; oneDNN takes padded float32 rows."""
    rows = inputs.numel() // inputs.shape[-1]
    if rows < _LEAST_ROWS or inputs.dtype != torch.float32 or rows != padded_rows(rows):
        return nn.functional.linear(inputs, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    return linear(inputs, layer.weight, layer.bias)


def _useful() -> bool:
    available = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(available and torch.backends.cpu.get_cpu_capability() == "AVX512")
