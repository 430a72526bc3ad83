"""The one boundary between those who act and the machine that samples.

Plain data crosses it and nothing else, so that an engine can live in this process, in another one, or on another machine.

An engine keeps the newest ``keep`` snapshots (``max_staleness + 1``) and every older one that still has a live dispatch;
a request for a snapshot that is gone raises ``UnknownVersion`` (its result would have been too stale to use).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Request:
    """Continue the conversation of ``dispatch``.

    ``token_ids`` is the whole context so far; an engine with a cache for this dispatch feeds only what is new, after
    checking that the context extends what the cache holds. ``version`` pins the snapshot; None means the newest at every
    token (the ``continue`` publication mode). Randomness is keyed by (seed, turn, position), so the sample does not
    depend on what else is in the batch beyond rounding. Generation stops after a stop token, which is part of the result,
    or after ``max_tokens``.
    """

    dispatch: int
    turn: int
    token_ids: tuple[int, ...]
    version: int | None
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled: ids (the stop token included), the log-probability of each under the full sampling distribution,
    the version that sampled each, and whether a stop token ("stop") or the budget ("length") ended it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: StopReason


Weights = Mapping[str, torch.Tensor]


@runtime_checkable
class Engine(Protocol):
    weight_slots: int | None
    """How many snapshots it can serve at once, None: several. With 1, dispatch stops before a publication until the attempts
    under way have ended."""

    async def generate(self, request: Request) -> Completion: ...

    async def publish(self, version: int, weights: Weights) -> None:
        """Make ``weights`` available as ``version``, the newest. The engine copies what it keeps."""
        ...

    async def end(self, dispatch: int) -> None:
        """The episode is over (or given up): cancel its request, free its cache, unpin its snapshot. Unknown dispatches are fine."""
        ...

    async def close(self) -> None: ...


class EngineError(RuntimeError):
    """Generation failed; the message names the dispatch and the cause."""


class UnknownVersion(EngineError):
    """The request names a snapshot that the engine does not hold."""
