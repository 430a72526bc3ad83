"""The uncertainty sampler."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from headrace.algorithms import UncertaintySampler, uncertainty_weight


def test_weights_by_hand() -> None:
    assert uncertainty_weight(0.5) == 0.55
    assert uncertainty_weight(0.2) == pytest.approx(0.45)
    assert uncertainty_weight(0.0) == uncertainty_weight(1.0) == 0.05


def test_first_draws_are_proportional_to_the_weights() -> None:
    values = {"even": 0.5, "fifth": 0.2, "solved": 1.0, "hopeless": 0.0}
    sampler = UncertaintySampler(seed=3)
    draws = 20_000
    counts = Counter(sampler.choose(values, 1, [])[0] for _ in range(draws))
    total = sum(uncertainty_weight(value) for value in values.values())
    for task, value in values.items():
        p = uncertainty_weight(value) / total
        assert counts[task] / draws == pytest.approx(p, abs=4 * (p * (1 - p) / draws) ** 0.5)


def test_second_draws_follow_the_sequential_rule_without_replacement() -> None:
    values = {"a": 0.5, "b": 0.2, "c": 0.0}
    sampler = UncertaintySampler(seed=4)
    draws = 20_000
    counts = Counter(tuple(sampler.choose(values, 2, [])) for _ in range(draws))
    weights = {task: uncertainty_weight(value) for task, value in values.items()}
    total = sum(weights.values())
    for first in values:
        for second in set(values) - {first}:
            p = weights[first] / total * weights[second] / (total - weights[first])
            assert counts[first, second] / draws == pytest.approx(p, abs=4 * (p * (1 - p) / draws) ** 0.5)


def test_tasks_in_flight_are_never_chosen_and_fewer_come_back_when_few_are_free() -> None:
    values = {f"t{i}": 0.5 for i in range(6)}
    sampler = UncertaintySampler(seed=0)
    chosen = sampler.choose(values, 10, ["t0", "t3", "unknown"])
    assert sorted(chosen) == ["t1", "t2", "t4", "t5"]
    assert sampler.choose(values, 3, set(values)) == []
    assert sampler.choose({}, 3, []) == []
    assert sampler.choose(values, 0, []) == []


def test_choices_depend_on_the_seed_and_not_on_the_order_of_the_values() -> None:
    values = {f"t{i}": i / 20 for i in range(20)}
    backwards = dict(reversed(values.items()))
    assert UncertaintySampler(7).choose(values, 12, []) == UncertaintySampler(7).choose(backwards, 12, [])
    assert UncertaintySampler(7).choose(values, 12, []) != UncertaintySampler(8).choose(values, 12, [])


def test_a_restored_sampler_goes_on_where_it_was() -> None:
    values = {f"t{i}": 0.5 for i in range(20)}
    sampler = UncertaintySampler(5, floor=0.1)
    sampler.choose(values, 7, [])
    restored = UncertaintySampler(0)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [restored.choose(values, 3, []) for _ in range(5)] == [sampler.choose(values, 3, []) for _ in range(5)]


def test_the_position_is_the_number_of_tasks_drawn() -> None:
    values = {f"t{i}": 0.5 for i in range(20)}
    at_once, one_by_one = UncertaintySampler(5), UncertaintySampler(5)
    drawn = at_once.choose(values, 6, [])
    busy: list[str] = []
    for _ in range(6):
        busy += one_by_one.choose(values, 1, busy)
    assert busy == drawn
    assert one_by_one.state_dict() == at_once.state_dict()


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_value_that_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="'bad'"):
        UncertaintySampler(0).choose({"bad": value}, 1, [])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="floor"):
        UncertaintySampler(0, floor=0.0)
    with pytest.raises(ValueError, match="count"):
        UncertaintySampler(0).choose({"a": 0.5}, -1, [])
