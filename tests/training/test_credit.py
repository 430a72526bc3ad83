"""Trajectories to advantages."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from headrace.algorithms import RECIPES, recipe
from headrace.rollout.trajectory import Trajectory
from headrace.training.credit import credit


def attempt(
    tiny: Any, number: int, actions: int, outcome: float, value: tuple[float, float] | None = (1.0, 1.0), group: int | None = None
) -> Trajectory:
    """``actions`` action tokens, over two rows where there is more than one."""
    half = (actions + 1) // 2
    rows = [tiny.row(random.Random(number), count + 3, actions=[(3, count + 3)]) for count in (half, actions - half) if count]
    return tiny.trajectory(number, rows, outcome=outcome, value=value, group=group)


def test_raw_advantage_is_outcome_minus_frozen_value(tiny: Any) -> None:
    batch = [attempt(tiny, 0, 2, 1.0, (1.0, 3.0)), attempt(tiny, 1, 6, 0.0, (3.0, 1.0)), attempt(tiny, 2, 4, 0.5, (1.0, 1.0))]
    result = credit(batch, recipe("spo++"))
    assert result.raw == (0.75, -0.75, 0.0)
    assert result.action_tokens == (2, 6, 4)
    # Action-token mean (2 * .75 - 6 * .75) / 12 = -.25; squares 2 * 1 + 6 * .25 + 4 * .0625 = 3.75 over 11.
    sigma = math.sqrt(3.75 / 11)
    assert result.advantages == pytest.approx([1.0 / sigma, -0.5 / sigma, 0.25 / sigma])
    assert result.actor_residual == pytest.approx(0.0, abs=1e-12)
    assert result.length_covariance == pytest.approx((-2 * 0.75 - 2 * 0.75) / 3)
    assert (result.measure, result.cells, result.degenerate) == ("action-token", 1, 0)


def test_the_residual_of_the_trajectory_measure_is_covariance_over_mean_length(tiny: Any) -> None:
    batch = [attempt(tiny, 0, 2, 1.0), attempt(tiny, 1, 9, 0.0), attempt(tiny, 2, 4, 1.0), attempt(tiny, 3, 7, 0.0)]
    result = credit(batch, recipe("spo"))
    lengths, advantages = result.action_tokens, result.advantages
    mean_length = sum(lengths) / 4
    covariance = sum((length - mean_length) * advantage for length, advantage in zip(lengths, advantages, strict=True)) / 4
    assert result.actor_residual == pytest.approx(covariance / mean_length)
    assert result.actor_residual < -0.1


def test_group_methods_compare_siblings_and_count_groups_without_spread(tiny: Any) -> None:
    outcomes = [(0, 1.0), (1, 1.0), (0, 0.0), (1, 1.0)]
    batch = [attempt(tiny, number, 3, outcome, None, group) for number, (group, outcome) in enumerate(outcomes)]
    result = credit(batch, recipe("grpo"))
    assert result.raw == (1.0, 1.0, 0.0, 1.0)
    assert result.advantages == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5), 0.0])
    assert (result.cells, result.degenerate) == (2, 1)


def test_a_batch_of_equal_advantages_is_degenerate_and_gives_zeros(tiny: Any) -> None:
    result = credit([attempt(tiny, number, 3 + number, 1.0) for number in range(3)], recipe("spo++"))
    assert result.advantages == (0.0, 0.0, 0.0)
    assert result.degenerate == 1


def test_statistics_are_over_the_whole_batch_and_in_its_order(tiny: Any) -> None:
    batch = [attempt(tiny, number, 1 + number % 5, float(number % 3 == 0), (1.0 + number, 2.0)) for number in range(9)]
    forwards, backwards = credit(batch, recipe("spo++")), credit(batch[::-1], recipe("spo++"))
    assert backwards.advantages[::-1] == pytest.approx(forwards.advantages, rel=1e-12)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_the_same_numbers_twice(tiny: Any, name: str) -> None:
    batch = [attempt(tiny, number, 1 + number % 5, float(number % 3 == 0), (1.0 + number, 2.0), number // 4) for number in range(8)]
    assert credit(batch, recipe(name)) == credit(list(batch), recipe(name))


def test_what_may_not_enter_a_batch_is_named(tiny: Any) -> None:
    good = attempt(tiny, 0, 3, 1.0)
    with pytest.raises(ValueError, match=r"dispatch 7 \(task-7\) has no score"):
        credit([good, attempt(tiny, 7, 3, math.nan)], recipe("spo++"))
    with pytest.raises(ValueError, match=r"dispatch 8 \(task-8\) has no action tokens"):
        credit([good, attempt(tiny, 8, 0, 1.0)], recipe("spo++"))
    with pytest.raises(ValueError, match=r"dispatch 9 \(task-9\) has no frozen value"):
        credit([good, attempt(tiny, 9, 3, 1.0, None)], recipe("spo++"))
    with pytest.raises(ValueError, match=r"dispatch 0 \(task-0\) belongs to no group"):
        credit([good], recipe("grpo"))


def test_a_variant_without_memory_takes_the_outcome_itself(tiny: Any) -> None:
    variant = dataclasses.replace(recipe("spo++"), memory=None, rho=None, measure="none")
    assert credit([attempt(tiny, 0, 3, 0.5), attempt(tiny, 1, 3, 1.0)], variant).advantages == (0.5, 1.0)
