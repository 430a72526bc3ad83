"""Updates: the mathematics of a step, determinism, resume, and what happens when numbers break."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algorithms import ObjectiveResult, recipe
from headrace.errors import RunFailed
from headrace.rollout.trajectory import Trajectory
from headrace.training.adapters import LoraSettings
from headrace.training.credit import credit
from headrace.training.learner import Learner, LearnerSettings, UpdateResult
from headrace.training.policy import Policy

SETTINGS = LearnerSettings(learning_rate=1e-2, weight_decay=0.1, kl_sample=0)


def learner(tiny: Any, settings: LearnerSettings = SETTINGS, *, name: str = "spo++", kind: str = "Llama", **policy: Any) -> Learner:
    return Learner(Policy(tiny.model(kind), None, **policy), recipe(name).with_max_len(20), settings)


def train(learner: Learner, batch: Sequence[Trajectory], number: int = 0) -> UpdateResult:
    return learner.update(number, batch, credit(batch, learner.recipe))


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.weights().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < tolerance


def reported(tiny: Any, learner: Learner, batch: Sequence[Trajectory], shift: float = 0.0) -> list[Trajectory]:
    """The batch as an engine with the learner's own weights would report it, log-probabilities lowered by ``shift``."""
    result = []
    for attempt in batch:
        rows = []
        for row in attempt.rows:
            with torch.no_grad():
                values = iter((tiny.plain_logprobs(learner.policy.model, [row]) - shift).tolist())
            rows.append(dataclasses.replace(row, logprobs=tuple(next(values) if action else 0.0 for action in row.action_mask)))
        result.append(dataclasses.replace(attempt, rows=tuple(rows)))
    return result


# --- one step -----------------------------------------------------------------------------------------------------------


def test_an_on_policy_step_is_adamw_on_the_plain_policy_gradient(tiny: Any) -> None:
    trained = learner(tiny, dataclasses.replace(SETTINGS, max_tokens=60, clip_norm=1e9))
    batch = reported(tiny, trained, tiny.batch(0, rows_each=2))
    advantages = credit(batch, trained.recipe).advantages
    result = train(trained, batch)

    model = tiny.model("Llama")
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8
    )
    per_attempt = [tiny.plain_logprobs(model, attempt.rows) for attempt in batch]
    tokens = sum(logprobs.numel() for logprobs in per_attempt)
    ratio_one = [torch.exp(logprobs - logprobs.detach()) for logprobs in per_attempt]
    loss = -sum(advantage * ratio.sum() for advantage, ratio in zip(advantages, ratio_one, strict=True)) / tokens
    loss.backward()
    norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in model.parameters()))
    optimizer.step()

    assert result.metrics.loss == pytest.approx(loss.item(), abs=1e-6)
    assert result.metrics.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
    assert result.metrics.trained_tokens == tokens
    assert_close(weights(trained), dict(model.state_dict()), 2e-4)


def test_the_gradient_is_clipped_and_its_norm_reported_unclipped(tiny: Any) -> None:
    batch = tiny.batch(0)
    free, bound = (learner(tiny, dataclasses.replace(SETTINGS, clip_norm=norm)) for norm in (1e9, 1e-3))
    results = [train(one, batch) for one in (free, bound)]
    assert results[0].metrics.gradient_norm == results[1].metrics.gradient_norm > 1e-3


@pytest.mark.parametrize("name", ["spo++", "grpo", "dr_grpo", "gspo", "sspo"])
def test_micro_batches_add_up_to_the_same_step(tiny: Any, name: str) -> None:
    batch = tiny.batch(1, rows_each=2)
    whole, split = (learner(tiny, dataclasses.replace(SETTINGS, max_tokens=size, clip_norm=1e-2), name=name) for size in (10_000, 50))
    left, right = train(whole, batch).metrics, train(split, batch).metrics
    assert left.loss == pytest.approx(right.loss, abs=1e-6)
    assert left.gradient_norm == pytest.approx(right.gradient_norm, rel=1e-4)
    assert left.objective == pytest.approx(right.objective, rel=1e-5, abs=1e-6)
    assert left.rollout_mismatch == pytest.approx(right.rollout_mismatch, rel=1e-5)
    assert_close(weights(whole), weights(split), 2e-3)


@pytest.mark.parametrize("name", ["spo++", "sspo"])
def test_a_trajectory_beyond_the_budget_goes_row_by_row_and_gives_the_same_step(
    tiny: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = tiny.batch(1, count=4, rows_each=5)
    settings = dataclasses.replace(SETTINGS, clip_norm=1e-2, entropy=True)
    whole, by_row = (learner(tiny, dataclasses.replace(settings, max_tokens=size), name=name) for size in (10_000, 45))
    fed: list[int] = []
    score = by_row.policy.score
    monkeypatch.setattr(by_row.policy, "score", lambda rows, **kwargs: (fed.append(rows.tokens), score(rows, **kwargs))[1])
    left, right = train(whole, batch).metrics, train(by_row, batch).metrics
    assert max(fed) <= 45 < min(attempt.context_tokens for attempt in batch)
    assert left.loss == pytest.approx(right.loss, abs=1e-6)
    assert left.entropy == pytest.approx(right.entropy, rel=1e-5)
    assert left.gradient_norm == pytest.approx(right.gradient_norm, rel=1e-4)
    assert right.kl == 0.0
    assert_close(weights(whole), weights(by_row), 2e-3)


def test_the_learning_rate_warms_up_linearly_and_then_stays(tiny: Any) -> None:
    trained = learner(tiny, dataclasses.replace(SETTINGS, warmup_steps=4, minibatches=2))
    rates = [train(trained, tiny.batch(0), number).metrics.learning_rate for number in range(4)]
    assert rates == pytest.approx([0.5e-2, 1e-2, 1e-2, 1e-2])


def test_mini_batches_and_epochs_are_steps(tiny: Any) -> None:
    result = train(learner(tiny, dataclasses.replace(SETTINGS, minibatches=4, epochs=3)), tiny.batch(0))
    assert (result.steps, result.skipped_steps) == (12, 0)
    assert result.metrics.trained_tokens == 3 * sum(attempt.action_tokens for attempt in tiny.batch(0))


# --- old log-probabilities --------------------------------------------------------------------------------------------------


def test_on_policy_the_ratio_is_one_and_the_kl_zero(tiny: Any) -> None:
    metrics = train(learner(tiny), tiny.batch(0)).metrics
    assert metrics.kl == 0.0
    assert metrics.objective["ratio_mean"] == metrics.objective["ratio_max"] == metrics.effective_sample_size == 1.0


def test_old_taken_from_the_first_pass_equals_old_computed_before(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(SETTINGS, minibatches=2, epochs=2, max_tokens=60)
    saved, computed = learner(tiny, settings), learner(tiny, settings)
    batch = tiny.batch(2)
    first = train(saved, batch)
    monkeypatch.setattr(Policy, "has_dropout", True)  # takes the shortcut away, and there is no dropout in the module
    second = train(computed, batch)
    assert first.metrics == second.metrics
    assert_equal(weights(saved), weights(computed))


def test_later_steps_are_measured_against_the_weights_before_the_update(tiny: Any) -> None:
    settings = dataclasses.replace(SETTINGS, minibatches=2, kl_sample=8, learning_rate=1e-3)
    trained = learner(tiny, settings)
    batch = tiny.batch(3)
    with torch.no_grad():
        before = torch.cat([tiny.plain_logprobs(trained.policy.model, attempt.rows) for attempt in batch])
    metrics = train(trained, batch).metrics
    with torch.no_grad():
        change = torch.cat([tiny.plain_logprobs(trained.policy.model, attempt.rows) for attempt in batch]) - before
    assert metrics.kl > 0
    assert metrics.kl_after == pytest.approx(float((change.exp() - 1 - change).mean()), rel=1e-2)


def test_the_mismatch_of_the_engines_is_reported_and_corrected(tiny: Any) -> None:
    trained = learner(tiny)
    batch = reported(tiny, trained, tiny.batch(4), shift=0.5)
    metrics = train(trained, batch).metrics
    assert metrics.rollout_mismatch == pytest.approx(0.5, rel=1e-4)
    assert metrics.rollout_mismatch_max == pytest.approx(0.5, rel=1e-3)
    assert metrics.objective["rollout_correction_mean"] == pytest.approx(math.exp(0.5), rel=1e-4)


def test_old_from_the_rollout_lets_staleness_reach_the_ratio_and_applies_no_correction(tiny: Any) -> None:
    trained = learner(tiny, dataclasses.replace(SETTINGS, old="rollout"))
    batch = reported(tiny, trained, tiny.batch(4), shift=0.1)
    objective = train(trained, batch).metrics.objective
    assert objective["ratio_mean"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert "rollout_correction_mean" not in objective


def test_entropy_is_reported_on_request(tiny: Any) -> None:
    batch = tiny.batch(0)
    assert train(learner(tiny), batch).metrics.entropy is None
    entropy = train(learner(tiny, dataclasses.replace(SETTINGS, entropy=True, max_tokens=40)), batch).metrics.entropy
    assert entropy is not None and 0 < entropy < math.log(tiny.vocabulary)


# --- determinism and resume ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_update_and_another_seed_other_mini_batches(tiny: Any) -> None:
    settings = dataclasses.replace(SETTINGS, minibatches=2)
    first, again, other = (learner(tiny, dataclasses.replace(settings, seed=seed)) for seed in (0, 0, 1))
    results = [train(one, tiny.batch(5)) for one in (first, again, other)]
    assert results[0].metrics == results[1].metrics != results[2].metrics
    assert_equal(weights(first), weights(again))


def test_shuffles_differ_between_updates_and_epochs(tiny: Any) -> None:
    trained = learner(tiny, dataclasses.replace(SETTINGS, minibatches=2))
    batch = tiny.batch(5)
    plans = [[micro.members for micro in trained._mini_batches(number, epoch, batch)[0].micro] for number in (0, 1) for epoch in (0, 1)]
    assert len({str(plan) for plan in plans}) > 2


VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "lora": {"lora": LoraSettings(rank=4, alpha=8.0)},
    "lora with dropout": {"lora": LoraSettings(rank=4, alpha=8.0, dropout=0.3)},
}


@pytest.mark.parametrize("variant", [*VARIANTS, "bfloat16"])
def test_a_restored_learner_continues_to_the_bit(tiny: Any, variant: str) -> None:
    settings = dataclasses.replace(SETTINGS, minibatches=2, warmup_steps=5)

    def fresh(seed: int) -> Learner:
        model = tiny.model("Llama", seed=seed)
        model = model.bfloat16() if variant == "bfloat16" else model
        return Learner(Policy(model, None, **VARIANTS.get(variant, {})), recipe("spo++"), settings)

    kept = fresh(0)
    train(kept, tiny.batch(0), 0)
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    file.seek(0)
    train(kept, tiny.batch(1), 1)
    restored = fresh(0 if "lora" in variant else 1)  # a frozen base comes from its own folder
    restored.load_state_dict(torch.load(file, weights_only=True))
    result = train(restored, tiny.batch(1), 1)
    assert result.metrics.learning_rate == pytest.approx(1e-2 * 4 / 5)
    assert_equal(weights(kept), weights(restored))
    assert kept.state_dict()["optimizer"]["steps"] == restored.state_dict()["optimizer"]["steps"] == 4


def test_the_state_of_another_policy_is_refused(tiny: Any) -> None:
    state = learner(tiny).state_dict()
    with pytest.raises(ValueError, match="this policy is another"):
        learner(tiny, kind="Qwen2").load_state_dict(state)


def test_a_saved_state_does_not_change_with_later_updates(tiny: Any) -> None:
    trained = learner(tiny)
    train(trained, tiny.batch(0))
    state = trained.state_dict()
    before = {name: tensor.clone() for name, tensor in state["optimizer"]["parameters"].items()}
    train(trained, tiny.batch(1), 1)
    assert_equal(state["optimizer"]["parameters"], before)


# --- numbers that break ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Breaking:
    """An objective whose loss is not a number in the listed calls."""

    inner: Any
    bad_calls: set[int]
    calls: int = 0
    reduction: str = "token-mean"

    def __call__(self, logprobs_nt: Tensor, *args: Any, **kwargs: Any) -> ObjectiveResult:
        result = self.inner(logprobs_nt, *args, **kwargs)
        bad = self.calls in self.bad_calls
        self.calls += 1
        return dataclasses.replace(result, loss=result.loss + math.nan) if bad else result


def breaking(tiny: Any, bad_calls: set[int]) -> Learner:
    trained = learner(tiny)
    trained.recipe = dataclasses.replace(trained.recipe, objective=Breaking(trained.recipe.objective, bad_calls))
    return trained


def test_a_step_without_finite_loss_is_left_out_and_counted(tiny: Any) -> None:
    trained, untouched = breaking(tiny, {0}), weights(learner(tiny))
    result = train(trained, tiny.batch(0))
    assert (result.steps, result.skipped_steps) == (0, 1)
    assert_equal(weights(trained), untouched)
    assert train(trained, tiny.batch(1), 1).steps == 1


def test_a_gradient_that_is_not_finite_is_left_out_though_the_loss_is(tiny: Any) -> None:
    trained = learner(tiny)
    parameter = next(iter(trained.policy.trainable().values()))
    handle = parameter.register_hook(lambda gradient: gradient / 0.0)
    before = weights(trained)
    assert train(trained, tiny.batch(0)).skipped_steps == 1
    assert_equal(weights(trained), before)
    handle.remove()
    assert train(trained, tiny.batch(0), 1).skipped_steps == 0


def test_several_broken_steps_in_a_row_end_the_run_with_the_last_good_weights(tiny: Any) -> None:
    trained = breaking(tiny, {1, 2, 3, 4, 5})
    train(trained, tiny.batch(0), 0)
    good = weights(trained)
    train(trained, tiny.batch(1), 1)
    train(trained, tiny.batch(2), 2)
    with pytest.raises(RunFailed, match=r"update 3: .* 3 steps in a row.*lower learner\.learning_rate"):
        train(trained, tiny.batch(3), 3)
    assert_equal(weights(trained), good)


# --- the rest ----------------------------------------------------------------------------------------------------------------------


def test_kl_to_a_reference_holds_the_policy_back(tiny: Any) -> None:
    moves = []
    for coefficient in (0.0, 10.0):
        settings = dataclasses.replace(SETTINGS, kl_coefficient=coefficient, kl_sample=8)
        trained = Learner(Policy(tiny.model("Llama"), None), recipe("spo++"), settings, reference=Policy(tiny.model("Llama"), None))
        metrics = [train(trained, tiny.batch(0), number).metrics for number in range(6)]
        moves.append(
            sum((a - b).square().sum() for a, b in zip(weights(trained).values(), tiny.model("Llama").state_dict().values(), strict=True))
        )
    assert metrics[0].reference_kl == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1].reference_kl is not None and metrics[-1].reference_kl > 0
    assert moves[1] < moves[0]


def test_a_kl_without_reference_is_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="no reference policy"):
        learner(tiny, dataclasses.replace(SETTINGS, kl_coefficient=0.1))


def test_steps_smaller_than_bfloat16_resolves_are_not_lost(tiny: Any) -> None:
    trained = Learner(
        Policy(tiny.model("Llama").bfloat16(), None), recipe("spo++"), dataclasses.replace(SETTINGS, learning_rate=1e-5, weight_decay=0.0)
    )
    start = weights(trained)
    for number in range(5):
        train(trained, tiny.batch(0), number)
    masters = trained.state_dict()["optimizer"]["parameters"]
    assert all(tensor.dtype == torch.float32 for tensor in masters.values())
    moved = masters["model.layers.0.mlp.up_proj.weight"] - start["model.layers.0.mlp.up_proj.weight"].float()
    assert 1e-6 < moved.abs().mean() < 1e-4
    assert all(tensor.dtype == torch.bfloat16 for tensor in trained.policy.weights().values())
    assert all(parameter.grad is None for parameter in trained.policy.trainable().values())


def test_bfloat16_gradients_of_micro_batches_add_up(tiny: Any) -> None:
    norms = []
    for size in (10_000, 50):
        trained = Learner(Policy(tiny.model("Llama").bfloat16(), None), recipe("spo++"), dataclasses.replace(SETTINGS, max_tokens=size))
        norms.append(train(trained, tiny.batch(0)).metrics.gradient_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_an_update_learns_what_it_is_paid_for(tiny: Any) -> None:
    batch = tiny.batch(6, count=16)
    trained = learner(tiny, dataclasses.replace(SETTINGS, minibatches=2))
    advantages = credit(batch, trained.recipe).advantages

    def value() -> float:
        with torch.no_grad():
            logprobs = [tiny.plain_logprobs(trained.policy.model, attempt.rows).sum() for attempt in batch]
        return float(sum(advantage * logprob for advantage, logprob in zip(advantages, logprobs, strict=True)))

    before = value()
    for number in range(5):
        train(trained, batch, number)
    assert value() > before


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3_5Text"])
def test_qwen_trains_with_lora_bfloat16_and_gradient_checkpointing_together(tiny: Any, kind: str) -> None:
    policy = Policy(tiny.model(kind).bfloat16(), None, lora=LoraSettings(rank=4), gradient_checkpointing=True)
    base = {name: parameter.clone() for name, parameter in policy.model.named_parameters() if not parameter.requires_grad}
    trained = Learner(policy, recipe("spo++"), dataclasses.replace(SETTINGS, minibatches=2, max_tokens=60))
    published = weights(trained)
    result = train(trained, tiny.batch(0))
    assert result.steps == 2 and math.isfinite(result.metrics.loss)
    assert published.keys() == tiny.model(kind).state_dict().keys()
    assert any(not torch.equal(published[name], tensor) for name, tensor in weights(trained).items())
    assert all(torch.equal(base[name], parameter) for name, parameter in policy.model.named_parameters() if not parameter.requires_grad)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3_5Text"])
def test_gradient_checkpointing_gives_the_same_update(tiny: Any, kind: str) -> None:
    plain, checkpointed = learner(tiny, kind=kind), learner(tiny, kind=kind, gradient_checkpointing=True)
    left, right = train(plain, tiny.batch(0)), train(checkpointed, tiny.batch(0))
    assert left.metrics.gradient_norm == pytest.approx(right.metrics.gradient_norm, rel=1e-5)
    assert_close(weights(plain), weights(checkpointed), 1e-3)


def test_autocast_stays_close_to_float32(tiny: Any) -> None:
    plain, cast = (learner(tiny, dataclasses.replace(SETTINGS, autocast=on)) for on in (False, True))
    left, right = train(plain, tiny.batch(0)).metrics, train(cast, tiny.batch(0)).metrics
    assert right.kl == 0.0
    assert right.rollout_mismatch == pytest.approx(left.rollout_mismatch, rel=0.05)
    assert all(tensor.dtype == torch.float32 for tensor in cast.policy.weights().values())


def test_credit_of_another_batch_is_refused(tiny: Any) -> None:
    trained = learner(tiny)
    with pytest.raises(ValueError, match="credit for 8 trajectories, but the batch has 7"):
        trained.update(0, tiny.batch(0)[:7], credit(tiny.batch(0), trained.recipe))


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="'recompute' or 'rollout'"):
        LearnerSettings(old="engine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="minibatches"):
        LearnerSettings(minibatches=0)
