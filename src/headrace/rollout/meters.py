"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineMeters:
    """What the engine has done since its start.

    ``prefill_tokens`` are tokens fed that the engine had not just sampled; ``refilled_tokens`` are those among them that
    had been in a cache before (evicted, invalidated by a publication, or a context that changed). ``busy_seconds`` is
    time inside ticks: measured, or charged in simulated time. ``slot_waits`` counts requests that had to wait for a slot.
    """

    sampled_tokens: int = 0
    prefill_tokens: int = 0
    refilled_tokens: int = 0
    ticks: int = 0
    busy_seconds: float = 0.0
    slot_waits: int = 0
