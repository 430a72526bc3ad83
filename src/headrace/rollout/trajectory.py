"""Frozen records of what happened: exact tokens, and the events of the run's log.

A run is an append-only log of the events below; memory, sampler position and batch membership are folds over it.
Numbers have these meanings everywhere: ``dispatch`` counts attempts from 0 and names one attempt for ever, ``version``
counts published policy snapshots from 0 (0 is the initial policy), ``batch`` counts updates from 0, and a log position
is the number of events before an event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training row, token by token; all four tuples have the row's length.

    ``action_mask`` is True exactly on tokens that the policy sampled (by provenance, never by scanning).
    ``logprobs`` are those of the full sampling distribution, 0.0 where the mask is False.
    ``versions`` name the snapshot that sampled each token, -1 where the mask is False.
    """

    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.action_mask) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a row's fields differ in length: {len(self.token_ids)} tokens, {len(self.action_mask)} mask entries, "
                f"{len(self.logprobs)} log-probabilities, {len(self.versions)} versions"
            )

    @property
    def action_tokens(self) -> int:
        return sum(self.action_mask)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a person reads of one exchange; training never uses it. ``observation`` is what the policy saw before it acted."""

    observation: str
    action: str


# --- events of the log -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prior:
    """Offline evidence for a task, measured before training under ``version``."""

    task: str
    alpha: float
    beta: float
    version: int
    successes: float
    rollouts: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An attempt leaves: its snapshot is pinned and its prompt value frozen (None where the recipe has no memory)."""

    number: int
    task: str
    kind: str
    version: int
    alpha: float | None
    beta: float | None
    group: int | None
    seed: int

    @property
    def value(self) -> float:
        """The frozen prompt value alpha / (alpha + beta); 0.0 without a memory, so that the raw advantage is the reward."""
        if self.alpha is None or self.beta is None:
            return 0.0
        return self.alpha / (self.alpha + self.beta)


@dataclass(frozen=True, slots=True)
class Receipt:
    """An attempt's outcome is visible from here on. ``outcome`` is in [0, 1]."""

    dispatch: int
    outcome: float
    success: bool
    action_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """An attempt leaves untrained: after its receipt (stale), or without one (error, deadline, no score, no action tokens)."""

    dispatch: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Consumption:
    """An attempt is trained on, once. ``drift`` is SPO's D, None where the recipe has none or at a first visit."""

    dispatch: int
    batch: int
    advantage: float
    drift: float | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """The snapshot ``version``, made by the update ``batch``, serves dispatches from here on. Version 0 is not logged."""

    version: int
    batch: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The run went on from ``checkpoint``: folds ignore what lies between ``log_position`` and this event."""

    checkpoint: str
    log_position: int


Event = Prior | Dispatch | Receipt | Drop | Consumption | Publication | Restored


# --- finished attempts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished attempt.

    ``rows`` usually holds one row; a chat template that rewrites history gives one per rewritten prefix.
    ``outcome`` is the world's grade in [0, 1], or NaN where it could not be graded.
    ``reason`` says why it ended: the world's own word ("success", "answered", "horizon"), or "context" and "reply" where
    the context or the reply budget ran out.
    """

    dispatch: Dispatch
    rows: tuple[TokenRow, ...]
    turns: tuple[Turn, ...]
    outcome: float
    success: bool
    reason: str
    unmatched_actions: int = 0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def action_tokens(self) -> int:
        return sum(row.action_tokens for row in self.rows)

    @property
    def context_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def scored(self) -> bool:
        return math.isfinite(self.outcome)


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that ended in an error or at a deadline: never an outcome, never re-issued, counted by ``reason``.

    ``reason`` is one of "environment_error", "engine_error", "environment_deadline", "engine_deadline",
    "episode_deadline", "version_gone", "aborted"; ``detail`` names the culprit.
    """

    dispatch: Dispatch
    reason: str
    detail: str
