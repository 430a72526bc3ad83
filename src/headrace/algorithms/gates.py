"""Soft gates: smooth, positive stand-ins f(r) for the importance ratio r that let far-off tokens fade out instead of cutting them off.

A kernel is an odd, increasing h with h'(0) = 1 and |h(u)| < |u| for u != 0. With the temperature tau > 0,

    domain "log":   f(r) = exp(h(tau ln r) / tau)          d ln f / d ln r = h'(tau ln r)
    domain "ratio": f(r) = 1 + h(tau (r - 1)) / tau        d ln f / d ln r = h'(tau (r - 1)) r / f(r)

so that f(1) = f'(1) = 1: on-policy a gate changes nothing. A larger tau damps sooner.

| kernel | h(u) | h'(u), the attenuation |
| --- | --- | --- |
| ``arctan`` | arctan u | 1 / (1 + u^2), Cauchy |
| ``sigmoid`` | 2 tanh(u / 2) | sech^2(u / 2), logistic |
| ``erf`` | (sqrt(pi) / 2) erf(u) | exp(-u^2), Gaussian |
| ``softsign`` | u / (1 + abs(u)) | 1 / (1 + abs(u))^2 |
| ``identity`` | u | 1: no gate |

The arctangent gate on the log-ratio, with separate temperatures by the sign of the advantage, is SSPO's (arXiv 2602.19327); soft
gates in general: arXiv 2602.19345. The published scaling of the argument and the temperatures' values were not available: this
parametrization is Headrace's own, chosen so that every property above holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Kernel = Literal["arctan", "sigmoid", "erf", "softsign", "identity"]
Domain = Literal["log", "ratio"]
KERNELS: tuple[str, ...] = get_args(Kernel)
DOMAINS: tuple[str, ...] = get_args(Domain)

_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "arctan": torch.atan,
    "sigmoid": lambda u: 2 * torch.tanh(u / 2),
    "erf": lambda u: (math.sqrt(math.pi) / 2) * torch.erf(u),
    "softsign": lambda u: u / (1 + u.abs()),
    "identity": lambda u: u,
}
_SLOPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "arctan": lambda u: 1 / (1 + u * u),
    "sigmoid": lambda u: 1 - torch.tanh(u / 2).square(),
    "erf": lambda u: torch.exp(-u * u),
    "softsign": lambda u: (1 / (1 + u.abs())).square(),
    "identity": torch.ones_like,
}
# Beyond ln r = 60 every kernel has reached its limit to within 1e-26; capping there keeps tau (r - 1) far from float32's overflow.
_SATURATED = 60.0


def gate(ratio_log: Tensor, tau: float | Tensor, kernel: str = "arctan", domain: str = "log") -> Tensor:
    """``ln f(r)`` for ``ratio_log = ln r``, any shape; ``tau`` is a number or a tensor that broadcasts against it.

    Computed in float32 or better, whatever comes in; returned in that dtype with the shape of ``ratio_log``. Value and gradient are
    finite for ln r in [-80, 80]. The gradient is :func:`gate_slope`, differentiable once and with respect to ``ratio_log`` only. Raises
    ValueError for an unknown kernel or domain and for a number tau that is not positive.
    """
    check_gate(kernel, domain)
    if not isinstance(tau, Tensor) and not 0 < tau < math.inf:
        raise ValueError(f"the temperature tau must be positive and finite, got {tau}")
    x = ratio_log.to(torch.promote_types(ratio_log.dtype, torch.float32))
    return cast(Tensor, _Gate.apply(x, tau, kernel, domain))  # type: ignore[no-untyped-call]


def gate_slope(ratio_log: Tensor, tau: float | Tensor, kernel: str = "arctan", domain: str = "log") -> Tensor:
    """``d ln f / d ln r``: how much of a token's gradient the gate lets through.

    Shapes, dtypes and errors as in :func:`gate`; the result carries no gradient.
    """
    check_gate(kernel, domain)
    with torch.no_grad():
        x = ratio_log.to(torch.promote_types(ratio_log.dtype, torch.float32))
        if domain == "log" or kernel == "identity":
            return _SLOPES[kernel](tau * x)
        exact = x.clamp(max=_SATURATED).to(torch.float64)
        slope = _SLOPES[kernel](tau * torch.expm1(exact)) * torch.exp(exact - _log_ratio_gate(exact, tau, kernel))
        return slope.to(x.dtype)


class _Gate(torch.autograd.Function):
    """The gate with its closed-form slope: automatic differentiation would cancel to noise, and to negative slopes, far from r = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tau: float | Tensor, kernel: str, domain: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gate = (tau, kernel, domain)
        return _log_gate(x, tau, kernel, domain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        return upstream * gate_slope(x, *ctx.gate), None, None, None


def _log_gate(x: Tensor, tau: float | Tensor, kernel: str, domain: str) -> Tensor:
    if kernel == "identity":
        return x.clone()
    if domain == "log":
        return _VALUES[kernel](tau * x) / tau
    return _log_ratio_gate(x.clamp(max=_SATURATED).to(torch.float64), tau, kernel).to(x.dtype)


def _log_ratio_gate(x: Tensor, tau: float | Tensor, kernel: str) -> Tensor:
    """``ln(1 + h(tau (r - 1)) / tau)`` for float64 ``x = ln r``: h - u cancels, and float32 would make a gate that is not monotone."""
    u = tau * torch.expm1(x)
    h = _VALUES[kernel](u)
    # f = 1 + h / tau = r + (h - u) / tau. Below r = 1 the second form has two positive summands, so that f never rounds to 0.
    below = torch.log(torch.exp(x) + (h - u).clamp(min=0) / tau)
    return torch.where(x < 0, below, torch.log1p(h.clamp(min=0) / tau))


def check_gate(kernel: str, domain: str) -> None:
    """Raise ValueError unless both names are known."""
    if kernel not in KERNELS:
        raise ValueError(f"unknown gate kernel {kernel!r}; known: {', '.join(KERNELS)}")
    if domain not in DOMAINS:
        raise ValueError(f"unknown gate domain {domain!r}; known: {', '.join(DOMAINS)}")
