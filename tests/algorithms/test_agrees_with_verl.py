"""The same numbers as verl's ``core_algos``, where the definitions coincide; the differences, where they do not.

verl pins an older transformers, so it lives in an environment of its own: ``make test-verl``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.algorithms import CISPO, GMPO, GSPO, SAPO, BatchTotals, Clip, Objective, normalize

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not installed here: it pins an older transformers and has its own run, `make test-verl`"
)
from verl.workers.config.actor import ActorConfig  # noqa: E402

MakeBatch = Callable[..., Any]
MAX_LEN = 17
NO_DUAL = 1e30


def actor(**settings: Any) -> Any:
    scale = settings.pop("loss_scale_factor", None)
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **settings)
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    return config


def verl_loss(name: str, batch: Any, leaf: Tensor, *, agg: str = "token-mean", weights: Tensor | None = None, **settings: Any) -> Tensor:
    mask = batch.mask.to(leaf.dtype)
    advantages = batch.advantages[:, None] * mask
    policy_loss = core_algos.get_policy_loss_fn(name)
    loss, _ = policy_loss(batch.old, leaf, advantages, mask, loss_agg_mode=agg, config=actor(**settings), rollout_is_weights=weights)
    assert isinstance(loss, Tensor)
    return loss


def assert_same(
    objective: Objective, batch: Any, theirs: Callable[[Tensor], Tensor], rollout: Tensor | None = None, rtol: float = 1e-10
) -> None:
    mine, other = batch.leaf(), batch.leaf()
    loss, expected = objective(mine, batch.old, batch.advantages, batch.mask, rollout).loss, theirs(other)
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=1e-12)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=rtol, atol=1e-12)


CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "vanilla, dual clip 3": (Clip(0.2, 0.28, dual=3.0), {"name": "vanilla", "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}),
    "vanilla, dual clip 1.1": (Clip(0.2, 0.28, dual=1.1), {"name": "vanilla", "clip_ratio_high": 0.28, "clip_ratio_c": 1.1}),
    "vanilla, no dual clip": (Clip(0.2, 0.28), {"name": "vanilla", "clip_ratio_high": 0.28, "clip_ratio_c": NO_DUAL}),
    "vanilla, sequence-mean": (
        Clip(0.2, 0.2, dual=3.0, reduction="sequence-mean"),
        {"name": "vanilla", "agg": "seq-mean-token-mean"},
    ),
    "vanilla, fixed": (
        Clip(0.2, 0.2, dual=3.0, reduction="fixed", max_len=MAX_LEN),
        {"name": "vanilla", "agg": "seq-mean-token-sum-norm", "loss_scale_factor": MAX_LEN},
    ),
    "gspo": (GSPO(0.05, 0.08), {"name": "gspo", "agg": "seq-mean-token-mean", "clip_ratio_low": 0.05, "clip_ratio_high": 0.08}),
    "sapo": (SAPO(1.0, 1.05), {"name": "sapo", "agg": "seq-mean-token-mean"}),
    "geo_mean": (GMPO(0.4), {"name": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    # verl caps at 1 + high, and also from below at 1 - low: low = 1 switches that off.
    "cispo": (CISPO(1.5), {"name": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.5}),
}
# verl adds 1e-8 to the token count of a row in its sequence means.
TOLERANCE = {"vanilla, sequence-mean": 1e-7, "gspo": 1e-7, "sapo": 1e-7, "geo_mean": 1e-7}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_agree(case: str, seed: int, make_batch: MakeBatch) -> None:
    objective, settings = CASES[case]
    batch = make_batch(seed, n=8, t=16)
    assert_same(objective, batch, lambda leaf: verl_loss(batch=batch, leaf=leaf, **settings), rtol=TOLERANCE.get(case, 1e-12))


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("gspo", "geo_mean")])
def test_truncated_importance_sampling_per_token_agrees(case: str, make_batch: MakeBatch) -> None:
    objective, settings = CASES[case]
    batch = make_batch(31, n=8, t=16)
    weights = (batch.old - batch.rollout).exp().clamp(max=2.0)
    theirs = lambda leaf: verl_loss(batch=batch, leaf=leaf, weights=weights, **settings)  # noqa: E731
    assert_same(objective, batch, theirs, batch.rollout, rtol=TOLERANCE.get(case, 1e-12))


@pytest.mark.parametrize("case", [case for case in CASES if case != "geo_mean"])
def test_fully_masked_rows_count_nowhere_in_either(case: str, make_batch: MakeBatch) -> None:
    objective, settings = CASES[case]
    batch = make_batch(32, n=8, t=16, with_empty_row=True)
    assert_same(objective, batch, lambda leaf: verl_loss(batch=batch, leaf=leaf, **settings), rtol=TOLERANCE.get(case, 1e-12))


def groups(n: int, size: int) -> tuple[Tensor, Tensor, np.ndarray]:
    rewards = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    index = torch.arange(n // size).repeat_interleave(size)
    return rewards, index, index.numpy()


def test_group_advantages_differ_by_the_epsilon_alone() -> None:
    rewards, index, uid = groups(24, 8)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards[:, None].clone(), torch.ones(24, 1), uid)
    ours = normalize(rewards, torch.ones(24), "group", index)
    std = rewards.view(-1, 8).std(1).repeat_interleave(8)
    torch.testing.assert_close(ours * (std + 1e-8) / (std + 1e-6), theirs[:, 0].double(), rtol=1e-6, atol=1e-7)


def test_group_mean_and_leave_one_out_advantages_agree() -> None:
    rewards, index, uid = groups(24, 8)
    centred, _ = core_algos.compute_grpo_outcome_advantage(rewards[:, None].clone(), torch.ones(24, 1), uid, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(normalize(rewards, torch.ones(24), "group-mean", index), centred[:, 0].double(), rtol=1e-6, atol=1e-7)
    rloo, _ = core_algos.compute_rloo_outcome_advantage(rewards[:, None].clone(), torch.ones(24, 1), uid)
    torch.testing.assert_close(normalize(rewards, torch.ones(24), "leave-one-out", index), rloo[:, 0].double(), rtol=1e-6, atol=1e-7)


# --- documented differences ---------------------------------------------------------------------------------------


def test_verl_gives_a_lone_survivor_its_reward_and_we_give_it_nothing() -> None:
    reward = torch.tensor([[0.7]], dtype=torch.float64)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(reward.clone(), torch.ones(1, 1), np.array([0]))
    assert float(theirs) == pytest.approx(0.7, abs=1e-6)
    assert float(normalize(reward[:, 0], torch.ones(1), "group", torch.zeros(1, dtype=torch.int64))) == 0.0


def test_verl_stops_the_gradient_of_ratios_beyond_exp_20(make_batch: MakeBatch) -> None:
    batch = make_batch(33, n=1, t=1)
    batch = type(batch)(batch.old + 30, batch.old, batch.rollout, -torch.ones(1, dtype=torch.float64), batch.mask)
    leaf = batch.leaf()
    theirs = verl_loss("vanilla", batch, leaf, clip_ratio_c=NO_DUAL)
    assert theirs.item() == pytest.approx(math.exp(20))
    assert Clip()(leaf, batch.old, batch.advantages, batch.mask).loss.item() == pytest.approx(math.exp(30))


def test_sequence_corrections_truncate_at_different_places() -> None:
    # Token weights 8 and 1/2. Here: min(exp(mean log), 2) = 2.
    # verl's gspo: mean of min(8, 2) and 1/2 = 1.25; its geo_mean: sqrt(2 * 1/2) = 1.
    old = torch.zeros(1, 2, dtype=torch.float64)
    rollout = -torch.tensor([[8.0, 0.5]], dtype=torch.float64).log()
    weights = (old - rollout).exp().clamp(max=2.0)
    one, mask = torch.ones(1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)

    batch = SimpleNamespace(old=old, advantages=one, mask=mask)
    assert float(GSPO()(old, old, one, mask, rollout).loss) == pytest.approx(-2)
    assert float(GMPO()(old, old, one, mask, rollout).loss) == pytest.approx(-2)
    assert float(verl_loss("gspo", batch, old, agg="seq-mean-token-mean", weights=weights)) == pytest.approx(-1.25)
    assert float(verl_loss("geo_mean", batch, old, weights=weights)) == pytest.approx(-1)


def test_verl_geometric_mean_depends_on_the_split_and_ours_does_not(make_batch: MakeBatch) -> None:
    # verl takes the plain mean over whatever rows a call holds, whatever the step's counts say.
    batch = make_batch(34, n=4, t=16)
    settings = CASES["geo_mean"][1]
    whole = float(verl_loss(batch=batch, leaf=batch.logprobs, **settings))

    def rows(part: slice) -> Any:
        return type(batch)(*(getattr(batch, name)[part] for name in ("logprobs", "old", "rollout", "advantages", "mask")))

    parts = [rows(slice(0, 1)), rows(slice(1, 4))]
    verl_sum = sum(float(verl_loss(batch=part, leaf=part.logprobs, **settings)) for part in parts) / 2
    assert abs(verl_sum - whole) > 1e-3
    totals = BatchTotals.of(batch.mask)
    ours = [float(GMPO()(part.logprobs, part.old, part.advantages, part.mask, totals=totals).loss) for part in parts]
    assert sum(ours) == pytest.approx(float(GMPO()(batch.logprobs, batch.old, batch.advantages, batch.mask).loss), rel=1e-12)


def test_verl_counts_a_fully_masked_row_in_its_geometric_mean(make_batch: MakeBatch) -> None:
    batch = make_batch(35, n=8, t=16, with_empty_row=True)
    ours = GMPO()(batch.logprobs, batch.old, batch.advantages, batch.mask).loss
    theirs = verl_loss(batch=batch, leaf=batch.logprobs, **CASES["geo_mean"][1])
    torch.testing.assert_close(theirs, ours * 7 / 8, rtol=1e-6, atol=1e-9)
