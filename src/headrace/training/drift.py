"""SPO's drift: how far an update moved the policy on what a task's last response said.

D of task x at an update (2509.13232): the mean over action tokens of |change in log-probability| of the task's
previously consumed response j, under the weights after this update against under the weights after the update that
consumed j. The memory keeps each task's last consumed response with its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.rollout.trajectory import TokenRow, Trajectory
from headrace.training.packing import micro_batches
from headrace.training.policy import Policy


@dataclass(frozen=True)
class _Consumed:
    """A task's last consumed response: its rows (tokens and mask) and the log-probabilities of its action tokens, float32 [L]."""

    rows: tuple[TokenRow, ...]
    logprobs: Tensor


class DriftMemory:
    """``after_update`` gives each trajectory of a consumed batch its drift, and remembers it as its task's last response.

    ``max_tokens``: context tokens of a forward pass.
    """

    def __init__(self, *, max_tokens: int = 8192) -> None:
        self.max_tokens = max_tokens
        self._last: dict[str, _Consumed] = {}

    def after_update(self, policy: Policy, batch: Sequence[Trajectory]) -> list[float | None]:
        """Drifts in the order of ``batch``, None at a task's first visit; ``policy`` holds the weights after the update.

        A task's second response in one batch follows one that this very update consumed, so its drift is 0 exactly.
        Two scorings: previous responses, and the last new one of each task, to be stored.
        """
        newest = {trajectory.dispatch.task: trajectory for trajectory in batch}
        previous = {task: self._last[task] for task in newest if task in self._last}
        attempts = [consumed.rows for consumed in previous.values()] + [trajectory.rows for trajectory in newest.values()]
        logprobs = _logprobs(policy, attempts, self.max_tokens)
        drift: dict[str, float | None] = dict.fromkeys(newest)
        for (task, consumed), now in zip(previous.items(), logprobs, strict=False):
            drift[task] = float((now - consumed.logprobs).abs().mean(dtype=torch.float64))
        for (task, trajectory), now in zip(newest.items(), logprobs[len(previous) :], strict=True):
            self._last[task] = _Consumed(tuple(_bare(row) for row in trajectory.rows), now)
        drifts: list[float | None] = []
        for trajectory in batch:
            drifts.append(drift[trajectory.dispatch.task])
            drift[trajectory.dispatch.task] = 0.0
        return drifts

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain data: per task, the rows' tokens, mask and lengths, and the log-probabilities."""
        return {
            task: {
                "lengths": [len(row.token_ids) for row in consumed.rows],
                "token_ids": torch.tensor([token for row in consumed.rows for token in row.token_ids], dtype=torch.int32),
                "action_mask": torch.tensor([action for row in consumed.rows for action in row.action_mask], dtype=torch.bool),
                "logprobs": consumed.logprobs.clone(),
            }
            for task, consumed in self._last.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` gave."""
        self._last = {task: _restored(saved) for task, saved in state.items()}


def _logprobs(policy: Policy, attempts: Sequence[Sequence[TokenRow]], max_tokens: int) -> list[Tensor]:
    """Log-probabilities of the action tokens of each attempt, float32 [L] on the CPU."""
    found: dict[int, Tensor] = {}
    for micro in micro_batches(attempts, max_tokens):
        logprobs_nt = micro.spread(policy.measure(micro.rows, max_tokens=max_tokens).cpu())
        for row, member in enumerate(micro.members):
            found[member] = logprobs_nt[row][micro.mask_nt[row]].to(torch.float32)
    return [found[i] for i in range(len(attempts))]


def _bare(row: TokenRow) -> TokenRow:
    """Only what scoring needs."""
    length = len(row.token_ids)
    return TokenRow(row.token_ids, row.action_mask, (0.0,) * length, (-1,) * length)


def _restored(saved: Mapping[str, Any]) -> _Consumed:
    rows, start = [], 0
    for length in saved["lengths"]:
        ids = tuple(saved["token_ids"][start : start + length].tolist())
        rows.append(_bare(TokenRow(ids, tuple(saved["action_mask"][start : start + length].tolist()), (0.0,) * length, (-1,) * length)))
        start += length
    return _Consumed(tuple(rows), saved["logprobs"].clone())
