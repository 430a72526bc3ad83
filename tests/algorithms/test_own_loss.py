"""The example of a loss in a file of one's own keeps every promise that the built-in ones keep."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algorithms import BatchTotals, Recipe, recipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loss.py"
MakeBatch = Callable[..., Any]


@pytest.fixture(scope="module", name="example")
def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("own_loss", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def expected(batch: Any) -> float:
    ratio = np.exp((batch.logprobs - batch.old).numpy())
    a = batch.advantages.numpy()[:, None]
    return -float((ratio * a - np.abs(a) / 0.4 * (ratio - 1) ** 2)[batch.mask.numpy()].mean())


def test_it_is_its_formula(example: Any, make_batch: MakeBatch) -> None:
    batch = make_batch(1, with_empty_row=True)
    leaf = batch.leaf()
    assert example.objective(leaf, batch.old, batch.advantages, batch.mask).loss.item() == pytest.approx(expected(batch), rel=1e-12)
    assert torch.autograd.gradcheck(lambda lp: example.objective(lp, batch.old, batch.advantages, batch.mask).loss, leaf)


def test_as_a_plain_function_it_is_the_same_loss(example: Any, make_batch: MakeBatch) -> None:
    batch = make_batch(2, dtype=torch.float32)
    leaf = batch.leaf()
    result = example.plain_objective(leaf, batch.old, batch.advantages, batch.mask)
    mine = example.objective(batch.logprobs, batch.old, batch.advantages, batch.mask)
    torch.testing.assert_close(result.loss.detach(), mine.loss)
    result.loss.backward()
    assert bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("form", ["objective", "plain_objective"])
def test_masks_and_micro_batches_work_without_a_line_of_its_own(example: Any, form: str, make_batch: MakeBatch) -> None:
    batch = make_batch(3, n=6, dtype=torch.float32)
    objective = getattr(example, form)
    whole = objective(batch.logprobs, batch.old, batch.advantages, batch.mask)
    dirty = batch.logprobs.masked_fill(~batch.mask, math.nan)
    totals = BatchTotals.of(batch.mask)
    parts = [
        objective(dirty[rows], batch.old[rows], batch.advantages[rows], batch.mask[rows], totals=totals).loss
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole.loss), rel=1e-5)


def test_it_fits_into_a_recipe(example: Any) -> None:
    mine = replace(recipe("spo++"), name="mine", objective=example.objective, measure="aligned")
    assert isinstance(mine, Recipe)
    assert mine.resolved_measure == "action-token"
    assert Recipe(name="plain", objective=example.plain_objective).objective is example.plain_objective
