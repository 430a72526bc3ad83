"""The scheduler against attempts whose lengths and ends are written down, in simulated time."""

import asyncio
import math
from collections import Counter

import pytest

from headrace.environments.base import Task
from headrace.rollout import clock
from headrace.rollout.scheduler import RolloutStopped, Scheduler, SchedulerSettings, episode_seed
from headrace.rollout.trajectory import Dispatch, Drop, Failure, Receipt, TokenRow, Trajectory

TASKS = {f"t{i}": Task(f"t{i}", "kind", {}) for i in range(16)}


def finished(dispatch, outcome=1.0, tokens=1):
    row = TokenRow((5,) * (tokens + 1), (False,) + (True,) * tokens, (0.0,) + (-1.0,) * tokens, (-1,) + (dispatch.version,) * tokens)
    return Trajectory(dispatch, (row,), (), outcome, outcome == 1.0, "success")


class Bench:
    """A scheduler over fake attempts: ``seconds(dispatch)`` long, ending in ``end(dispatch)``."""

    def __init__(self, seconds=lambda d: 1.0 + 0.001 * d.number, end=finished, tasks=TASKS, **settings):
        self.events, self.running, self.most_running = [], Counter(), 0
        self.seconds, self.end = seconds, end
        self.order = iter(range(10**9))
        self.values = {}
        self.scheduler = Scheduler(
            SchedulerSettings(**{"batch_size": 4, "concurrency": 4, **settings}),
            tasks,
            attempt=self.attempt,
            choose_tasks=self.choose,
            freeze_value=lambda task, version: self.values.get(task),
            log=lambda event, trajectory: self.events.append(event),
        )

    def choose(self, count, in_flight):
        free = [task for task in self.scheduler._tasks if task not in in_flight]
        start = next(self.order) % max(len(free), 1)
        return (free[start:] + free[:start])[:count]

    async def attempt(self, dispatch, task):
        self.running[dispatch.task] += 1
        self.most_running = max(self.most_running, sum(self.running.values()))
        try:
            await asyncio.sleep(self.seconds(dispatch))
            result = self.end(dispatch)
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            self.running[dispatch.task] -= 1

    @property
    def drops(self):
        return Counter(drop.reason for drop in self.of(Drop))

    @property
    def drops_by_task(self):
        tasks = {dispatch.number: dispatch.task for dispatch in self.of(Dispatch)}
        return Counter(tasks[drop.dispatch] for drop in self.of(Drop))

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def run(main):
    return clock.run(main, simulated=True)


def test_a_batch_holds_the_first_that_finish_in_receipt_order():
    lengths = [9.0, 1.0, 5.0, 2.0, 3.0, 4.0]
    bench = Bench(seconds=lambda d: lengths[d.number] if d.number < 6 else 50.0, batch_size=4, concurrency=6)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert [t.dispatch.number for t in batch] == [1, 3, 4, 5]
        assert clock.now() == 4.0
        await bench.scheduler.close()

    run(main())


def test_one_request_per_prompt_and_never_more_than_the_concurrency():
    bench = Bench(seconds=lambda d: 1.0 + d.number % 3, concurrency=5, batch_size=8)
    most = Counter()

    async def watch():
        while True:
            for task, count in bench.running.items():
                most[task] = max(most[task], count)
            await asyncio.sleep(0.25)

    async def main():
        watcher = asyncio.create_task(watch())
        for version in range(1, 4):
            await bench.scheduler.next_batch()
            bench.scheduler.publish(version)
        watcher.cancel()
        await bench.scheduler.close()

    run(main())
    assert max(most.values()) == 1
    assert bench.most_running == 5


def test_the_value_is_frozen_at_dispatch_and_logged_with_it():
    bench = Bench()
    bench.values = dict.fromkeys(TASKS, (1.0, 3.0))

    async def main():
        batch = await bench.scheduler.next_batch()
        bench.values = dict.fromkeys(TASKS, (9.0, 1.0))
        assert [t.dispatch.value for t in batch] == [0.25] * 4
        await bench.scheduler.close()

    run(main())
    assert bench.of(Dispatch)[0] == Dispatch(0, bench.of(Dispatch)[0].task, "kind", 0, 1.0, 3.0, None, episode_seed(0, 0))


def test_drain_keeps_attempts_of_the_old_version_and_sends_none_more():
    bench = Bench(seconds=lambda d: 10.0 if d.number == 0 else 1.0, batch_size=4, concurrency=4)

    async def main():
        await bench.scheduler.next_batch()
        bench.scheduler.publish(1)
        second = await bench.scheduler.next_batch()
        third = [] if any(t.dispatch.number == 0 for t in second) else await bench.scheduler.next_batch()
        assert any(t.dispatch.number == 0 and t.dispatch.version == 0 for t in second + third)
        await bench.scheduler.close()

    run(main())
    published = next(i for i, event in enumerate(bench.events) if isinstance(event, Dispatch) and event.version == 1)
    assert all(event.version == 1 for event in bench.events[published:] if isinstance(event, Dispatch))


def test_abort_cancels_attempts_of_the_old_version_and_frees_their_prompts():
    bench = Bench(seconds=lambda d: 100.0 if d.number == 0 else 1.0, publication="abort")

    async def main():
        await bench.scheduler.next_batch()
        bench.scheduler.publish(1)
        await asyncio.sleep(0.5)
        assert [(drop.dispatch, drop.reason) for drop in bench.of(Drop) if drop.dispatch == 0] == [(0, "aborted")]
        assert bench.running[bench.of(Dispatch)[0].task] <= 1
        await bench.scheduler.next_batch()
        await bench.scheduler.close()

    run(main())


def test_an_attempt_that_comes_back_too_old_is_received_and_then_dropped_by_name():
    bench = Bench(seconds=lambda d: 5.5 if d.number == 0 else 1.0, batch_size=3, concurrency=4, max_staleness=1)

    async def main():
        for version in range(1, 8):
            await bench.scheduler.next_batch()
            bench.scheduler.publish(version)
        await bench.scheduler.close()

    run(main())
    kinds = [(type(e).__name__, getattr(e, "reason", None)) for e in bench.events if isinstance(e, Receipt | Drop) and e.dispatch == 0]
    assert kinds == [("Receipt", "success"), ("Drop", "stale")]
    assert bench.drops["stale"] >= 1
    assert bench.drops_by_task[bench.of(Dispatch)[0].task] >= 1


def test_a_task_that_is_always_too_slow_is_not_sent_again_before_it_ended():
    bench = Bench(seconds=lambda d: 7.0 if d.task == "t0" else 1.0, batch_size=4, concurrency=4, max_staleness=1)

    async def main():
        for version in range(1, 30):
            await bench.scheduler.next_batch()
            bench.scheduler.publish(version)
            assert bench.scheduler.in_flight + bench.scheduler.waiting <= 8
        await bench.scheduler.close()
        return clock.now()

    seconds = run(main())
    sent = sum(dispatch.task == "t0" for dispatch in bench.of(Dispatch))
    assert 1 <= sent <= 1 + seconds / 7.0
    assert bench.drops_by_task["t0"] >= 3, "drops are counted by task"


def test_while_a_batch_is_trained_on_no_more_leave_than_can_still_be_used():
    bench = Bench(batch_size=4, concurrency=16, max_staleness=1)

    async def main():
        await bench.scheduler.next_batch()
        await asyncio.sleep(100.0)  # a very long update
        assert bench.scheduler.in_flight + bench.scheduler.waiting == 4
        bench.scheduler.publish(1)
        await bench.scheduler.next_batch()
        await bench.scheduler.close()

    run(main())
    assert bench.drops == {}


def test_staleness_zero_trains_only_on_its_own_version():
    bench = Bench(batch_size=4, concurrency=16, max_staleness=0)

    async def main():
        for version in range(5):
            batch = await bench.scheduler.next_batch()
            assert {t.dispatch.version for t in batch} == {version}
            await asyncio.sleep(3.0)
            bench.scheduler.publish(version + 1)
        await bench.scheduler.close()

    run(main())
    assert bench.drops == {}


def test_errors_are_contained_counted_and_their_prompt_is_free_again():
    def end(dispatch):
        return Failure(dispatch, "environment_error", "boom") if dispatch.number == 1 else finished(dispatch)

    bench = Bench(end=end)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert 1 not in [t.dispatch.number for t in batch]
        await bench.scheduler.close()

    run(main())
    assert [(drop.dispatch, drop.reason, drop.detail) for drop in bench.of(Drop)] == [(1, "environment_error", "boom")]
    assert bench.drops == {"environment_error": 1}
    assert 1 not in [receipt.dispatch for receipt in bench.of(Receipt)]


def test_when_every_attempt_fails_the_run_stops_and_names_the_last_culprit():
    bench = Bench(end=lambda d: Failure(d, "environment_error", f"ValueError: no such room {d.number}"), max_consecutive_failures=10)

    async def main():
        with pytest.raises(RolloutStopped, match=r"10 attempts failed one after another.*no such room"):
            await bench.scheduler.next_batch()
        await bench.scheduler.close()

    run(main())


def test_a_bug_in_the_attempt_itself_reaches_whoever_waits_with_its_own_type():
    bench = Bench(end=lambda d: KeyError("lost"))

    async def main():
        with pytest.raises(KeyError, match="lost"):
            await bench.scheduler.next_batch()
        await bench.scheduler.close()

    run(main())


def test_a_log_that_cannot_be_written_reaches_whoever_waits():
    bench = Bench()

    def log(event, trajectory):
        if isinstance(event, Receipt):
            raise OSError("disk full")

    bench.scheduler._log = log

    async def main():
        with pytest.raises(OSError, match="disk full"):
            await bench.scheduler.next_batch()
        await bench.scheduler.close()

    run(main())


@pytest.mark.parametrize(("result", "reason"), [({"outcome": math.nan}, "unscored"), ({"tokens": 0}, "no_action_tokens")])
def test_attempts_without_score_or_tokens_never_become_an_outcome(result, reason):
    bench = Bench(end=lambda d: finished(d, **result) if d.number == 2 else finished(d))

    async def main():
        batch = await bench.scheduler.next_batch()
        assert 2 not in [t.dispatch.number for t in batch]
        await bench.scheduler.close()

    run(main())
    assert [(drop.dispatch, drop.reason) for drop in bench.of(Drop)] == [(2, reason)]
    assert 2 not in [receipt.dispatch for receipt in bench.of(Receipt)]


@pytest.mark.parametrize(
    ("result", "words"),
    [({"outcome": math.nan}, r"\(unscored\)"), ({"tokens": 0}, r"\(no_action_tokens\).*before the policy sampled a token")],
)
def test_a_world_in_which_no_attempt_counts_ends_the_run(result, words):
    bench = Bench(end=lambda d: finished(d, **result), max_consecutive_failures=10)

    async def main():
        with pytest.raises(RolloutStopped, match="10 attempts failed one after another" + ".*" + words):
            await bench.scheduler.next_batch()
        await bench.scheduler.close()

    run(main())


def test_an_attempt_that_ends_in_more_than_an_exception_ends_the_run():
    class Panic(BaseException):
        pass

    async def attempt(dispatch, task):
        raise Panic("in native code")

    bench = Bench()
    bench.scheduler._attempt = attempt

    async def main():
        with pytest.raises(Panic, match="in native code"):
            await asyncio.wait_for(bench.scheduler.next_batch(), 5)

    run(main())


def test_between_two_publications_no_more_leave_than_can_be_used():
    """Two batches a version and staleness 0: one batch is taken, so only one more of this version can be used."""
    settings = SchedulerSettings(batch_size=4, concurrency=16, max_staleness=0, batches_per_version=2)
    bench = Bench()
    arguments = {"attempt": bench.attempt, "choose_tasks": bench.choose, "freeze_value": lambda task, version: None}
    scheduler = Scheduler(settings, TASKS, **arguments, log=lambda event, _: bench.events.append(event), batches_taken=1)
    bench.scheduler = scheduler

    async def main():
        await scheduler.next_batch()
        assert len(bench.of(Dispatch)) == 4
        await scheduler.close()

    run(main())


def test_siblings_leave_together_and_the_slowest_is_waited_for():
    bench = Bench(seconds=lambda d: 9.0 if d.number == 2 else 1.0, batch_size=8, concurrency=8, group_size=4)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert {t.dispatch.group for t in batch} == {4, 8} and clock.now() == 2.0
        groups = Counter(t.dispatch.group for t in batch)
        assert set(groups.values()) == {4} and len(groups) == 2
        assert len({t.dispatch.task for t in batch}) == 2
        await bench.scheduler.close()

    run(main())
    for group in {d.group for d in bench.of(Dispatch)}:
        assert len({(d.task, d.version) for d in bench.of(Dispatch) if d.group == group}) == 1


def test_a_group_goes_on_with_its_survivors():
    def end(dispatch):
        return Failure(dispatch, "environment_error", "boom") if dispatch.number == 1 else finished(dispatch)

    bench = Bench(end=end, batch_size=8, concurrency=8, group_size=4)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert Counter(t.dispatch.group for t in batch) == {0: 3, 4: 4}
        await bench.scheduler.close()

    run(main())


def test_a_group_without_survivors_is_replaced():
    def end(dispatch):
        return Failure(dispatch, "environment_error", "boom") if dispatch.number < 4 else finished(dispatch)

    bench = Bench(end=end, batch_size=8, concurrency=8, group_size=4)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert Counter(t.dispatch.group for t in batch) == {4: 4, 8: 4}
        await bench.scheduler.close()

    run(main())


def test_a_stopped_run_is_taken_up_where_it_was():
    bench = Bench(batch_size=4, concurrency=4)
    old = [Dispatch(number, f"t{number}", "kind", 0, 0.5, 0.5, None, 7) for number in range(4)]
    bench.scheduler._next_dispatch = 4

    async def main():
        bench.scheduler.restore(in_flight=old[2:], waiting=[finished(old[0]), finished(old[1])])
        batch = await bench.scheduler.next_batch()
        assert [t.dispatch for t in batch] == old
        await bench.scheduler.close()

    run(main())
    assert [d.number for d in bench.of(Dispatch)][:1] == [4], "what was in flight is not logged a second time"


def test_with_more_places_than_prompts_every_prompt_is_out_once():
    tasks = {name: TASKS[name] for name in ("t0", "t1", "t2")}
    bench = Bench(tasks=tasks, batch_size=6, concurrency=8)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert Counter(t.dispatch.task for t in batch) == {"t0": 2, "t1": 2, "t2": 2}
        await bench.scheduler.close()

    run(main())
    assert bench.most_running == 3


def test_a_prompt_may_have_several_requests_where_that_is_asked_for():
    tasks = {name: TASKS[name] for name in ("t0", "t1", "t2")}
    bench = Bench(tasks=tasks, batch_size=6, concurrency=8, requests_per_prompt=2)

    async def main():
        batch = await bench.scheduler.next_batch()
        assert Counter(t.dispatch.task for t in batch) == {"t0": 2, "t1": 2, "t2": 2}
        await bench.scheduler.close()

    run(main())
    assert bench.most_running == 6


def test_draining_sends_nothing_until_the_next_publication():
    bench = Bench(seconds=lambda d: 1.0 + d.number, batch_size=2, concurrency=4)

    async def main():
        await bench.scheduler.next_batch()
        sent = len(bench.of(Dispatch))
        await bench.scheduler.drain()
        assert bench.scheduler.in_flight == 0 and len(bench.of(Dispatch)) == sent
        bench.scheduler.publish(1)
        assert bench.scheduler.in_flight > 0
        await bench.scheduler.close()

    run(main())


def test_no_task_at_all_is_said_at_once():
    bench = Bench(tasks={})

    async def main():
        with pytest.raises(RolloutStopped, match="0 tasks"):
            await bench.scheduler.next_batch()

    run(main())


@pytest.mark.parametrize(
    ("settings", "message"), [({"batch_size": 6, "group_size": 4}, "multiple"), ({"concurrency": 2, "group_size": 4}, "concurrency")]
)
def test_batches_and_places_must_fit_the_groups(settings, message):
    with pytest.raises(ValueError, match=message):
        SchedulerSettings(**{"batch_size": 8, "concurrency": 8, **settings})


def test_episode_seeds_are_distinct_and_the_same_everywhere():
    seeds = {episode_seed(seed, number) for seed in range(4) for number in range(1000)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert episode_seed(0, 0) == episode_seed(0, 0)
