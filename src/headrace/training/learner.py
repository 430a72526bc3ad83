"""One batch -> gradient steps -> a new version of the policy.

An update is one batch: ``old`` log-probabilities and advantages span it. It is cut into mini-batches, each one optimizer
step; a mini-batch is cut into micro-batches that fit memory, whose losses add up to the step's loss.

    for each epoch: shuffle, cut into mini-batches
        for each mini-batch: for each micro-batch: score, objective, backward
                             clip, step
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headrace.algorithms import BatchTotals, Recipe, reference_kl
from headrace.errors import RunFailed
from headrace.rollout.trajectory import Trajectory
from headrace.training.credit import Credit
from headrace.training.logprobs import TokenScores
from headrace.training.metering import LearnerMetrics, StepMeter, UpdateMeter
from headrace.training.optimizer import AdamWSettings, Optimizer
from headrace.training.packing import MicroBatch, PackedRows, micro_batches
from headrace.training.policy import Policy


@dataclass(frozen=True)
class LearnerSettings:
    """How a batch becomes steps.

    ``max_tokens``: context tokens of a forward pass; memory, not mathematics. ``old``: "recompute" takes old log-probabilities
    under the training engine at the start of the update, and the objective's rollout correction covers the engines' mismatch
    and policy lag; "rollout" takes those that the generation engine reported, without a correction. ``kl_coefficient``:
    weight of the k3 KL to a reference policy, 0 without one. ``entropy``: report it (costs a little). ``autocast``: bfloat16
    arithmetic in the forward pass over float32 parameters. ``kl_sample``: so many trajectories are scored again after the
    update, to report how far it moved the policy. ``max_skipped``: so many non-finite steps in a row end the run.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    warmup_steps: int = 0
    minibatches: int = 1
    epochs: int = 1
    max_tokens: int = 8192
    old: Literal["recompute", "rollout"] = "recompute"
    kl_coefficient: float = 0.0
    entropy: bool = False
    autocast: bool = False
    kl_sample: int = 8
    max_skipped: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.old not in ("recompute", "rollout"):
            raise ValueError(f"old must be 'recompute' or 'rollout', got {self.old!r}")
        for name in ("minibatches", "epochs", "max_tokens", "max_skipped"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class UpdateResult:
    """``steps`` were taken, ``skipped_steps`` left out because their loss or gradient was not finite."""

    batch: int
    steps: int
    skipped_steps: int
    metrics: LearnerMetrics
    seconds: float


@dataclass(frozen=True)
class _MiniBatch:
    micro: tuple[MicroBatch, ...]
    totals: BatchTotals


@dataclass
class _Update:
    """What one update works on; tables are [n, t] over all its trajectories."""

    advantages_n: Tensor
    old_nt: Tensor
    known_n: Tensor  # bool [n]: old_nt holds this row
    meter: UpdateMeter = field(default_factory=UpdateMeter)


class Learner:
    """Trains ``policy`` under ``recipe``; ``reference`` is the policy that ``kl_coefficient`` holds it to."""

    def __init__(self, policy: Policy, recipe: Recipe, settings: LearnerSettings, *, reference: Policy | None = None) -> None:
        if settings.kl_coefficient and reference is None:
            raise ValueError(f"kl_coefficient is {settings.kl_coefficient}, but there is no reference policy to stay close to")
        self.policy = policy
        self.recipe = recipe
        self.settings = settings
        self.reference = reference if settings.kl_coefficient else None
        self._optimizer = Optimizer(
            policy.trainable(),
            AdamWSettings(
                learning_rate=settings.learning_rate,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                clip_norm=settings.clip_norm,
                warmup_steps=settings.warmup_steps,
            ),
        )
        self._skipped_in_a_row = 0

    def update(self, batch: int, trajectories: Sequence[Trajectory], credit: Credit) -> UpdateResult:
        """Train on ``trajectories`` once; ``credit`` belongs to them, in order. ``batch`` numbers the update and keys its shuffles.

        The same weights, state, arguments and thread count give the same result to the bit. Raises ``RunFailed`` after
        ``max_skipped`` steps in a row whose loss or gradient was not finite; the weights are then still the last good ones.
        """
        if len(credit.advantages) != len(trajectories):
            raise ValueError(f"credit for {len(credit.advantages)} trajectories, but the batch has {len(trajectories)}")
        started = time.perf_counter()
        update = self._begin(trajectories, credit)
        for epoch in range(self.settings.epochs):
            plan = self._mini_batches(batch, epoch, trajectories)
            if epoch == 0 and self.settings.old == "recompute":
                self._score_old(update, plan)
            for number, mini_batch in enumerate(plan):
                with self._dropout_seed(batch, epoch, number):
                    self._step(batch, update, mini_batch)
        self._measure_move(update, batch, trajectories)
        metrics = update.meter.result()
        return UpdateResult(batch, metrics.steps, metrics.skipped_steps, metrics, time.perf_counter() - started)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Tensors on the CPU and plain data from which ``load_state_dict`` continues to the bit. Without ``copy`` the next update
        changes them: for whoever writes them down before it.
        """
        return {"optimizer": self._optimizer.state_dict(copy=copy), "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back trained parameters (the policy's own included), optimizer and counters; ValueError for another policy's state."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])

    # --- before the steps ---

    def _begin(self, trajectories: Sequence[Trajectory], credit: Credit) -> _Update:
        device = self.policy.device
        width = max((trajectory.action_tokens for trajectory in trajectories), default=0)
        advantages_n = torch.tensor(credit.advantages, dtype=torch.float32, device=device)
        old_nt = torch.zeros((len(trajectories), width), device=device)
        return _Update(advantages_n, old_nt, torch.zeros(len(trajectories), dtype=torch.bool, device=device))

    def _mini_batches(self, batch: int, epoch: int, trajectories: Sequence[Trajectory]) -> list[_MiniBatch]:
        order = np.random.default_rng([self.settings.seed, batch, epoch]).permutation(len(trajectories))
        parts = [part.tolist() for part in np.array_split(order, self.settings.minibatches) if part.size]
        return [self._mini_batch(sorted(members), trajectories) for members in parts]

    def _mini_batch(self, members: Sequence[int], trajectories: Sequence[Trajectory]) -> _MiniBatch:
        packed = micro_batches([trajectories[i].rows for i in members], self.settings.max_tokens, members=members)
        lengths = [trajectories[i].action_tokens for i in members]
        totals = BatchTotals(sequences=sum(length > 0 for length in lengths), tokens=sum(lengths))
        return _MiniBatch(tuple(micro.to(self.policy.device) for micro in packed), totals)

    def _score_old(self, update: _Update, plan: Sequence[_MiniBatch]) -> None:
        """Old log-probabilities of the first epoch's mini-batches, in the very micro-batches that will be trained on.

        The first mini-batch is left out where nothing random happens in training: its own forward pass runs under the same
        weights and gives the same numbers.
        """
        for mini_batch in plan if self.policy.has_dropout else plan[1:]:
            for micro in mini_batch.micro:
                self._remember_old(update, micro, self._plain_logprobs(self.policy, micro))

    def _remember_old(self, update: _Update, micro: MicroBatch, logprobs_nt: Tensor) -> None:
        members = list(micro.members)
        update.old_nt[members, : logprobs_nt.shape[1]] = logprobs_nt.detach().to(update.old_nt.dtype)
        update.known_n[members] = True

    def _plain_logprobs(self, policy: Policy, micro: MicroBatch) -> Tensor:
        """Without gradient and dropout: [n, t]."""
        with self._precision():
            return micro.spread(policy.measure(micro.rows, max_tokens=self.settings.max_tokens))

    # --- steps ---

    def _step(self, batch: int, update: _Update, mini_batch: _MiniBatch) -> None:
        self.policy.training_mode(True)
        meter = StepMeter(mini_batch.totals.tokens)
        with self._optimizer.accumulating():
            for micro in mini_batch.micro:
                self._accumulate(update, micro, mini_batch.totals, meter)
        self.policy.training_mode(False)
        report = self._optimizer.step(usable=meter.finite)
        update.meter.add(meter, report)
        self._skipped_in_a_row = 0 if report.taken else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self.settings.max_skipped:
            raise RunFailed(
                f"update {batch}: loss or gradient was not finite in {self._skipped_in_a_row} steps in a row: training has diverged; "
                f"lower learner.learning_rate (it is {self.settings.learning_rate:g}) and resume from an earlier checkpoint"
            )

    def _accumulate(self, update: _Update, micro: MicroBatch, totals: BatchTotals, meter: StepMeter) -> None:
        """Add the micro-batch's gradient.

        A trajectory beyond the budget goes row by row: the loss is differentiated with respect to its log-probabilities,
        measured before, and each piece then takes its share of that gradient through the model. One forward pass more, the
        same gradient.
        """
        if not micro.rows.scored:
            return
        pieces = micro.rows.split(self.settings.max_tokens)
        if len(pieces) == 1:
            self._loss(update, micro, self._scores(micro.rows), totals, meter).backward()  # type: ignore[no-untyped-call]
            return
        with torch.no_grad():
            parts = [self._scores(piece) for piece in pieces]
        entropies = [part.entropies_m for part in parts if part.entropies_m is not None]
        leaf_m = torch.cat([part.logprobs_m for part in parts]).requires_grad_()
        joined = TokenScores(leaf_m, torch.cat(entropies) if entropies else None)
        self._loss(update, micro, joined, totals, meter).backward()  # type: ignore[no-untyped-call]
        assert leaf_m.grad is not None
        for piece, grad_m in zip(pieces, leaf_m.grad.split([piece.scored for piece in pieces]), strict=True):  # type: ignore[no-untyped-call]
            self._scores(piece).logprobs_m.backward(grad_m)  # type: ignore[no-untyped-call]

    def _scores(self, rows: PackedRows) -> TokenScores:
        with self._precision():
            return self.policy.score(rows, entropy=self.settings.entropy)

    def _loss(self, update: _Update, micro: MicroBatch, scores: TokenScores, totals: BatchTotals, meter: StepMeter) -> Tensor:
        logprobs_nt = micro.spread(scores.logprobs_m)
        old_nt = self._old(update, micro, logprobs_nt)
        corrected = self.settings.old == "recompute"
        result = self.recipe.objective(
            logprobs_nt,
            old_nt,
            update.advantages_n[list(micro.members)],
            micro.mask_nt,
            micro.rollout_nt if corrected else None,
            totals=totals,
        )
        loss = result.loss
        reference: Tensor | None = None
        if self.reference is not None:
            reference = self._reference_kl(logprobs_nt, micro, totals)
            loss = loss + self.settings.kl_coefficient * reference
        meter.add(micro, loss, result.metrics, old_nt, scores.entropies_m, reference)
        return loss

    def _old(self, update: _Update, micro: MicroBatch, logprobs_nt: Tensor) -> Tensor:
        if self.settings.old == "rollout":
            return micro.rollout_nt
        members = list(micro.members)
        if not bool(update.known_n[members[0]]):
            self._remember_old(update, micro, logprobs_nt)
        return update.old_nt[members, : logprobs_nt.shape[1]]

    def _reference_kl(self, logprobs_nt: Tensor, micro: MicroBatch, totals: BatchTotals) -> Tensor:
        assert self.reference is not None
        reference_nt = self._plain_logprobs(self.reference, micro)
        objective: Any = self.recipe.objective
        reduction, max_len = getattr(objective, "reduction", "token-mean"), getattr(objective, "max_len", None)
        return reference_kl(logprobs_nt, reference_nt, micro.mask_nt, reduction, totals=totals, max_len=max_len)

    # --- after the steps ---

    def _measure_move(self, update: _Update, batch: int, trajectories: Sequence[Trajectory]) -> None:
        """KL(before || after the update) on a few trajectories drawn for this update."""
        count = min(self.settings.kl_sample, len(trajectories))
        if not count or self.settings.old == "rollout":
            return
        generator = np.random.default_rng([self.settings.seed, batch, self.settings.epochs])
        members = sorted(generator.choice(len(trajectories), size=count, replace=False).tolist())
        for micro in self._mini_batch(members, trajectories).micro:
            logprobs_nt = self._plain_logprobs(self.policy, micro)
            update.meter.add_move(logprobs_nt, update.old_nt[list(micro.members), : logprobs_nt.shape[1]], micro.mask_nt)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.policy.device.type, dtype=torch.bfloat16, enabled=self.settings.autocast)

    @contextmanager
    def _dropout_seed(self, *key: int) -> Iterator[None]:
        """Randomness of a step depends on (seed, update, epoch, step) and on nothing that ran before."""
        if not self.policy.has_dropout:
            yield
            return
        device = self.policy.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence([self.settings.seed, *key]).generate_state(1)[0]))
            yield
