"""An engine that answers from a function, at given latencies, without a model.

For tests, and for whole runs in simulated time whose bits must not depend on what else was in a batch: an answer is a
function of its request and snapshot alone, and time passes only through the event loop's timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.rollout.clock import now
from headrace.rollout.engine import Completion, EngineError, Request, Weights
from headrace.rollout.snapshots import VersionStore


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens and the log-probability of each. What exceeds the request's ``max_tokens`` or follows a stop token is cut off."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs) or not self.token_ids:
            raise ValueError(f"a reply needs tokens and as many log-probabilities, got {len(self.token_ids)} and {len(self.logprobs)}")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds until a reply: ``first`` before its first token and ``token`` for each."""

    first: float = 0.0
    token: float = 0.0


Answer = Callable[[Request, int, Weights], Reply]
LatencyOf = Callable[[Request], Latency]


class ScriptedEngine:
    """``answer(request, version, weights)`` gives the reply under a snapshot; ``weights`` is what was published as
    ``version`` (empty for the initial one). Whatever it raises, ``generate`` raises as an ``EngineError`` with that cause.

    ``latency`` is fixed or a function of the request. With ``version=None`` the answer is that of the newest snapshot at the
    start, and each token names the newest snapshot at the moment it would have been sampled. Snapshots are kept and pinned
    as by every engine.
    """

    weight_slots: int | None = None

    def __init__(
        self,
        answer: Answer,
        *,
        stop_token_ids: Iterable[int] = (),
        latency: Latency | LatencyOf | None = None,
        keep: int = 2,
        version: int = 0,
    ) -> None:
        self._answer = answer
        self._stops = frozenset(stop_token_ids)
        self._latency = Latency() if latency is None else latency
        self._snapshots: VersionStore[Weights] = VersionStore(keep=keep, version=version, value={})
        self._published: list[tuple[float, int]] = []
        self._first_version = version
        self._running: dict[int, asyncio.Future[None]] = {}
        self._closed = False

    async def generate(self, request: Request) -> Completion:
        if self._closed:
            raise EngineError("the engine is closed")
        if request.dispatch in self._running:
            raise EngineError(f"dispatch {request.dispatch}, turn {request.turn}: the dispatch already has a request under way")
        self._snapshots.pin(request.dispatch, request.version)
        version = self._snapshots.newest if request.version is None else request.version
        reply = self._reply(request, version)
        latency = self._latency if isinstance(self._latency, Latency) else self._latency(request)
        started, seconds = now(), latency.first + latency.token * len(reply.token_ids)
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(seconds, _finish, finished)
        self._running[request.dispatch] = finished
        try:
            await finished
        finally:
            timer.cancel()
            if self._running.get(request.dispatch) is finished:
                del self._running[request.dispatch]
        moments = [started + latency.first + latency.token * (i + 1) for i in range(len(reply.token_ids))]
        versions = tuple(self._newest_at(moment) if request.version is None else request.version for moment in moments)
        return Completion(reply.token_ids, reply.logprobs, versions, "stop" if reply.token_ids[-1] in self._stops else "length")

    async def publish(self, version: int, weights: Weights) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        self._snapshots.put(version, {name: tensor.detach().clone() for name, tensor in weights.items()})
        self._published.append((now(), version))

    async def end(self, dispatch: int) -> None:
        self._snapshots.unpin(dispatch)
        self._fail(dispatch, f"dispatch {dispatch} was ended while its request ran")

    async def close(self) -> None:
        self._closed = True
        for dispatch in list(self._running):
            self._fail(dispatch, f"the engine was closed while the request of dispatch {dispatch} ran")

    def _reply(self, request: Request, version: int) -> Reply:
        try:
            reply = self._answer(request, version, self._snapshots[version])
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"dispatch {request.dispatch}, turn {request.turn}: the script raised {error!r}") from error
        length = next((i + 1 for i, token in enumerate(reply.token_ids) if token in self._stops), len(reply.token_ids))
        length = min(length, request.max_tokens)
        return Reply(reply.token_ids[:length], reply.logprobs[:length])

    def _newest_at(self, moment: float) -> int:
        return max((version for published, version in self._published if published < moment), default=self._first_version)

    def _fail(self, dispatch: int, message: str) -> None:
        finished = self._running.pop(dispatch, None)
        if finished is not None and not finished.done():
            finished.set_exception(EngineError(message))


def _finish(finished: asyncio.Future[None]) -> None:
    if not finished.done():
        finished.set_result(None)
