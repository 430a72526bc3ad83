"""Random batches that every test of the objectives shares."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Log-probabilities [n, t] and what goes with them; row ``n - 1`` has no action tokens where ``with_empty_row``."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor

    def leaf(self) -> Tensor:
        return self.logprobs.detach().clone().requires_grad_()


def make_batch(
    seed: int, n: int = 7, t: int = 11, *, spread: float = 0.5, dtype: torch.dtype = torch.float64, with_empty_row: bool = False
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -normal(n, t).abs()
    old = logprobs + spread * normal(n, t)
    rollout = old + spread * normal(n, t)
    mask = torch.rand(n, t, generator=generator) < 0.7
    mask[:, 0] = True
    if with_empty_row:
        mask[-1] = False
    return Batch(logprobs.to(dtype), old.to(dtype), rollout.to(dtype), normal(n).to(dtype), mask)


@pytest.fixture(name="make_batch")
def make_batch_fixture() -> object:
    return make_batch
