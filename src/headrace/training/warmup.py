"""Supervised cold start: clone demonstrations until online learning has something to work with.

A policy that never succeeds earns nothing to learn from, and one that always succeeds has nothing to gain. So the
demonstrations are imperfect, and training may end as soon as a sampled probe on tasks of their own reaches a wanted success.

The loss of a step is the weighted mean of negative log-probabilities over its tokens: weight 1 on what the demonstrator
said (its end tokens included), ``observation_weight`` on everything else. Predicting what the world says teaches a small
policy to look back at names and numbers long before actions alone would.

Hidden matrices take Muon steps (orthogonalized momentum, `torch.optim.Muon <https://kellerjordan.github.io/posts/muon/>`_)
unless asked otherwise: a new policy learns to copy names from about a third of the text that AdamW needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.rollout.trajectory import TokenRow
from headrace.training.optimizer import AdamWSettings, Optimizer
from headrace.training.packing import MicroBatch, pack, plan
from headrace.training.policy import Policy

Rows = Sequence[TokenRow]
"""One demonstration as the policy reads it: usually one row; several where a chat template rewrites history."""


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """How the cold start learns.

    ``optimizer``: "muon" gives hidden matrices Muon steps of ``matrix_learning_rate`` and everything else AdamW steps of
    ``learning_rate`` (a new policy); "adamw" gives all of them AdamW steps (a pretrained one, or LoRA). Both rates rise
    linearly over ``rising_steps``, stay, and fall linearly to a tenth over the last ``falling_share`` of ``steps``.
    With a probe and a ``target_success``, training ends at the first probe that reaches it; probes come every
    ``probe_every`` steps from step ``probe_from`` on, and after the last step.
    """

    steps: int = 300
    batch_size: int = 16
    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 1e-2
    matrix_learning_rate: float = 2e-2
    rising_steps: int = 20
    falling_share: float = 0.3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    observation_weight: float = 0.3
    max_tokens: int = 16384
    held_out: int = 64
    target_success: float | None = None
    probe_every: int = 25
    probe_from: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_tokens", "probe_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"warmup.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("rising_steps", "observation_weight", "held_out", "probe_from", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"warmup.{name} must not be negative, is {getattr(self, name)}")
        if not self.learning_rate > 0 or not self.clip_norm > 0:
            raise ValueError("warmup.learning_rate and warmup.clip_norm must be above 0")
        if not 0 <= self.falling_share <= 1:
            raise ValueError(f"warmup.falling_share must lie in [0, 1], is {self.falling_share}")

    def shape(self, step: int) -> float:
        """The share of the learning rate that step ``step`` (from 0) takes."""
        rise = min(1.0, (step + 1) / (self.rising_steps + 1))
        falling = self.falling_share * self.steps
        return rise if falling == 0 else min(rise, 0.1 + 0.9 * (self.steps - step) / falling)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Sampled success on tasks that are neither demonstrated nor trained on later."""

    success: float
    attempts: int
    by_kind: Mapping[str, float] = field(default_factory=dict)


Probe = Callable[[Policy], ProbeResult]


@dataclass(frozen=True, slots=True)
class WarmupProgress:
    """After ``step`` of at most ``steps`` steps: the step's loss, and what a probe found if there was one now."""

    step: int
    steps: int
    loss: float
    probe: ProbeResult | None


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What the cold start did. Losses are in nats per token; ``held_out_loss`` counts action tokens only (NaN with nothing held out)."""

    steps: int
    seconds: float
    demonstrations: int
    tokens: int
    loss: float
    held_out_loss: float
    probes: tuple[tuple[int, ProbeResult], ...]
    reached_target: bool | None

    @property
    def success(self) -> float | None:
        """What the last probe found."""
        return self.probes[-1][1].success if self.probes else None


def warm_start(
    policy: Policy,
    demonstrations: Sequence[Rows],
    settings: WarmupSettings,
    *,
    probe: Probe | None = None,
    progress: Callable[[WarmupProgress], None] | None = None,
) -> WarmupReport:
    """Train ``policy`` in place on ``demonstrations`` (see ``demonstrations.py`` for how a world makes them).

    The last ``held_out`` demonstrations are measured and not learned from. The same policy, demonstrations, settings and
    probe give the same weights on the same machine. Raises ``ValueError`` where nothing is left to learn from.
    """
    began = time.perf_counter()
    learned = demonstrations[: len(demonstrations) - settings.held_out]
    held_out = demonstrations[len(learned) :]
    if not any(_has_action(rows) for rows in learned):
        raise ValueError(f"{len(demonstrations)} demonstrations, {settings.held_out} of them held out, leave no action to learn from")
    trainer = _Trainer(policy, settings)
    batches = _batches(learned, settings)
    probes: list[tuple[int, ProbeResult]] = []
    losses: list[float] = []
    tokens = 0
    policy.training_mode(True)
    for step in range(1, settings.steps + 1):
        batch = next(batches)
        losses.append(trainer.step(batch))
        tokens += sum(len(row.token_ids) for rows in batch for row in rows)
        found = _probe_now(policy, probe, step, settings)
        if found is not None:
            probes.append((step, found))
        if progress is not None:
            progress(WarmupProgress(step, settings.steps, losses[-1], found))
        if found is not None and settings.target_success is not None and found.success >= settings.target_success:
            break
    policy.training_mode(False)
    return WarmupReport(
        steps=len(losses),
        seconds=time.perf_counter() - began,
        demonstrations=len(learned),
        tokens=tokens,
        loss=float(np.mean(losses[-10:])),
        held_out_loss=action_loss(policy, held_out, settings.max_tokens),
        probes=tuple(probes),
        reached_target=None if probe is None or settings.target_success is None else probes[-1][1].success >= settings.target_success,
    )


def action_loss(policy: Policy, demonstrations: Sequence[Rows], max_tokens: int = 16384) -> float:
    """Mean negative log-probability (nats) of the demonstrated action tokens; NaN where there are none."""
    total, count = 0.0, 0
    with torch.no_grad():
        for group in _grouped([rows for rows in demonstrations if _has_action(rows)], max_tokens):
            logprobs_m = policy.score(pack(group).rows).logprobs_m
            total -= float(logprobs_m.double().sum())
            count += int(logprobs_m.numel())
    return total / count if count else math.nan


class _Weighted(NamedTuple):
    batch: MicroBatch
    weight_m: Tensor


@dataclass(frozen=True)
class _Scheduled(AdamWSettings):
    """AdamW settings whose rate follows the cold start's schedule."""

    shape: Callable[[int], float] = field(kw_only=True)

    def rate(self, step: int) -> float:
        return self.learning_rate * self.shape(step)


class _Trainer:
    """Weighted cross-entropy steps."""

    def __init__(self, policy: Policy, settings: WarmupSettings) -> None:
        self.policy = policy
        self.settings = settings
        parameters = policy.trainable()
        matrices = hidden_matrices(policy) if settings.optimizer == "muon" else {}
        rest = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        scheduled = _Scheduled(
            learning_rate=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
            shape=settings.shape,
        )
        self._adamw = Optimizer(rest, scheduled)
        muon: Any = torch.optim.Muon  # torch leaves its methods untyped
        self._muon: Any = muon(matrices.values(), lr=1.0, weight_decay=settings.weight_decay) if matrices else None

    def step(self, demonstrations: Sequence[Rows]) -> float:
        """One optimizer step; returns the loss before it."""
        packs = [weighted_pack(group, self.settings.observation_weight) for group in _grouped(demonstrations, self.settings.max_tokens)]
        total = sum(float(pack.weight_m.sum()) for pack in packs)
        loss = 0.0
        with self._adamw.accumulating():
            for batch, weight_m in packs:
                logprobs_m = self.policy.score(batch.rows).logprobs_m
                part = -(weight_m.to(logprobs_m.device) * logprobs_m).sum() / total
                part.backward()  # type: ignore[no-untyped-call]
                loss += float(part.detach())
        if not math.isfinite(loss):
            raise ArithmeticError(f"the warm start's loss is {loss} at step {self._adamw.steps + 1}: lower its learning rate")
        if self._muon is not None:
            for group in self._muon.param_groups:
                group["lr"] = self.settings.matrix_learning_rate * self.settings.shape(self._adamw.steps)
            self._muon.step()
            self._muon.zero_grad(set_to_none=True)
        self._adamw.step()
        return loss


def hidden_matrices(policy: Policy) -> dict[str, torch.nn.Parameter]:
    """The float32 matrices between the embedding and the head, which Muon is made for; ``ValueError`` for a policy with LoRA."""
    if policy.lora is not None:
        raise ValueError('Muon trains whole matrices; with LoRA set warmup.optimizer = "adamw"')
    ends = (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())  # type: ignore[no-untyped-call]
    outer = {id(module.weight) for module in ends if module is not None}
    return {
        name: parameter
        for name, parameter in policy.trainable().items()
        if parameter.ndim == 2 and parameter.dtype == torch.float32 and id(parameter) not in outer
    }


def weighted_pack(demonstrations: Sequence[Rows], observation_weight: float) -> _Weighted:
    """A pack that scores every token with a weight (all but the first of a row), and the weights in the order of its scores."""

    def counted(row: TokenRow) -> list[bool]:
        if observation_weight == 0:
            return list(row.action_mask)
        return [position > 0 for position in range(len(row.token_ids))]

    batch = pack(demonstrations, scored=counted)
    weight_nt = np.zeros(batch.mask_nt.shape, dtype=np.float32)
    for i, rows in enumerate(demonstrations):
        actions = np.concatenate([np.asarray(row.action_mask, dtype=bool)[np.asarray(counted(row), dtype=bool)] for row in rows])
        weight_nt[i, : actions.size] = np.where(actions, 1.0, observation_weight)
    return _Weighted(batch, torch.from_numpy(weight_nt).flatten()[batch.cell_m])


def _has_action(rows: Rows) -> bool:
    return any(any(row.action_mask) for row in rows)


def _grouped(demonstrations: Sequence[Rows], max_tokens: int) -> list[list[Rows]]:
    lengths = [sum(len(row.token_ids) for row in rows) for rows in demonstrations]
    return [[demonstrations[i] for i in group] for group in plan(lengths, max_tokens)]


def _batches(demonstrations: Sequence[Rows], settings: WarmupSettings) -> Iterator[list[Rows]]:
    """Batches without end: the demonstrations in a new order in every pass, drawn from the seed."""
    order = np.random.default_rng(settings.seed)
    usable = [rows for rows in demonstrations if _has_action(rows)]
    waiting: list[int] = []
    while True:
        while len(waiting) < settings.batch_size:
            waiting.extend(order.permutation(len(usable)).tolist())
        batch, waiting = waiting[: settings.batch_size], waiting[settings.batch_size :]
        yield [usable[i] for i in batch]


def _probe_now(policy: Policy, probe: Probe | None, step: int, settings: WarmupSettings) -> ProbeResult | None:
    due = step == settings.steps or (step >= settings.probe_from and step % settings.probe_every == 0)
    if probe is None or not due:
        return None
    policy.training_mode(False)
    result = probe(policy)
    policy.training_mode(True)
    return result
