"""Batched generation in this process, for many conversations at once.

One driver coroutine ticks while anything is pending. A tick takes one snapshot's requests, feeds what their caches lack
(one token each while sampling; prompts and observations in chunks), samples one token for each that is fed up, and lets
everybody else run before the next tick, so that episodes answer and join again. Snapshots take turns.

Each dispatch keeps its cache between turns: a request feeds only what follows the common prefix of its context and the
cache. A cache made by other weights is thrown away, except in ``continue`` mode (``version=None``) with
``cache_on_publish="keep"``. Of more dispatches than slots, those without a slot wait in order; the longest idle dispatch
loses its cache and refills it later. With ``exact`` nothing is evicted, since a refill rounds differently: there a
dispatch waits until another one ends.

``end`` on a running request makes its ``generate`` raise ``EngineError``; cancelling the ``generate`` coroutine withdraws
the request and leaves the dispatch alive. A crash of the forward fails everything pending, and every later request, with
the original exception as the cause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from headrace.rollout.clock import CostModel, charge, is_simulated
from headrace.rollout.engine import Completion, EngineError, Request, Weights
from headrace.rollout.meters import EngineMeters
from headrace.rollout.pages import Span
from headrace.rollout.plain_module import plain_copy
from headrace.rollout.runners import PATHS, choose_runner
from headrace.rollout.sampling import greedy, sample, uniforms
from headrace.rollout.snapshots import Snapshots


@dataclass(slots=True)
class _Episode:
    """A live dispatch. ``cached`` are the tokens whose keys and values its slot holds, made by ``cache_version``."""

    dispatch: int
    pinned: bool = True
    slot: int | None = None
    cached: list[int] = field(default_factory=list)
    cache_version: int = -1
    reached: int = 0
    running: _Running | None = None


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way. ``context`` grows by what is sampled."""

    request: Request
    episode: _Episode
    future: asyncio.Future[Completion]
    context: list[int]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    waited: bool = False


class LocalEngine:
    """See the module. ``context_limit`` bounds a context plus its reply budget; ``tick_tokens`` bounds the prompt and
    observation tokens of a tick; ``version`` is the version of the weights that ``model`` has now.

    ``path`` names how the model is run (``runners``; ``paths`` are those that may be tried), ``refused_paths`` why not faster.
    """

    weight_slots: int | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_token_ids: Iterable[int],
        slots: int,
        context_limit: int,
        keep: int = 2,
        tick_tokens: int = 1024,
        cache_on_publish: Literal["recompute", "keep"] = "recompute",
        exact: bool = False,
        greedy: bool = False,
        costs: CostModel | None = None,
        version: int = 0,
        paths: Sequence[str] = PATHS,
    ) -> None:
        if slots < 1 or context_limit < 2 or tick_tokens < 1:
            raise ValueError(f"slots ({slots}), context_limit ({context_limit}) and tick_tokens ({tick_tokens}) must be positive")
        if cache_on_publish not in ("recompute", "keep"):
            raise ValueError(f"cache_on_publish is 'recompute' or 'keep', got {cache_on_publish!r}")
        config = model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and context_limit > longest:
            raise ValueError(f"context_limit {context_limit} is beyond the model's {longest} positions: lower it")
        self._model = plain_copy(model)
        self._vocabulary = int(config.vocab_size)
        self._stops = frozenset(stop_token_ids)
        self._context_limit, self._tick_tokens = context_limit, tick_tokens
        self._keep_cache = cache_on_publish == "keep"
        self.exact, self._greedy = exact, greedy
        self._costs = CostModel() if costs is None else costs
        self._runner, self.refused_paths = choose_runner(self._model, slots, context_limit, exact=exact, paths=paths)
        self.path = self._runner.path
        self._snapshots = Snapshots(self._model, keep=keep, version=version, packs=self._runner.packs)
        self._episodes: dict[int, _Episode] = {}
        self._idle: dict[int, _Episode] = {}  # seated and without a request, longest idle first
        self._free_slots = list(range(slots - 1, -1, -1))
        self._pending: dict[int, _Running] = {}  # by dispatch, in order of arrival
        self._served = version
        self._driver: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self.meters = EngineMeters()

    # --- the protocol ----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._refuse(request)
        episode = self._admit(request)
        running = _Running(request, episode, asyncio.get_running_loop().create_future(), list(request.token_ids))
        episode.running = running
        self._idle.pop(request.dispatch, None)
        self._pending[request.dispatch] = running
        self._wake()
        try:
            return await running.future
        finally:
            self._leave(running)

    async def publish(self, version: int, weights: Weights) -> None:
        self._refuse_when_down()
        self._snapshots.publish(version, weights)
        if not self._keep_cache:
            for episode in self._episodes.values():
                if not episode.pinned:
                    self._cut(episode, 0)
        await charge(self._costs.publication)

    async def end(self, dispatch: int) -> None:
        episode = self._episodes.pop(dispatch, None)
        if episode is None:
            return
        if episode.running is not None:
            _fail(episode.running, EngineError(f"dispatch {dispatch} was ended while its request ran"))
            self._pending.pop(dispatch, None)
            episode.running = None
        self._unseat(episode)
        self._snapshots.unpin(dispatch)
        if self._pending:
            self._wake()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._fail_all("the engine was closed while the request of dispatch {} ran", None)
        if self._driver is not None and not self._driver.done() and self._driver.get_loop() is asyncio.get_running_loop():
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)

    # --- admission and slots ---------------------------------------------------------------------------------------

    def _refuse_when_down(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(f"the engine has failed earlier: {self._failure!r}") from self._failure

    def _refuse(self, request: Request) -> None:
        self._refuse_when_down()
        who, length = f"dispatch {request.dispatch}, turn {request.turn}", len(request.token_ids)
        if length == 0 or request.max_tokens < 1:
            raise EngineError(f"{who}: a request needs a context and a reply budget of at least 1 token")
        if length + request.max_tokens > self._context_limit:
            raise EngineError(
                f"{who}: {length} context tokens and a reply of {request.max_tokens} exceed the context limit of {self._context_limit}"
            )
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._vocabulary:
            raise EngineError(f"{who}: the context has a token id outside the vocabulary of {self._vocabulary}")
        if (episode := self._episodes.get(request.dispatch)) is not None and episode.running is not None:
            raise EngineError(f"{who}: the dispatch already has a request under way")

    def _admit(self, request: Request) -> _Episode:
        """The dispatch's episode, its snapshot pinned."""
        self._snapshots.pin(request.dispatch, request.version)
        episode = self._episodes.setdefault(request.dispatch, _Episode(request.dispatch))
        episode.pinned = request.version is not None
        return episode

    def _leave(self, running: _Running) -> None:
        """The request is over, however it ended."""
        episode = running.episode
        if episode.running is not running:
            return
        episode.running = None
        self._pending.pop(episode.dispatch, None)
        if episode.slot is not None:
            self._idle[episode.dispatch] = episode
        if self._pending:
            self._wake()

    def _seat(self) -> None:
        """Give slots to pending requests in order of arrival."""
        for running in self._pending.values():
            if running.episode.slot is not None:
                continue
            if not self._free_slots and self._idle and not self.exact:
                self._unseat(self._idle[next(iter(self._idle))])
            if not self._free_slots:
                if not running.waited:
                    running.waited = True
                    self.meters = replace(self.meters, slot_waits=self.meters.slot_waits + 1)
                break
            running.episode.slot = self._free_slots.pop()

    def _unseat(self, episode: _Episode) -> None:
        self._idle.pop(episode.dispatch, None)
        if episode.slot is not None:
            self._cut(episode, 0)
            self._free_slots.append(episode.slot)
            episode.slot = None

    def _cut(self, episode: _Episode, length: int) -> None:
        """Keep at most ``length`` tokens of the episode's cache."""
        if episode.slot is not None and length < len(episode.cached):
            kept = self._runner.truncate(episode.slot, length)
            del episode.cached[kept:]

    # --- the driver ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if (self._driver is None or self._driver.done()) and not self._closed and self._failure is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="engine")

    async def _drive(self) -> None:
        try:
            await asyncio.sleep(0)
            while (version := self._next_version()) is not None:
                cost, finished = self._tick(version)
                await charge(cost)
                for running in finished:
                    self._deliver(running)
                # let episodes answer and join the next tick
                await asyncio.sleep(0)
        except Exception as error:
            self._failure = error
            self._fail_all(f"generation crashed ({error!r}) during the request of dispatch {{}}", error)

    def _next_version(self) -> int | None:
        """The snapshot whose turn it is among those with a seated request; None when there is none."""
        self._seat()
        wanted = {self._version(running) for running in self._pending.values() if running.episode.slot is not None}
        if not wanted:
            return None
        self._served = min((version for version in wanted if version > self._served), default=min(wanted))
        return self._served

    def _version(self, running: _Running) -> int:
        return self._snapshots.newest if running.request.version is None else running.request.version

    def _tick(self, version: int) -> tuple[float, list[_Running]]:
        """Feed and sample once for one snapshot; the simulated cost, and the requests that this completed."""
        started = time.perf_counter()
        chosen = self._choose(version)
        self._snapshots.activate(version)
        prefill = refilled = sampled = 0
        finished: list[_Running] = []
        # exact: one sequence per forward
        for group in [[pair] for pair in chosen] if self.exact else [chosen]:
            logits = self._runner.forward([span for _, span in group], version=version)
            for running, span in group:
                episode, stop = running.episode, span.start + len(span.token_ids)
                if len(span.token_ids) > 1 or not running.logprobs:
                    prefill += len(span.token_ids) - bool(running.logprobs)
                    refilled += max(0, min(stop, episode.reached) - span.start)
                episode.reached = max(episode.reached, stop)
                episode.cached.extend(span.token_ids)
            sampling = [running for running, span in group if span.sample]
            finished += self._sample(logits, sampling, version)
            sampled += len(sampling)
        cost = self._costs.generation_step + self._costs.decode_token * sampled + self._costs.prefill_token * prefill
        self.meters = replace(
            self.meters,
            sampled_tokens=self.meters.sampled_tokens + sampled,
            prefill_tokens=self.meters.prefill_tokens + prefill,
            refilled_tokens=self.meters.refilled_tokens + refilled,
            ticks=self.meters.ticks + 1,
            busy_seconds=self.meters.busy_seconds + (cost if is_simulated() else time.perf_counter() - started),
        )
        return cost, finished

    def _choose(self, version: int) -> list[tuple[_Running, Span]]:
        """What this tick feeds: single tokens first, then chunks within the budget, in order of arrival."""
        singles: list[tuple[_Running, Span]] = []
        longer: list[tuple[_Running, int, int]] = []
        for running in self._pending.values():
            episode = running.episode
            if episode.slot is None or self._version(running) != version:
                continue
            if not running.logprobs or episode.cache_version != version:
                self._match(running, version)
            start, length = len(episode.cached), len(running.context)
            if length - start == 1:
                singles.append((running, Span(episode.slot, start, running.context[start:])))
            else:
                longer.append((running, start, length))
        chosen = singles
        budget = max(self._tick_tokens - len(singles), self._tick_tokens // 4, 1)
        for running, start, length in longer:
            if budget <= 0:
                break
            # exact: pieces depend on the sequence alone
            stop = min(length, start + (self._tick_tokens if self.exact else budget))
            budget -= stop - start
            assert running.episode.slot is not None
            chosen.append((running, Span(running.episode.slot, start, running.context[start:stop], stop == length)))
        return chosen

    def _match(self, running: _Running, version: int) -> None:
        """Cut the cache back to what it may share with the context: same weights, same tokens, and at least one token to feed."""
        episode = running.episode
        keep = self._keep_cache and running.request.version is None
        if episode.cache_version != version and not keep:
            self._cut(episode, 0)
        episode.cache_version = version
        limit = min(len(episode.cached), len(running.context) - 1)
        if episode.cached[:limit] == running.context[:limit]:
            self._cut(episode, limit)
        else:
            self._cut(episode, next(i for i in range(limit) if episode.cached[i] != running.context[i]))

    def _sample(self, logits: Tensor, group: list[_Running], version: int) -> list[_Running]:
        """Append one token to each; those that are complete now."""
        if not group:
            return []
        if self._greedy:
            tokens, logprobs = greedy(logits)
        else:
            requests = [running.request for running in group]
            keys = [r.seed for r in requests], [r.turn for r in requests], [len(running.context) for running in group]
            tokens, logprobs = sample(logits, uniforms(*keys))
        finished: list[_Running] = []
        for running, token, logprob in zip(group, tokens, logprobs, strict=True):
            running.context.append(token)
            running.logprobs.append(logprob)
            running.versions.append(version)
            if token in self._stops or len(running.logprobs) >= running.request.max_tokens or logprob != logprob:
                finished.append(running)
        return finished

    def _deliver(self, running: _Running) -> None:
        if running.episode.running is not running:  # withdrawn or ended meanwhile
            return
        request, logprobs, versions = running.request, tuple(running.logprobs), tuple(running.versions)
        if logprobs[-1] != logprobs[-1]:
            who = f"dispatch {request.dispatch}, turn {request.turn}"
            _fail(running, EngineError(f"{who}: the model's logits are not finite (version {versions[-1]})"))
        elif not running.future.done():
            sampled = tuple(running.context[len(request.token_ids) :])
            running.future.set_result(Completion(sampled, logprobs, versions, "stop" if sampled[-1] in self._stops else "length"))
        self._leave(running)

    def _fail_all(self, message: str, cause: BaseException | None) -> None:
        for running in list(self._pending.values()):
            error = EngineError(message.format(running.request.dispatch))
            error.__cause__ = cause
            _fail(running, error)


def _fail(running: _Running, error: EngineError) -> None:
    if not running.future.done():
        running.future.set_exception(error)
