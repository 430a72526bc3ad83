"""Soft gates: the properties that make a gate a gate, for every kernel in both domains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.algorithms import DOMAINS, KERNELS, gate, gate_slope

SOFT = [kernel for kernel in KERNELS if kernel != "identity"]
EVERY = [(kernel, domain) for kernel in KERNELS for domain in DOMAINS]
TEMPERATURES = [0.3, 1.0, 1.05, 4.0]

KERNEL = {
    "arctan": np.arctan,
    "sigmoid": lambda u: 2 * np.tanh(u / 2),
    "erf": lambda u: math.sqrt(math.pi) / 2 * np.vectorize(math.erf)(u),
    "softsign": lambda u: u / (1 + np.abs(u)),
    "identity": lambda u: u,
}
ATTENUATION = {
    "arctan": lambda u: 1 / (1 + u**2),
    "sigmoid": lambda u: 1 / np.cosh(u / 2) ** 2,
    "erf": lambda u: np.exp(-(u**2)),
    "softsign": lambda u: 1 / (1 + np.abs(u)) ** 2,
    "identity": lambda u: np.ones_like(u),
}


def grid(limit: float, points: int = 801, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-limit, limit, points, dtype=dtype)


def slope(x: Tensor, tau: float, kernel: str, domain: str) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gate(x, tau, kernel, domain).sum(), x)
    return gradient


@pytest.mark.parametrize(("kernel", "domain"), EVERY)
@pytest.mark.parametrize("tau", TEMPERATURES)
def test_gate_equals_its_formula(kernel: str, domain: str, tau: float) -> None:
    x = grid(5)
    if kernel == "identity" or domain == "log":
        expected = KERNEL[kernel](tau * x.numpy()) / tau
    else:
        expected = np.log(1 + KERNEL[kernel](tau * (np.exp(x.numpy()) - 1)) / tau)
    np.testing.assert_allclose(gate(x, tau, kernel, domain).numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kernel", "domain"), EVERY)
@pytest.mark.parametrize("tau", TEMPERATURES)
def test_on_policy_a_gate_changes_nothing(kernel: str, domain: str, tau: float) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(gate(zero, tau, kernel, domain)) == 0.0  # f(1) = 1
    assert float(slope(zero, tau, kernel, domain)) == pytest.approx(1.0, abs=1e-15)  # f'(1) = 1, as f'(1) = d ln f / d ln r at 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tau", TEMPERATURES)
def test_in_the_log_domain_the_slope_is_the_attenuation_kernel(kernel: str, tau: float) -> None:
    x = grid(20)
    np.testing.assert_allclose(slope(x, tau, kernel, "log").numpy(), ATTENUATION[kernel](tau * x.numpy()), rtol=1e-7, atol=1e-14)


@pytest.mark.parametrize(("kernel", "domain"), EVERY)
@pytest.mark.parametrize("tau", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_closed_form_slope_is_the_gradient(kernel: str, domain: str, tau: float, dtype: torch.dtype) -> None:
    x = grid(80, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(gate_slope(x, tau, kernel, domain), slope(x, tau, kernel, domain), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kernel", "domain"), EVERY)
def test_numeric_gradient(kernel: str, domain: str) -> None:
    x = torch.linspace(-4, 4, 33, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gate(x, 1.05, kernel, domain), x)


@pytest.mark.parametrize(("kernel", "domain"), EVERY)
@pytest.mark.parametrize("tau", TEMPERATURES)
def test_a_gate_is_monotone_and_never_steeper_than_the_ratio(kernel: str, domain: str, tau: float) -> None:
    x = grid(80, 4001)
    value = gate(x, tau, kernel, domain)
    assert bool((value.diff() >= -1e-13 * (1 + value.abs()[1:])).all())  # up to rounding, where it is flat
    assert bool((gate(grid(0.5), tau, kernel, domain).diff() > 0).all())
    if kernel != "identity" and domain == "log":
        assert bool((value.abs() < x.abs())[x.abs() > 1e-3].all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tau", [0.01, *TEMPERATURES, 100.0])
def test_in_the_ratio_domain_float32_is_the_rounded_exact_gate(kernel: str, tau: float) -> None:
    """h(u) - u cancels below r = 1: in float32 arithmetic the gate would neither be exact nor monotone."""
    x = grid(80, 20001, torch.float32)
    value, exact = gate(x, tau, kernel, "ratio"), gate(x.double(), tau, kernel, "ratio")
    torch.testing.assert_close(value.double(), exact, rtol=1e-7, atol=1e-30)
    torch.testing.assert_close(
        gate_slope(x, tau, kernel, "ratio").double(), gate_slope(x.double(), tau, kernel, "ratio"), rtol=1e-6, atol=1e-30
    )
    if tau in TEMPERATURES:
        assert bool((value.diff() >= 0).all())


@pytest.mark.parametrize("kernel", SOFT)
def test_a_larger_temperature_damps_sooner(kernel: str) -> None:
    x = grid(3, 100)
    for domain in DOMAINS:
        assert bool((gate(x, 2.0, kernel, domain).abs() < gate(x, 1.0, kernel, domain).abs())[x > 0].all())


@pytest.mark.parametrize(("kernel", "domain"), EVERY)
@pytest.mark.parametrize("tau", [*TEMPERATURES, 1e-4, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_gradient_are_finite_and_f_is_positive_up_to_log_ratios_of_80(
    kernel: str, domain: str, tau: float, dtype: torch.dtype
) -> None:
    x = grid(80, 1601, dtype).requires_grad_()
    value = gate(x, tau, kernel, domain)
    assert value.shape == x.shape
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert bool(torch.isfinite(value).all())  # ln f is finite: f > 0
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient >= 0).all())
    assert bool(torch.isfinite(gate_slope(x, tau, kernel, domain)).all())


def test_temperatures_broadcast() -> None:
    x = grid(2, 12).reshape(3, 4)
    tau = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    for kernel, domain in EVERY:
        rows = torch.stack([gate(x[i], float(tau[i]), kernel, domain) for i in range(3)])
        assert torch.equal(gate(x, tau, kernel, domain), rows)


def test_the_identity_gate_returns_the_log_ratio_itself() -> None:
    x = grid(80, dtype=torch.float32)
    for domain in DOMAINS:
        assert torch.equal(gate(x, 1.3, "identity", domain), x)


def test_unknown_names_and_temperatures_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown gate kernel 'cauchy'; known: arctan"):
        gate(torch.zeros(1), 1.0, "cauchy")
    with pytest.raises(ValueError, match="unknown gate domain"):
        gate(torch.zeros(1), 1.0, "arctan", "linear")
    for tau in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            gate(torch.zeros(1), tau)
