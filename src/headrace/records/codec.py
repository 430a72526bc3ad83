"""Events and trajectories as what SQLite stores, and back."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.rollout.trajectory import (
    Consumption,
    Dispatch,
    Drop,
    Event,
    Prior,
    Publication,
    Receipt,
    Restored,
    TokenRow,
    Trajectory,
    Turn,
)

EVENT_TYPES: dict[str, type[Event]] = {
    "prior": Prior,
    "dispatch": Dispatch,
    "receipt": Receipt,
    "drop": Drop,
    "consumption": Consumption,
    "publication": Publication,
    "restored": Restored,
}
_KINDS = {event_type: kind for kind, event_type in EVENT_TYPES.items()}
FIELDS: dict[str, tuple[str, ...]] = {kind: tuple(f.name for f in dataclasses.fields(t)) for kind, t in EVENT_TYPES.items()}


def event_kind(event: Event) -> str:
    return _KINDS[type(event)]


def event_dispatch(event: Event) -> int | None:
    """The dispatch number that an event is about, if it is about one."""
    match event:
        case Dispatch():
            return event.number
        case Receipt() | Drop() | Consumption():
            return event.dispatch
        case _:
            return None


def encode_event(event: Event) -> str:
    """JSON with every float at full precision (it reads back bit for bit); non-finite numbers are refused."""
    body = {name: getattr(event, name) for name in FIELDS[event_kind(event)]}
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ValueError(f"an event cannot hold a number that is not finite: {event}") from error
    except TypeError as error:
        raise TypeError(f"an event holds plain Python numbers and text only: {event}") from error


def decode_event(kind: str, body: str) -> Event:
    """``ValueError`` where the kind is unknown or the body does not fit it."""
    event_type = EVENT_TYPES.get(kind)
    if event_type is None:
        raise ValueError(f"unknown kind of event {kind!r}")
    try:
        return event_type(**json.loads(body))
    except TypeError as error:
        raise ValueError(f"the body of a {kind} event does not fit: {body[:200]}") from error


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory without its dispatch, one field per column.

    Little-endian int32 and float32; all rows lie end to end and ``row_lengths`` cuts them. ``logprobs`` and ``versions``
    hold action tokens only, since 0.0 and -1 are certain elsewhere. ``token_ids``, ``versions`` and ``turns`` are deflated.
    """

    outcome: float | None
    success: bool
    reason: str
    unmatched_actions: int
    generation_seconds: float
    environment_seconds: float
    row_lengths: bytes
    token_ids: bytes
    action_mask: bytes
    logprobs: bytes
    versions: bytes
    turns: bytes


TRAJECTORY_COLUMNS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(StoredTrajectory))


def encode_trajectory(trajectory: Trajectory) -> StoredTrajectory:
    """``ValueError`` where a row carries a log-probability or a version on a token that the policy did not sample."""
    rows = trajectory.rows
    mask = _concatenated([row.action_mask for row in rows], np.bool_)
    logprobs = _concatenated([row.logprobs for row in rows], "<f4")
    versions = _concatenated([row.versions for row in rows], "<i4")
    if np.any(logprobs[~mask] != 0.0) or np.any(versions[~mask] != -1):
        raise ValueError(
            f"dispatch {trajectory.dispatch.number}: a token with action mask False must have log-probability 0.0 and version -1"
        )
    turns = json.dumps([(turn.observation, turn.action) for turn in trajectory.turns], separators=(",", ":"))
    return StoredTrajectory(
        outcome=trajectory.outcome if math.isfinite(trajectory.outcome) else None,
        success=trajectory.success,
        reason=trajectory.reason,
        unmatched_actions=trajectory.unmatched_actions,
        generation_seconds=trajectory.generation_seconds,
        environment_seconds=trajectory.environment_seconds,
        row_lengths=np.asarray([len(row.token_ids) for row in rows], "<i4").tobytes(),
        token_ids=_deflate(_concatenated([row.token_ids for row in rows], "<i4").tobytes()),
        action_mask=np.packbits(mask).tobytes(),
        logprobs=logprobs[mask].tobytes(),
        versions=_deflate(versions[mask].tobytes()),
        turns=_deflate(turns.encode()),
    )


def decode_trajectory(stored: StoredTrajectory, dispatch: Dispatch) -> Trajectory:
    lengths = np.frombuffer(stored.row_lengths, "<i4")
    token_ids = np.frombuffer(zlib.decompress(stored.token_ids), "<i4")
    mask = np.unpackbits(np.frombuffer(stored.action_mask, np.uint8), count=len(token_ids)).astype(np.bool_)
    logprobs = np.zeros(len(token_ids), "<f4")
    logprobs[mask] = np.frombuffer(stored.logprobs, "<f4")
    versions = np.full(len(token_ids), -1, "<i4")
    versions[mask] = np.frombuffer(zlib.decompress(stored.versions), "<i4")
    cuts = [0, *np.cumsum(lengths).tolist()]
    rows = tuple(
        TokenRow(
            token_ids=tuple(token_ids[start:end].tolist()),
            action_mask=tuple(mask[start:end].tolist()),
            logprobs=tuple(logprobs[start:end].tolist()),
            versions=tuple(versions[start:end].tolist()),
        )
        for start, end in pairwise(cuts)
    )
    pairs = json.loads(zlib.decompress(stored.turns).decode())
    return Trajectory(
        dispatch=dispatch,
        rows=rows,
        turns=tuple(Turn(observation, action) for observation, action in pairs),
        outcome=math.nan if stored.outcome is None else stored.outcome,
        success=bool(stored.success),
        reason=stored.reason,
        unmatched_actions=stored.unmatched_actions,
        generation_seconds=stored.generation_seconds,
        environment_seconds=stored.environment_seconds,
    )


def _concatenated(parts: Sequence[Sequence[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.zeros(0, dtype)


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data, level=1)
