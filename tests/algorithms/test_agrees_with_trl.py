"""The same numbers as TRL's trainers, where the definitions coincide; the differences, where they do not.

TRL's loss methods run on random log-probabilities: a stand-in trainer returns them instead of a model's.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algorithms import CISPO, GMPO, GSPO, SAPO, Clip, Objective, normalize, reference_kl

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytest.importorskip("trl", reason="TRL is not installed (the development extra installs it)")

from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

MakeBatch = Callable[..., Any]
MAX_LEN = 17


def trl_loss(
    batch: Any, leaf: Tensor, loss_type: str, *, trainer: type = GRPOTrainer, correction: Tensor | None = None, **settings: Any
) -> Tensor:
    """The trainer's own ``_compute_loss`` on the batch, without a model."""
    mask = batch.mask.long()
    args = SimpleNamespace(delta=settings.get("delta"), sapo_temperature_pos=1.0, sapo_temperature_neg=1.0625, use_bias_correction_kl=False)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=args,
        aux_loss_enabled=False,
        beta=settings.get("beta", 0.0),
        current_gradient_accumulation_steps=1,
        epsilon_high=settings.get("high", 0.2),
        epsilon_low=settings.get("low", 0.2),
        importance_sampling_level=settings.get("level", "token"),
        loss_type=loss_type,
        max_completion_length=MAX_LEN,
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
    )
    inputs = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.rollout,
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": correction,
    }
    loss = trainer._compute_loss(stand_in, None, inputs)  # type: ignore[attr-defined]
    assert isinstance(loss, Tensor)
    return loss


def assert_same(objective: Objective, batch: Any, theirs: Callable[[Tensor], Tensor], rollout: Tensor | None = None) -> None:
    """Loss and gradient agree to rounding."""
    mine, other = batch.leaf(), batch.leaf()
    loss, expected = objective(mine, batch.old, batch.advantages, batch.mask, rollout).loss, theirs(other)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)


CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "grpo": (Clip(0.2, 0.2, reduction="sequence-mean"), {"loss_type": "grpo"}),
    "dapo": (Clip(0.2, 0.28), {"loss_type": "dapo", "high": 0.28}),
    "dr_grpo": (Clip(0.2, 0.2, reduction="fixed", max_len=MAX_LEN), {"loss_type": "dr_grpo"}),
    "cispo": (CISPO(1.5), {"loss_type": "cispo", "high": 1.5}),
    # TRL holds its temperatures in float32: 1.0625 is exact there.
    "sapo": (SAPO(1.0, 1.0625), {"loss_type": "sapo"}),
    "gspo": (GSPO(0.05, 0.08), {"loss_type": "grpo", "level": "sequence", "low": 0.05, "high": 0.08}),
    "gmpo": (GMPO(), {"loss_type": "grpo", "trainer": GMPOTrainer, "low": 0.4, "high": 0.4}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_agree(name: str, seed: int, make_batch: MakeBatch) -> None:
    objective, settings = CASES[name]
    batch = make_batch(seed, n=8, t=16)
    assert_same(objective, batch, lambda leaf: trl_loss(batch, leaf, **settings))


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo", "sapo"])
def test_truncated_importance_sampling_per_token_agrees(name: str, make_batch: MakeBatch) -> None:
    objective, settings = CASES[name]
    batch = make_batch(21, n=8, t=16)
    correction = (batch.old - batch.rollout).exp().clamp(max=2.0)
    assert_same(objective, batch, lambda leaf: trl_loss(batch, leaf, correction=correction, **settings), batch.rollout)


@pytest.mark.parametrize(
    ("name", "reduction"), [("grpo", "sequence-mean"), ("dapo", "token-mean"), ("dr_grpo", "fixed"), ("gmpo", "sequence-mean")]
)
def test_reference_kl_agrees(name: str, reduction: str, make_batch: MakeBatch) -> None:
    objective, settings = CASES[name]
    batch = make_batch(22, n=8, t=16)
    mine, other = batch.leaf(), batch.leaf()
    loss = objective(mine, batch.old, batch.advantages, batch.mask).loss
    loss = loss + 0.3 * reference_kl(mine, batch.rollout, batch.mask, reduction, max_len=MAX_LEN)
    expected = trl_loss(batch, other, beta=0.3, **settings)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_delta_equals_the_dual_clip_only_above_the_range(make_batch: MakeBatch) -> None:
    batch = make_batch(23, n=16, t=16, spread=1.0)
    settings = {"loss_type": "dapo", "high": 0.28}
    assert_same(Clip(0.2, 0.28, dual=2.0), batch, lambda leaf: trl_loss(batch, leaf, delta=2.0, **settings))
    # A cap inside the range also bounds tokens with a positive advantage, which no dual clip does.
    ours = Clip(0.2, 0.28, dual=1.1)(batch.logprobs, batch.old, batch.advantages, batch.mask).loss
    assert abs(float(ours - trl_loss(batch, batch.logprobs, delta=1.1, **settings))) > 1e-3


def test_a_fully_masked_row_counts_in_the_mean_of_trl_and_not_here(make_batch: MakeBatch) -> None:
    batch = make_batch(24, n=8, t=16, with_empty_row=True)
    for name in ("grpo", "dr_grpo", "gmpo"):
        objective, settings = CASES[name]
        ours = objective(batch.logprobs, batch.old, batch.advantages, batch.mask).loss
        if name == "gmpo":  # there such a row even contributes its advantage, with weight exp(0)
            theirs = trl_loss(batch, batch.logprobs, **settings) + batch.advantages[-1] / 8
        else:
            theirs = trl_loss(batch, batch.logprobs, **settings)
        torch.testing.assert_close(theirs, ours * 7 / 8, rtol=1e-12, atol=1e-14)


def test_group_advantages_differ_by_the_epsilon_alone() -> None:
    # TRL: (R - mean) / (std + 1e-4) with the unbiased standard deviation of each group.
    rewards = torch.rand(24, dtype=torch.float64)
    grouped = rewards.view(-1, 8)
    theirs = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    ours = normalize(rewards, torch.ones(24), "group", torch.arange(3).repeat_interleave(8)).view(-1, 8)
    scale = (grouped.std(1, keepdim=True) + 1e-8) / (grouped.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(ours * scale, theirs, rtol=1e-12, atol=1e-14)
