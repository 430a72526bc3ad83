import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.records.ledger import Ledger, LedgerError, effective, effective_spans
from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Prior, Publication, Receipt, Restored


def dispatch(number, version=0):
    return Dispatch(number, f"task-{number}", "pick", version, 0.5, 0.5, None, number)


def receipt(number):
    return Receipt(number, 1.0, True, 5, "success")


def test_a_log_without_restores_counts_whole():
    assert effective_spans(3, []) == (range(3),)
    assert effective_spans(0, []) == ()


def test_what_lies_between_a_restores_log_position_and_it_does_not_count():
    log = [dispatch(0), receipt(0), dispatch(1), receipt(1), Restored("c", 2), dispatch(1)]
    assert [position for position, _ in effective(enumerate(log))] == [0, 1, 4, 5]


def test_a_restore_that_is_taken_back_takes_nothing_back():
    # 0 1 2 3 | 4: back to 1 | 5 6 | 7: back to 3. The checkpoint at 3 knew 0, 1, 2; the first restore is undone with the rest.
    assert effective_spans(9, [(4, 1), (7, 3)]) == (range(3), range(7, 9))


def test_a_restore_to_a_moment_after_an_earlier_restore_keeps_that_one():
    # 0 1 2 3 | 4: back to 2 | 5 6 7 | 8: back to 6
    assert effective_spans(10, [(4, 2), (8, 6)]) == (range(2), range(4, 6), range(8, 10))


@st.composite
def logs_with_restores(draw):
    length = draw(st.integers(0, 40))
    positions = draw(st.sets(st.integers(0, max(length - 1, 0)), max_size=6)) if length else set()
    return length, [(position, draw(st.integers(0, position))) for position in sorted(positions)]


@given(logs_with_restores())
def test_spans_follow_the_recursive_definition(case):
    length, restores = case
    targets = dict(restores)
    histories = [[]]
    for n in range(length):
        histories.append([*(histories[targets[n]] if n in targets else histories[n]), n])
    assert [position for span in effective_spans(length, restores) for position in span] == histories[length]


def test_a_restore_to_the_future_is_refused():
    with pytest.raises(LedgerError, match="position 1 names log position 3"):
        effective_spans(5, [(1, 3)])


def test_a_log_with_a_hole_is_refused():
    with pytest.raises(LedgerError, match="expected position 0, found 4"):
        list(effective([(4, dispatch(0))]))


BROKEN = {
    "a repeated dispatch number": ([dispatch(0), dispatch(0)], "dispatch 0 was already made"),
    "a version that is not published": ([dispatch(0, version=1)], "names version 1, but the newest published is 0"),
    "a receipt of nothing": ([receipt(0)], "dispatch 0 cannot be received: it was never made"),
    "a second receipt": ([dispatch(0), receipt(0), receipt(0)], "dispatch 0 was already received"),
    "a consumption without receipt": ([dispatch(0), Consumption(0, 0, 0.1)], "dispatch 0 cannot be consumed: it has no receipt"),
    "a second consumption": ([dispatch(0), receipt(0), Consumption(0, 0, 0.1), Consumption(0, 1, 0.1)], "it was already consumed"),
    "a consumption after a drop": ([dispatch(0), receipt(0), Drop(0, "stale"), Consumption(0, 0, 0.1)], "it was already dropped"),
    "a drop after a consumption": ([dispatch(0), receipt(0), Consumption(0, 0, 0.1), Drop(0, "stale")], "it was already consumed"),
    "a receipt after a drop": ([dispatch(0), Drop(0, "engine_error"), receipt(0)], "it was already dropped"),
    "a skipped version": ([Publication(2, 0)], "version 2 cannot be published after version 0"),
    "a second prior": ([Prior("a", 0.5, 0.5, 0, 0.0, 0), Prior("a", 0.5, 0.5, 0, 0.0, 0)], "task 'a' already has a prior"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_ledger_refuses(case):
    events, complaint = BROKEN[case]
    ledger = Ledger()
    for event in events[:-1]:
        ledger.admit(event)
    with pytest.raises(LedgerError, match=complaint):
        ledger.admit(events[-1])


def test_a_dispatch_number_is_free_again_after_a_restore_took_it_back():
    log = [dispatch(0), receipt(0), Restored("c", 0), dispatch(0), receipt(0)]
    assert Ledger.of(enumerate(log)).received == {0}
