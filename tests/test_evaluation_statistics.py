"""mean@k, pass@k, maj@k and their intervals, against numbers by hand and by brute force."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import evaluation_statistics
from headrace.evaluation_statistics import (
    Interval,
    TaskAttempts,
    bootstrap_interval,
    estimates,
    group_answers,
    majority_at_k,
    pass_at_k,
    wilson_interval,
)

NAN = float("nan")


def test_wilson_interval_by_hand() -> None:
    interval = wilson_interval(8, 10, z=1.96)
    assert interval.low == pytest.approx(0.4902, abs=1e-4) and interval.high == pytest.approx(0.9433, abs=1e-4)
    assert wilson_interval(0, 10).low == 0 and 0.2 < wilson_interval(0, 10).high < 0.3
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, 0)


@given(st.integers(1, 200), st.data())
def test_wilson_interval_holds_the_rate_and_mirrors(attempts: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, attempts))
    interval, mirror = wilson_interval(successes, attempts), wilson_interval(attempts - successes, attempts)
    assert 0 <= interval.low <= successes / attempts <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirror.high)


# --- pass@k ------------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_success(attempts: int, data: st.DataObject) -> None:
    successes, k = data.draw(st.integers(0, attempts)), data.draw(st.integers(1, attempts))
    choices = list(itertools.combinations([True] * successes + [False] * (attempts - successes), k))
    assert pass_at_k(attempts, successes, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("attempts", "successes", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(attempts: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(attempts, successes, k)


# --- maj@k --------------------------------------------------------------------------------------------------------------


def test_majority_by_hand() -> None:
    # answers a a b, a is right: of the three pairs, aa elects a, the two ab tie: (1 + 1/2 + 1/2) / 3
    assert majority_at_k([0, 0, 1], [1, 1, 0], 2) == pytest.approx(2 / 3)
    assert majority_at_k([0, 0, 1], [1, 1, 0], 3) == 1.0
    assert majority_at_k([0, 1, 1], [1, 0, 0], 3) == 0.0
    assert majority_at_k([0, None, None], [1, 0, 0], 3) == 1.0  # no answer, no vote
    assert majority_at_k([None, None], [0, 0], 2) == 0.0
    assert majority_at_k([0, 1], [1, 0], 1) == 0.5  # maj@1 is mean@1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7), st.data())
def test_majority_at_one_is_the_mean_and_all_right_is_one(attempts: list[tuple[int, bool]], data: st.DataObject) -> None:
    right = data.draw(st.integers(0, 3))
    groups = [group for group, _ in attempts]
    outcomes = [float(group == right) for group in groups]
    assert majority_at_k(groups, outcomes, 1) == pytest.approx(sum(outcomes) / len(outcomes))
    assert majority_at_k(groups, [1.0] * len(groups), len(groups)) == 1.0


def test_many_choices_are_sampled_the_same_way_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    groups = [source.choice([0, 0, 1, 2]) for _ in range(12)]
    outcomes = [float(group == 0) for group in groups]
    exact = majority_at_k(groups, outcomes, 5)  # 792 choices
    monkeypatch.setattr(evaluation_statistics, "MAX_SUBSETS", 500)
    sampled = majority_at_k(groups, outcomes, 5, seed=1)
    assert sampled == majority_at_k(groups, outcomes, 5, seed=1) != exact
    assert sampled == pytest.approx(exact, abs=0.08)


def test_equivalent_answers_are_one_group() -> None:
    same_number = lambda left, right: float(left) == float(right)  # noqa: E731
    assert group_answers(["1", "1.0", None, "2", "1"], same_number) == [0, 0, None, 1, 0]
    assert group_answers([], same_number) == []


# --- intervals over tasks -----------------------------------------------------------------------------------------------------


def test_the_bootstrap_interval_agrees_with_the_normal_one_for_many_tasks() -> None:
    source = random.Random(3)
    values = [source.random() for _ in range(400)]
    mean = sum(values) / 400
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 399 / 400)
    interval = bootstrap_interval(values)
    assert interval.low == pytest.approx(mean - 1.96 * error, abs=0.004)
    assert interval.high == pytest.approx(mean + 1.96 * error, abs=0.004)


def test_the_bootstrap_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    source = random.Random(5)
    covered = 0
    for trial in range(200):
        values = [float(source.random() < 0.3) for _ in range(60)]
        interval = bootstrap_interval(values, resamples=400, seed=trial)
        covered += interval.low <= 0.3 <= interval.high
    assert 178 <= covered <= 200


def test_equal_values_give_wilsons_interval_instead_of_a_point() -> None:
    assert bootstrap_interval([0.0] * 20) == wilson_interval(0, 20)
    assert bootstrap_interval([0.5]) == wilson_interval(0.5, 1)


@pytest.mark.parametrize("values", [[], [1.5], [NAN, 0.5]])
def test_values_that_are_no_values_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least one task|outside \[0, 1\]"):
        bootstrap_interval(values)


def test_a_whole_evaluation_by_hand() -> None:
    tasks = [
        TaskAttempts("a", (1.0, 0.0, NAN), ("5", "6", "7")),
        TaskAttempts("b", (0.0, 0.0, 0.0), ("1", None, "2")),
        TaskAttempts("c", (NAN, 1.0, NAN), ("1", "1", "1")),
    ]
    found = {estimate.name: estimate for estimate in estimates(tasks, 2)}
    assert list(found) == ["mean@2", "pass@2", "maj@2"]
    assert found["mean@2"].value == 0.25 and found["pass@2"].value == 0.5
    assert found["maj@2"].value == 0.25  # a: the two answers tie
    assert all((estimate.tasks, estimate.left_out) == (2, 1) for estimate in found.values())
    assert all(estimate.low <= estimate.value <= estimate.high for estimate in found.values())
    assert found["pass@2"].sentence().startswith("pass@2 0.500 [") and found["pass@2"].sentence().endswith("over 2 tasks, 1 left out")


def test_without_answers_there_is_no_majority_and_with_too_few_attempts_nothing() -> None:
    assert [estimate.name for estimate in estimates([TaskAttempts("a", (1.0,))], 1)] == ["mean@1", "pass@1"]
    with pytest.raises(ValueError, match="no task has 2 scored attempts"):
        estimates([TaskAttempts("a", (1.0, NAN))], 2)
    with pytest.raises(ValueError, match="at least 1"):
        estimates([TaskAttempts("a", (1.0,))], 0)


def test_the_same_evaluation_gives_the_same_interval() -> None:
    tasks = [TaskAttempts(str(i), (float(i % 3 == 0), float(i % 2))) for i in range(50)]
    assert estimates(tasks, 2) == estimates(tasks, 2)
    assert isinstance(bootstrap_interval([0.0, 1.0]), Interval)
