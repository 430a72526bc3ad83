import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.memory import EventTimeMemory, PromptValue, ReceiptOrderMemory
from headrace.records.ledger import Ledger, LedgerError
from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Prior, Publication, Receipt, Restored
from headrace.training.folds import RunState, fold


def dispatch(number, task="a", version=0, group=None):
    return Dispatch(number, task, "pick", version, None, None, group, number)


def receipt(number, outcome=1.0, action_tokens=4):
    return Receipt(number, outcome, outcome == 1.0, action_tokens, "horizon")


def folded(events, memory=None):
    return fold(enumerate(events), memory)


def test_dispatches_without_an_end_are_in_flight_and_unused_receipts_wait_in_their_order():
    state = folded([dispatch(0), dispatch(1), dispatch(2), dispatch(3), receipt(2), receipt(0), Drop(1, "engine_error", "x")])
    assert list(state.in_flight) == [3]
    assert list(state.waiting) == [2, 0]
    assert state.waiting[2].dispatch == dispatch(2)
    assert (state.next_dispatch, state.next_batch, state.version, state.log_length) == (4, 0, 0, 7)


def test_drops_are_counted_by_reason_and_by_task_with_or_without_receipt():
    events = [dispatch(0, "a"), dispatch(1, "b"), dispatch(2, "b"), receipt(1), Drop(1, "stale"), Drop(0, "engine_error"), Drop(2, "stale")]
    state = folded(events)
    assert state.drops_by_reason == {"stale": 2, "engine_error": 1}
    assert state.drops_by_task == {"b": 2, "a": 1}
    assert state.dispatches_by_task == {"a": 1, "b": 2}
    assert not state.waiting and not state.in_flight


def test_batches_and_versions_count_on():
    events = [
        dispatch(0),
        receipt(0),
        Consumption(0, 0, 0.1),
        Publication(1, 0),
        dispatch(1, version=1),
        receipt(1),
        Consumption(1, 1, 0.1),
    ]
    state = folded(events)
    assert (state.next_batch, state.version) == (2, 1)
    assert not state.waiting


def test_event_time_memory_learns_at_the_receipt_under_the_version_that_generated_it():
    prior = Prior("a", 2.0, 6.0, 0, 2.0, 8)
    events = [prior, dispatch(0), Publication(1, 0), dispatch(1, version=1), receipt(1, 0.0), receipt(0, 1.0), Drop(0, "stale")]
    state = folded(events, EventTimeMemory(rho=0.5))
    # At version 1: prior (2, 6) and the success of version 0 weigh 1/2, the failure of version 1 weighs 1.
    assert state.memory.read("a", 1) == PromptValue(1.0 + 0.5, 3.0 + 1.0)


def test_receipt_order_memory_learns_at_the_consumption_with_its_drift():
    events = [dispatch(0), dispatch(1), receipt(0, 1.0), receipt(1, 0.0)]
    state = folded(events, ReceiptOrderMemory(rho_min=0.25, rho_max=1.0, half_life=0.06))
    assert state.memory.read("a", 0) == PromptValue(0.5, 0.5)
    state.apply(Consumption(0, 0, 0.3), 4)
    assert state.memory.read("a", 0) == PromptValue(1.5, 0.5)
    state.apply(Consumption(1, 0, -0.3, drift=0.06), 5)
    assert state.memory.read("a", 0) == PromptValue(0.75, 1.25)


@pytest.mark.parametrize("memory", [EventTimeMemory, ReceiptOrderMemory])
def test_an_attempt_without_action_tokens_never_reaches_the_memory(memory):
    state = folded([dispatch(0), receipt(0, 1.0, action_tokens=0), Drop(0, "no_action_tokens")], memory())
    assert state.memory.read("a", 0) == PromptValue(0.5, 0.5)


def test_what_a_restore_took_back_leaves_no_trace():
    kept = [dispatch(0), dispatch(1), receipt(0)]
    lost = [Consumption(0, 0, 0.1), Publication(1, 0), dispatch(2, version=1), receipt(1, 0.0), receipt(2), Drop(2, "stale")]
    state = folded([*kept, *lost, Restored("c", 3)], EventTimeMemory())
    plain = folded(kept, EventTimeMemory())
    assert comparable(state, log_length=0) == comparable(plain, log_length=0)
    assert state.log_length == 10
    assert list(state.in_flight) == [1] and list(state.waiting) == [0]


def test_a_restore_that_takes_back_what_a_live_state_holds_is_refused():
    state = folded([dispatch(0), receipt(0)])
    with pytest.raises(ValueError, match=r"takes back events from position 1 on.*fold the log again"):
        state.apply(Restored("c", 1), 2)
    state.apply(Restored("c", 2), 2)
    with pytest.raises(ValueError, match="position 2 is already part"):
        state.apply(dispatch(1), 2)


def test_groups_complete_in_the_order_in_which_their_last_member_ends():
    sent = [dispatch(n, task, group=g) for n, (task, g) in enumerate([("a", 0), ("a", 0), ("b", 2), ("b", 2), ("c", 4), ("c", 4)])]
    events = [*sent, receipt(0), receipt(2), receipt(3), Drop(1, "engine_error"), Drop(4, "engine_error"), Drop(5, "engine_error")]
    state = folded(events)
    assert state.completed_groups == [2, 0]
    assert state.next_group == 5
    for position, event in enumerate([Consumption(2, 0, 0.1), Consumption(3, 0, 0.1)], start=len(events)):
        state.apply(event, position)
    assert state.completed_groups == [0]


def comparable(state: RunState, **fixed):
    values = {name: getattr(state, name) for name in RunState.__slots__} | fixed
    values["memory"] = None if state.memory is None else state.memory.state_dict()
    values["waiting"] = list(state.waiting.items())
    values["in_flight"] = list(state.in_flight.items())
    return values


def random_log(seed: int, length: int = 120):
    """A lawful log with priors, groups, drops, batches, publications and restores, by drawing events until the ledger admits one."""
    draw = random.Random(seed)
    grouped = draw.random() < 0.3
    log = [Prior(task, 1.0, 3.0, 0, 2.0, 8) for task in "ab"]
    ledger, state = Ledger.of(enumerate(log)), folded(log)
    while len(log) < length:
        flying, waiting = list(state.in_flight), list(state.waiting)
        kind = draw.choice(["dispatch", "dispatch", "receipt", "receipt", "drop", "consume", "publish", "restore"])
        if kind == "dispatch":
            event = dispatch(state.next_dispatch, draw.choice("abc"), state.version, state.next_dispatch // 2 if grouped else None)
        elif kind == "receipt" and flying:
            event = receipt(draw.choice(flying), draw.choice([0.0, 0.25, 1.0]), draw.choice([0, 3, 9]))
        elif kind == "drop" and flying + waiting:
            event = Drop(draw.choice(flying + waiting), draw.choice(["stale", "engine_error"]))
        elif kind == "consume" and waiting:
            event = Consumption(waiting[0], state.next_batch, draw.uniform(-1, 1), draw.choice([None, 0.01, 0.2]))
        elif kind == "publish":
            event = Publication(state.version + 1, state.next_batch)
        elif kind == "restore" and draw.random() < 0.3:
            event = Restored("c", draw.randint(2, len(log)))
        else:
            continue
        log.append(event)
        try:
            if isinstance(event, Restored):
                ledger, state = Ledger.of(enumerate(log)), folded(log)
            else:
                ledger.admit(event)
                state.apply(event, len(log) - 1)
        except LedgerError:
            log.pop()
    return log


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([EventTimeMemory, ReceiptOrderMemory, lambda: None]))
def test_applying_one_by_one_and_folding_in_one_go_give_the_same_state(seed, memory):
    log = random_log(seed)
    live = RunState(memory())
    for position, event in enumerate(log):
        if isinstance(event, Restored):  # what a resumed run does: fold the log as far as its checkpoint knew it
            live = fold(enumerate(log[: event.log_position]), memory())
        live.apply(event, position)
    assert comparable(live) == comparable(fold(enumerate(log), memory()))


def test_receipts_in_any_order_give_the_same_memory():
    sent = [dispatch(n, "a", version=0) for n in range(3)] + [Publication(1, 0)] + [dispatch(3, "a", version=1)]
    values = set()
    for order in itertools.permutations([receipt(0, 0.3), receipt(1, 0.9), receipt(2, 0.0), receipt(3, 0.7)]):
        values.add(folded([*sent, *order], EventTimeMemory()).memory.read("a", 5))
    assert len(values) == 1
