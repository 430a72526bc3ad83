"""Prompt values in event time and in receipt order."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms import EventTimeMemory, PromptValue, ReceiptOrderMemory, prior_from_rollouts

RHO = 0.875


def direct_value(
    prior: tuple[float, float, int], events: list[tuple[int, int, float]], version: int, rho: float = RHO
) -> tuple[float, float]:
    """The formula as it is written, in coordinates, with correctly rounded sums."""

    def z(k: int) -> float:
        return -k * math.log(rho)

    alpha = [math.exp(-(z(version) - z(prior[2]))) * prior[0]]
    beta = [math.exp(-(z(version) - z(prior[2]))) * prior[1]]
    for k, _, outcome in events:
        weight = math.exp(-(z(version) - z(k)))
        alpha.append(weight * outcome)
        beta.append(weight * (1 - outcome))
    return math.fsum(alpha), math.fsum(beta)


# --- PromptValue and priors ---------------------------------------------------------------------------------------


def test_a_prompt_value_is_the_share_of_alpha() -> None:
    assert PromptValue(3.0, 1.0).value == 0.75


@pytest.mark.parametrize("pair", [(-1.0, 2.0), (0.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_a_prompt_value_refuses_what_is_no_evidence(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="prompt value"):
        PromptValue(*pair)


def test_jeffreys_prior_of_two_successes_in_eight() -> None:
    prior = prior_from_rollouts(2, 8)  # p = 2.5 / 9
    assert prior.alpha == pytest.approx(20 / 9, rel=1e-15)
    assert prior.beta == pytest.approx(52 / 9, rel=1e-15)


def test_the_mass_of_a_prior_is_capped_at_eight_and_shrinks_with_fewer_rollouts() -> None:
    assert prior_from_rollouts(16, 32).alpha + prior_from_rollouts(16, 32).beta == pytest.approx(8)
    few = prior_from_rollouts(1, 2)
    assert (few.alpha, few.beta) == (1.0, 1.0)
    assert prior_from_rollouts(0, 0) == PromptValue(0.5, 0.5)
    assert prior_from_rollouts(0, 8).value == pytest.approx(0.5 / 9)  # never exactly 0


@pytest.mark.parametrize(("successes", "rollouts"), [(9, 8), (-1, 8), (1, 0), (math.nan, 8)])
def test_impossible_rollout_counts_are_refused(successes: float, rollouts: int) -> None:
    with pytest.raises(ValueError, match="successes"):
        prior_from_rollouts(successes, rollouts)


# --- event time ---------------------------------------------------------------------------------------------------


def test_event_time_by_hand() -> None:
    memory = EventTimeMemory(rho=0.5)
    memory.seed("a", PromptValue(4.0, 4.0))
    memory.record("a", 1.0, version=1, event=10)
    memory.record("a", 0.25, version=2, event=11)
    # read at version 3: prior 1/8, first outcome 1/4, second 1/2
    assert memory.read("a", 3) == PromptValue(0.5 + 0.25 + 0.125, 0.5 + 0.0 + 0.375)


def test_an_outcome_counts_by_the_version_that_generated_it_and_not_by_its_receipt() -> None:
    memory = EventTimeMemory(rho=0.5, prior=PromptValue(1.0, 1.0))
    memory.record("a", 1.0, version=5, event=1)
    memory.record("a", 0.0, version=2, event=0)  # back late: three publications older
    value = memory.read("a", 5)
    assert value.alpha == pytest.approx(1.0 + 0.5**5)
    assert value.beta == pytest.approx(0.5**3 + 0.5**5)


def test_an_unseeded_task_has_the_default_prior_at_version_zero() -> None:
    memory = EventTimeMemory(rho=0.5, prior=PromptValue(2.0, 6.0))
    assert memory.read("new", 0) == PromptValue(2.0, 6.0)
    assert memory.read("new", 1) == PromptValue(1.0, 3.0)
    assert memory.read("new", 5000).value == 0.25
    assert "new" not in memory


def test_seeding_and_recording_commute() -> None:
    first, second = EventTimeMemory(), EventTimeMemory()
    first.seed("a", PromptValue(1.0, 3.0), version=1)
    first.record("a", 1.0, version=2, event=0)
    second.record("a", 1.0, version=2, event=0)
    second.seed("a", PromptValue(1.0, 3.0), version=1)
    assert first.read("a", 4) == second.read("a", 4)


outcomes = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
histories = st.lists(st.tuples(st.integers(0, 260), outcomes), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(histories, st.randoms(use_true_random=False), st.integers(0, 500))
def test_receipts_in_any_order_give_the_same_value_to_the_last_bit(
    history: list[tuple[int, float]], shuffler: random.Random, ahead: int
) -> None:
    events = [(version, number, outcome) for number, (version, outcome) in enumerate(history)]
    newest = max(version for version, _ in history)
    values = set()
    for _ in range(4):
        shuffler.shuffle(events)
        memory = EventTimeMemory()
        for version, number, outcome in events:
            memory.record("a", outcome, version=version, event=number)
        values.add(memory.read("a", newest + ahead))
    assert len(values) == 1


def test_every_permutation_of_five_receipts_gives_the_same_bits() -> None:
    events = [(0, 0, 0.1), (3, 1, 0.7), (3, 2, 0.3), (1, 3, 1.0), (2, 4, 0.2)]
    values = set()
    for order in itertools.permutations(events):
        memory = EventTimeMemory()
        for version, number, outcome in order:
            memory.record("a", outcome, version=version, event=number)
        values.add((memory.read("a", 4), json.dumps(memory.state_dict())))
    assert len(values) == 1


@settings(max_examples=150, deadline=None)
@given(histories, st.integers(0, 300), st.floats(0.3, 1.0))
def test_event_time_equals_the_formula(history: list[tuple[int, float]], ahead: int, rho: float) -> None:
    memory = EventTimeMemory(rho=rho)
    memory.seed("a", PromptValue(2.0, 6.0))
    events = [(version, number, outcome) for number, (version, outcome) in enumerate(history)]
    for version, number, outcome in events:
        memory.record("a", outcome, version=version, event=number)
    newest = max(version for version, _ in history)
    # Close to the newest evidence the sums themselves are comparable; the ratio is at any distance.
    alpha, beta = direct_value((2.0, 6.0, 0), events, newest, rho)
    read = memory.read("a", newest)
    assert (read.alpha, read.beta) == pytest.approx((alpha, beta), rel=1e-9, abs=1e-10)
    assert memory.read("a", newest + ahead).value == pytest.approx(alpha / (alpha + beta), rel=1e-9, abs=1e-10)


def test_a_value_survives_a_hundred_thousand_publications() -> None:
    memory = EventTimeMemory()
    memory.seed("seeded", PromptValue(2.0, 6.0))
    memory.record("met once", 1.0, version=3, event=0)
    busy = []
    for version in range(0, 100_001, 1000):
        memory.record("busy", float(version % 3000 == 0), version=version, event=version)
        busy.append(memory.read("busy", version + 999).value)
    assert memory.read("seeded", 100_000).value == 0.25
    last = memory.read("met once", 100_000)
    prior_weight = RHO**3
    assert last.value == pytest.approx((1 + 0.5 * prior_weight) / (1 + prior_weight), rel=1e-12)
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in busy)


@pytest.mark.parametrize("rho", [0.875, 0.5, 1e-9])
def test_no_distance_divides_by_zero(rho: float) -> None:
    memory = EventTimeMemory(rho=rho)
    memory.record("a", 1.0, version=0, event=0)
    for exponent in range(8):
        value = memory.read("a", 10**exponent)
        assert 0 < value.alpha < math.inf
        assert value.value == pytest.approx(0.75)


def test_negligible_evidence_is_forgotten_whatever_the_order_of_receipts() -> None:
    # 0.875^206 = 1.13e-12 counts, 0.875^207 = 9.9e-13 does not.
    assert RHO**206 > 1e-12 > RHO**207
    events = [(0, 0, 1.0), (1, 1, 1.0), (207, 2, 0.0)]
    states = set()
    for order in itertools.permutations(events):
        memory = EventTimeMemory()
        for version, number, outcome in order:
            memory.record("a", outcome, version=version, event=number)
        states.add(json.dumps(memory.state_dict()))
    assert len(states) == 1
    assert json.loads(states.pop())["tasks"]["a"][1:] == [[1, 207], [1, 2], [1.0, 0.0]]


def test_reads_cost_what_is_retained_and_no_more() -> None:
    memory = EventTimeMemory()
    for version in range(5000):
        memory.record("a", 1.0, version=version, event=version)
    assert len(memory.state_dict()["tasks"]["a"][1]) == 207


def test_without_forgetting_everything_is_kept() -> None:
    memory = EventTimeMemory(rho=1.0, prior=PromptValue(1.0, 1.0))
    for version in range(400):
        memory.record("a", float(version % 2), version=version, event=version)
    assert memory.read("a", 10**6) == PromptValue(201.0, 201.0)


def test_a_read_cannot_look_into_the_future() -> None:
    memory = EventTimeMemory()
    memory.record("a", 1.0, version=5, event=0)
    memory.seed("b", PromptValue(1.0, 1.0), version=3)
    memory.read("a", 5)
    with pytest.raises(ValueError, match=r"'a' cannot be read at version 4: it has evidence of version 5"):
        memory.read("a", 4)
    with pytest.raises(ValueError, match="version 2"):
        memory.read("b", 2)


@pytest.mark.parametrize("memory", [EventTimeMemory(), ReceiptOrderMemory()])
@pytest.mark.parametrize("outcome", [-0.01, 1.01, math.nan, math.inf])
def test_an_outcome_outside_the_unit_interval_is_refused(memory: EventTimeMemory | ReceiptOrderMemory, outcome: float) -> None:
    before = memory.read("a", 0)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        memory.record("a", outcome, version=0, event=0)
    assert memory.read("a", 0) == before


@pytest.mark.parametrize("memory", [EventTimeMemory(), ReceiptOrderMemory()])
def test_a_repeated_event_is_refused_and_changes_nothing(memory: EventTimeMemory | ReceiptOrderMemory) -> None:
    memory.record("a", 1.0, version=0, event=7)
    memory.record("b", 1.0, version=0, event=7)  # another task's event of the same number is another event
    before = memory.read("a", 3)
    with pytest.raises(ValueError, match="event 7 of task 'a'"):
        memory.record("a", 0.0, version=2, event=7)
    assert memory.read("a", 3) == before


@pytest.mark.parametrize("bad", [{"version": -1, "event": 0}, {"version": 0, "event": -2}, {"version": 0.5, "event": 0}])
def test_versions_and_events_are_whole_numbers(bad: dict[str, int]) -> None:
    for memory in (EventTimeMemory(), ReceiptOrderMemory()):
        with pytest.raises(ValueError, match="whole number"):
            memory.record("a", 1.0, **bad)


@pytest.mark.parametrize("rho", [0.0, -0.5, 1.5, math.nan])
def test_a_discount_outside_its_range_is_refused(rho: float) -> None:
    with pytest.raises(ValueError, match="rho"):
        EventTimeMemory(rho=rho)
    with pytest.raises(ValueError, match="rho"):
        ReceiptOrderMemory(rho=rho)


# --- receipt order ------------------------------------------------------------------------------------------------


def test_receipt_order_by_hand() -> None:
    memory = ReceiptOrderMemory(prior=PromptValue(1.0, 3.0))
    memory.record("a", 1.0, version=0, event=0)  # no drift yet: rho = .96
    assert (memory.read("a", 0).alpha, memory.read("a", 0).beta) == pytest.approx((1.96, 2.88))
    memory.record("a", 0.25, version=9, event=1, drift=0.006)  # 2^-0.1 = .933
    rho = 2**-0.1
    assert (memory.read("a", 0).alpha, memory.read("a", 0).beta) == pytest.approx((1.96 * rho + 0.25, 2.88 * rho + 0.75))


def test_receipt_order_depends_on_the_order() -> None:
    forward, backward = ReceiptOrderMemory(), ReceiptOrderMemory()
    forward.record("a", 1.0, version=0, event=0)
    forward.record("a", 0.0, version=1, event=1)
    backward.record("a", 0.0, version=1, event=1)
    backward.record("a", 1.0, version=0, event=0)
    assert forward.read("a", 1).value < backward.read("a", 1).value


@pytest.mark.parametrize(
    ("drift", "rho"), [(None, 0.96), (0.0, 0.96), (0.06, 0.875), (0.006, 2**-0.1), (10.0, 0.875), (1e9, 0.875), (math.inf, 0.875)]
)
def test_the_discount_follows_the_drift_within_its_limits(drift: float | None, rho: float) -> None:
    assert ReceiptOrderMemory().discount(drift) == pytest.approx(rho)


def test_a_constant_discount_ignores_the_drift() -> None:
    memory = ReceiptOrderMemory(rho=0.5, prior=PromptValue(1.0, 1.0))
    memory.record("a", 1.0, version=0, event=0, drift=0.03)
    assert memory.read("a", 0) == PromptValue(1.5, 0.5)
    memory.record("a", 0.0, version=0, event=1, drift=math.nan)
    assert memory.read("a", 0) == PromptValue(0.75, 1.25)


@pytest.mark.parametrize("drift", [-0.1, math.nan])
def test_a_drift_that_is_no_distance_is_refused(drift: float) -> None:
    with pytest.raises(ValueError, match="drift"):
        ReceiptOrderMemory().record("a", 1.0, version=0, event=0, drift=drift)


def test_receipt_order_keeps_a_bounded_list_of_event_numbers() -> None:
    memory = ReceiptOrderMemory()
    for event in range(3000):
        memory.record("a", 1.0, version=0, event=event)
    events = memory.state_dict()["tasks"]["a"][2]
    assert len(events) < 700
    assert events[-1] == 2999
    assert 0.96 ** (2999 - events[0] + 1) < 1e-12


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_event_time_state_survives_json_and_restores_rho_and_the_prior() -> None:
    memory = EventTimeMemory(rho=0.9, prior=PromptValue(0.1, 0.2))
    memory.seed("a", prior_from_rollouts(3, 8), version=1)
    memory.record("a", 1 / 3, version=4, event=12)
    memory.record("b", 0.7, version=2, event=13)
    restored = EventTimeMemory()
    restored.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    for task, version in (("a", 9), ("b", 2), ("never seen", 40)):
        assert restored.read(task, version) == memory.read(task, version)
    assert (restored.rho, restored.prior) == (0.9, PromptValue(0.1, 0.2))
    with pytest.raises(ValueError, match="event 12"):
        restored.record("a", 1.0, version=5, event=12)
    for one in (memory, restored):  # both go on alike, pruning included
        one.record("a", 0.0, version=500, event=99)
    assert restored.state_dict() == memory.state_dict()


def test_receipt_order_state_survives_json() -> None:
    memory = ReceiptOrderMemory(rho_min=0.5, rho_max=0.9, half_life=0.1, prior=PromptValue(0.1, 0.2))
    memory.seed("a", prior_from_rollouts(3, 8))
    memory.record("a", 1 / 3, version=4, event=12, drift=0.05)
    restored = ReceiptOrderMemory(rho=0.7)
    restored.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    assert restored.state_dict() == memory.state_dict()
    assert restored.discount(0.05) == memory.discount(0.05)
    with pytest.raises(ValueError, match="event 12"):
        restored.record("a", 1.0, version=5, event=12)


def test_a_state_of_the_other_kind_is_refused_and_changes_nothing() -> None:
    memory = EventTimeMemory()
    memory.record("a", 1.0, version=0, event=0)
    before = memory.state_dict()
    with pytest.raises(ValueError, match="receipt"):
        memory.load_state_dict(ReceiptOrderMemory().state_dict())
    damaged = memory.state_dict()
    damaged["tasks"]["a"][3] = []
    with pytest.raises(ValueError, match="damaged"):
        memory.load_state_dict(damaged)
    assert memory.state_dict() == before
