import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from headrace.rollout.clock import now, run
from headrace.rollout.engine import Completion, Engine, EngineError, Request, UnknownVersion, Weights
from headrace.rollout.scripted_engine import Latency, Reply, ScriptedEngine

STOP = 9


def request(dispatch: int = 0, **fields: Any) -> Request:
    defaults: dict[str, Any] = {"turn": 0, "token_ids": (1, 2), "version": 0, "max_tokens": 8, "seed": 1}
    return Request(dispatch=dispatch, **(defaults | fields))


def echo(request: Request, version: int, weights: Weights) -> Reply:
    """The dispatch number, the version and the stop token."""
    return Reply((request.dispatch, version, STOP), (-0.5, -0.25, -0.125))


def simulated(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run(main(), simulated=True)


def test_it_is_an_engine_and_answers_from_the_function() -> None:
    engine = ScriptedEngine(echo, stop_token_ids=[STOP])
    assert isinstance(engine, Engine)
    done = simulated(lambda: engine.generate(request(4)))
    assert done == Completion((4, 0, STOP), (-0.5, -0.25, -0.125), (0, 0, 0), "stop")


def test_replies_are_cut_at_the_stop_token_and_at_the_budget() -> None:
    engine = ScriptedEngine(lambda *_: Reply((1, STOP, 3, 4), (-1.0,) * 4), stop_token_ids=[STOP])
    done = simulated(lambda: engine.generate(request()))
    assert (done.token_ids, done.stop_reason) == ((1, STOP), "stop")
    engine = ScriptedEngine(lambda *_: Reply((1, 2, 3, 4), (-1.0,) * 4), stop_token_ids=[STOP])
    done = simulated(lambda: engine.generate(request(max_tokens=3)))
    assert (done.token_ids, done.stop_reason) == ((1, 2, 3), "length")


def test_latencies_pass_on_the_loops_clock_side_by_side() -> None:
    engine = ScriptedEngine(echo, latency=lambda r: Latency(first=1.0 + r.dispatch, token=0.5))

    async def main() -> list[float]:
        async def one(dispatch: int) -> float:
            await engine.generate(request(dispatch))
            return now()

        return await asyncio.gather(*(one(dispatch) for dispatch in range(3)))

    assert simulated(main) == [2.5, 3.5, 4.5]


def test_tokens_of_an_unpinned_request_name_the_newest_snapshot_of_their_moment() -> None:
    engine = ScriptedEngine(lambda *_: Reply((1, 2, 3, 4), (-1.0,) * 4), latency=Latency(token=1.0))

    async def main() -> Completion:
        task = asyncio.create_task(engine.generate(request(version=None)))
        await asyncio.sleep(2.5)
        await engine.publish(5, {})
        return await task

    assert simulated(main).versions == (0, 0, 5, 5)


def test_the_answer_sees_the_weights_of_its_snapshot() -> None:
    engine = ScriptedEngine(lambda r, version, weights: Reply((int(weights["w"]),), (-1.0,)) if weights else Reply((0,), (-1.0,)))

    async def main() -> None:
        await engine.generate(request(0))
        weights = {"w": torch.tensor(3.0)}
        await engine.publish(1, weights)
        weights["w"].fill_(7.0)
        assert (await engine.generate(request(1, version=1))).token_ids == (3,)
        assert (await engine.generate(request(0))).token_ids == (0,)

    simulated(main)


def test_snapshots_go_when_neither_new_nor_pinned() -> None:
    engine = ScriptedEngine(echo, keep=1)

    async def main() -> None:
        await engine.generate(request(0))
        await engine.publish(1, {})
        await engine.generate(request(0))
        with pytest.raises(EngineError, match="versions only grow"):
            await engine.publish(0, {})
        await engine.end(0)
        with pytest.raises(UnknownVersion, match="snapshot 0"):
            await engine.generate(request(0))

    simulated(main)


def test_what_the_script_raises_arrives_as_an_engine_error_with_its_cause() -> None:
    def broken(*_: Any) -> Reply:
        raise ZeroDivisionError("script")

    engine = ScriptedEngine(broken)

    async def main() -> None:
        with pytest.raises(EngineError, match="dispatch 0, turn 0: the script raised") as raised:
            await engine.generate(request())
        assert isinstance(raised.value.__cause__, ZeroDivisionError)

    simulated(main)


def test_ending_and_closing_fail_what_runs() -> None:
    engine = ScriptedEngine(echo, latency=Latency(first=10.0))

    async def main() -> None:
        first, second = (asyncio.create_task(engine.generate(request(dispatch))) for dispatch in range(2))
        await asyncio.sleep(1)
        with pytest.raises(EngineError, match="already has a request"):
            await engine.generate(request(0))
        await engine.end(0)
        await engine.end(77)
        with pytest.raises(EngineError, match="dispatch 0 was ended"):
            await first
        await engine.close()
        with pytest.raises(EngineError, match="closed while the request of dispatch 1"):
            await second
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(3))
        assert now() == 1.0

    simulated(main)


def test_a_reply_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="needs tokens"):
        Reply((), ())
