import asyncio
import copy
import random
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from headrace.rollout.clock import CostModel, now, run
from headrace.rollout.engine import Completion, Engine, EngineError, Request, UnknownVersion
from headrace.rollout.kernels import Kernels, NativeUnavailable
from headrace.rollout.local_engine import LocalEngine
from headrace.rollout.runners import PATHS, plain_logits

VOCABULARY = 61
STOP = 3


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return sharpened(LlamaForCausalLM(config))


def sharpened(model: PreTrainedModel, factor: float = 4.0) -> PreTrainedModel:
    """Random weights of the usual scale give almost uniform distributions; larger ones make mistakes visible."""
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(factor)
    return model.train(False)


def native_works() -> bool:
    try:
        Kernels(torch.float32)
    except NativeUnavailable:
        return False
    return True


def weights_of(model: PreTrainedModel, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: tensor * scale if "layers" in name else tensor.clone() for name, tensor in model.state_dict().items()}


def engine_of(model: PreTrainedModel, **options: Any) -> LocalEngine:
    defaults: dict[str, Any] = {"stop_token_ids": [STOP], "slots": 4, "context_limit": 400}
    return LocalEngine(model, **(defaults | options))


def request(dispatch: int = 0, context: tuple[int, ...] = (5, 6, 7), **fields: Any) -> Request:
    defaults: dict[str, Any] = {"turn": 0, "version": 0, "max_tokens": 8, "seed": 1}
    return Request(dispatch=dispatch, token_ids=context, **(defaults | fields))


def go(main: Callable[[], Coroutine[Any, Any, Any]], *, simulated: bool = False) -> Any:
    return run(asyncio.wait_for(main(), 60), simulated=simulated)


async def converse(
    engine: Engine, dispatch: int, *, turns: int = 4, version: int | None = 0
) -> tuple[list[int], list[tuple[int, float, int]]]:
    """A conversation of random observations; the context and (position, log-probability, version) of what was sampled."""
    rng = random.Random(dispatch)
    context = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 90))]
    sampled: list[tuple[int, float, int]] = []
    for turn in range(turns):
        done = await engine.generate(
            request(dispatch, tuple(context), turn=turn, version=version, max_tokens=rng.randrange(1, 12), seed=dispatch)
        )
        sampled += [(len(context) + i, done.logprobs[i], done.versions[i]) for i in range(len(done.token_ids))]
        context += [*done.token_ids, *(rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 3, 40])))]
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    await engine.end(dispatch)
    return context, sampled


def largest_error(model: PreTrainedModel, context: list[int], sampled: list[tuple[int, float, int]]) -> float:
    expected = plain_logits(model, context).log_softmax(-1)
    return max(abs(float(expected[position - 1, context[position]]) - logprob) for position, logprob, _ in sampled)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "hybrid"])
def test_logprobs_equal_a_plain_forward_over_conversations_that_join_and_leave(model: PreTrainedModel, path: str) -> None:
    if path in ("fused", "native") and not native_works():
        pytest.skip("no C compiler")
    engine = engine_of(model, tick_tokens=64, paths=[path])
    assert engine.path == path

    async def main() -> list[tuple[list[int], list[tuple[int, float, int]]]]:
        return await asyncio.gather(*(converse(engine, dispatch) for dispatch in range(11)))

    for context, sampled in go(main):
        assert largest_error(model, context, sampled) < 1e-4
    assert engine.meters.slot_waits > 0


def test_without_a_compiler_the_engine_takes_pytorchs_operations_and_says_why(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr("headrace.rollout.kernels._library", missing)
    engine = engine_of(model)
    assert engine.path == "paged"
    assert "no C compiler" in engine.refused_paths["fused"]


def test_a_stop_token_ends_the_reply_and_is_part_of_it(model: PreTrainedModel) -> None:
    engine = engine_of(model, stop_token_ids=range(VOCABULARY))
    done = go(lambda: engine.generate(request()))
    assert (len(done.token_ids), done.stop_reason) == (1, "stop")
    engine = engine_of(model, stop_token_ids=[])
    done = go(lambda: engine.generate(request(max_tokens=5)))
    assert (len(done.token_ids), len(done.logprobs), done.versions, done.stop_reason) == (5, 5, (0,) * 5, "length")


def test_only_new_tokens_are_fed_on_the_next_turn(model: PreTrainedModel) -> None:
    engine = engine_of(model, stop_token_ids=[])

    async def main() -> None:
        context = tuple(range(10, 30))
        done = await engine.generate(request(context=context, max_tokens=4))
        assert engine.meters.prefill_tokens == 20
        await engine.generate(request(context=(*context, *done.token_ids, 8, 9), turn=1, max_tokens=4))

    go(main)
    # the last sampled token of the first turn has no keys yet: it and the two new ones
    assert engine.meters.prefill_tokens == 20 + 3
    assert engine.meters.sampled_tokens == 8
    assert engine.meters.refilled_tokens == 0


def test_a_context_that_does_not_extend_the_cache_is_recomputed_from_the_common_prefix(model: PreTrainedModel) -> None:
    engine = engine_of(model, stop_token_ids=[])

    async def main() -> tuple[tuple[int, ...], Completion]:
        await engine.generate(request(context=tuple(range(10, 50)), max_tokens=4))
        changed = (*range(10, 40), 1, 2, 3)
        return changed, await engine.generate(request(context=changed, turn=1, max_tokens=4))

    context, done = go(main)
    assert engine.meters.prefill_tokens == 40 + 3
    assert engine.meters.refilled_tokens == 3
    positions = [(len(context) + i, logprob, 0) for i, logprob in enumerate(done.logprobs)]
    assert largest_error(model, [*context, *done.token_ids], positions) < 1e-4


def test_the_same_request_again_gives_the_same_tokens(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    async def main() -> None:
        first = await engine.generate(request())
        assert (await engine.generate(request())).token_ids == first.token_ids
        other = [await engine.generate(request(seed=seed)) for seed in range(2, 8)]
        assert any(completion.token_ids != first.token_ids for completion in other)

    go(main)


@pytest.mark.parametrize("path", ["fused", "native", "paged", "episode"])
def test_exact_engines_give_identical_bits_whatever_else_is_in_the_batch(model: PreTrainedModel, path: str) -> None:
    if path in ("fused", "native") and not native_works():
        pytest.skip("no C compiler")

    def conversations(dispatches: range, slots: int) -> dict[int, Any]:
        engine = engine_of(model, exact=True, slots=slots, tick_tokens=32, paths=[path])

        async def main() -> list[Any]:
            return await asyncio.gather(*(converse(engine, dispatch) for dispatch in dispatches))

        return dict(zip(dispatches, go(main), strict=True))

    together, alone = conversations(range(6), 3), conversations(range(4, 5), 1)
    assert together[4] == alone[4]


def test_snapshots_are_pinned_by_live_dispatches_and_freed_afterwards(model: PreTrainedModel) -> None:
    engine = engine_of(model, keep=1)

    async def main() -> None:
        before = await engine.generate(request(0))
        await engine.publish(1, weights_of(model, 0.5))
        # dispatch 0 still pins snapshot 0: the same request is answered by the same weights
        assert (await engine.generate(request(0))).logprobs == pytest.approx(before.logprobs, abs=1e-5)
        await engine.end(0)
        with pytest.raises(UnknownVersion, match="snapshot 0"):
            await engine.generate(request(1))
        assert (await engine.generate(request(1, version=1))).versions[0] == 1

    go(main)


def test_two_snapshots_are_served_side_by_side_each_by_its_own_weights(model: PreTrainedModel) -> None:
    engine = engine_of(model, slots=8)
    newer = engine_of(model)._model
    newer.set_attn_implementation("sdpa")
    newer.load_state_dict(weights_of(model, 0.5))

    async def main() -> list[Any]:
        await engine.publish(1, weights_of(model, 0.5))
        return await asyncio.gather(*(converse(engine, dispatch, version=dispatch % 2) for dispatch in range(8)))

    for dispatch, (context, sampled) in enumerate(go(main)):
        assert {version for _, _, version in sampled} == {dispatch % 2}
        assert largest_error(newer if dispatch % 2 else model, context, sampled) < 1e-4


def test_publication_replaces_the_weights_only_by_newer_ones_of_the_right_shape(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    async def main() -> None:
        await engine.generate(request())
        with pytest.raises(EngineError, match="versions only grow"):
            await engine.publish(0, weights_of(model))
        lacking = weights_of(model)
        del lacking["model.norm.weight"]
        with pytest.raises(EngineError, match=r"lack 'model\.norm\.weight'"):
            await engine.publish(1, lacking)
        with pytest.raises(EngineError, match="shape"):
            await engine.publish(1, weights_of(model) | {"model.norm.weight": torch.ones(5)})
        with pytest.raises(EngineError, match=r"'model\.surplus'"):
            await engine.publish(1, weights_of(model) | {"model.surplus": torch.ones(5)})

    go(main)


def test_publication_copies_so_that_the_learner_may_go_on(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    async def main() -> None:
        weights = weights_of(model)
        await engine.publish(1, weights)
        first = await engine.generate(request(version=1))
        for tensor in weights.values():
            tensor.zero_()
        assert (await engine.generate(request(version=1))).logprobs == pytest.approx(first.logprobs, abs=1e-5)

    go(main)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_continue_mode_goes_on_under_the_newest_weights_and_names_them_by_token(model: PreTrainedModel, policy: str) -> None:
    engine = engine_of(model, cache_on_publish=policy, stop_token_ids=[], costs=CostModel(generation_step=1.0))
    newer = engine_of(model)._model
    newer.set_attn_implementation("sdpa")
    newer.load_state_dict(weights_of(model, 0.5))
    context = tuple(range(20))

    async def main() -> Completion:
        task = asyncio.create_task(engine.generate(request(context=context, version=None, max_tokens=10)))
        await asyncio.sleep(4.5)
        await engine.publish(1, weights_of(model, 0.5))
        return await task

    done = go(main, simulated=True)
    switch = done.versions.index(1)
    assert done.versions == (0,) * switch + (1,) * (10 - switch)
    assert 0 < switch < 10
    whole = [*context, *done.token_ids]
    entries = [(20 + i, done.logprobs[i], done.versions[i]) for i in range(10)]
    assert largest_error(model, whole, entries[:switch]) < 1e-4
    mixed = largest_error(newer, whole, entries[switch:])
    assert mixed < 1e-4 if policy == "recompute" else mixed > 1e-3
    assert (engine.meters.refilled_tokens > 0) == (policy == "recompute")


def test_a_pinned_dispatch_that_changes_its_snapshot_never_mixes_caches(model: PreTrainedModel) -> None:
    engine = engine_of(model, cache_on_publish="keep", stop_token_ids=[])
    newer = engine_of(model)._model
    newer.set_attn_implementation("sdpa")
    newer.load_state_dict(weights_of(model, 0.5))

    async def main() -> list[int]:
        first = await engine.generate(request(context=tuple(range(20))))
        await engine.publish(1, weights_of(model, 0.5))
        context = (*range(20), *first.token_ids)
        done = await engine.generate(request(context=context, turn=1, version=1))
        entries = [(len(context) + i, logprob, 1) for i, logprob in enumerate(done.logprobs)]
        assert largest_error(newer, [*context, *done.token_ids], entries) < 1e-4
        return list(done.versions)

    assert set(go(main)) == {1}


def test_idle_dispatches_lose_their_cache_to_waiting_ones_and_refill(model: PreTrainedModel) -> None:
    engine = engine_of(model, slots=2)

    async def main() -> None:
        contexts = {}
        for dispatch in range(5):
            done = await engine.generate(request(dispatch, tuple(range(dispatch, 30))))
            contexts[dispatch] = (*range(dispatch, 30), *done.token_ids, 9)
        assert engine.meters.refilled_tokens == 0
        for dispatch, context in contexts.items():
            done = await engine.generate(request(dispatch, context, turn=1))
            entries = [(len(context) + i, logprob, 0) for i, logprob in enumerate(done.logprobs)]
            assert largest_error(model, [*context, *done.token_ids], entries) < 1e-4
        assert engine.meters.refilled_tokens > 0

    go(main)


def test_an_exact_engine_lets_dispatches_wait_for_a_slot_instead_of_evicting(model: PreTrainedModel) -> None:
    engine = engine_of(model, slots=1, exact=True)

    async def main() -> None:
        await engine.generate(request(0))
        waiting = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.end(0)
        await waiting
        assert engine.meters.slot_waits == 1

    go(main)


def test_ending_a_running_request_fails_it_and_frees_its_place(model: PreTrainedModel) -> None:
    engine = engine_of(model, slots=1, stop_token_ids=[])

    async def main() -> None:
        running = asyncio.create_task(engine.generate(request(0, max_tokens=300)))
        waiting = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0.01)
        await engine.end(0)
        await engine.end(99)
        with pytest.raises(EngineError, match="dispatch 0 was ended"):
            await running
        assert len((await waiting).token_ids) == 8

    go(main)


def test_cancelling_a_request_withdraws_it_and_the_dispatch_lives_on(model: PreTrainedModel) -> None:
    engine = engine_of(model, stop_token_ids=[])

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(request(0, max_tokens=300)), 0.02)
        assert len((await engine.generate(request(0))).token_ids) == 8

    go(main)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": tuple([1] * 395)}, "exceed the context limit of 400"),
        ({"context": ()}, "at least 1 token"),
        ({"max_tokens": 0}, "at least 1 token"),
        ({"context": (1, VOCABULARY)}, "outside the vocabulary"),
        ({"version": 7}, "snapshot 7"),
    ],
)
def test_an_impossible_request_fails_alone(model: PreTrainedModel, fields: dict[str, Any], message: str) -> None:
    engine = engine_of(model)

    async def main() -> None:
        good = asyncio.create_task(engine.generate(request(1)))
        with pytest.raises(EngineError, match=message):
            await engine.generate(request(0, **fields))
        assert (await good).token_ids

    go(main)


def test_a_second_request_of_a_dispatch_is_refused(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    async def main() -> None:
        first = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already has a request"):
            await engine.generate(request())
        await first

    go(main)


def test_a_crash_in_the_forward_fails_everything_at_once_with_the_original_traceback(model: PreTrainedModel) -> None:
    engine = engine_of(model, paths=["paged"])

    def broken_layer(*_: Any) -> None:
        raise ZeroDivisionError("the layer broke")

    engine._model.model.layers[1].mlp.register_forward_pre_hook(broken_layer)  # type: ignore[union-attr]

    async def main() -> None:
        results = await asyncio.gather(*(engine.generate(request(d)) for d in range(6)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineError)
            assert isinstance(result.__cause__, ZeroDivisionError)
            assert "in broken_layer" in "".join(traceback.format_exception(result))
        with pytest.raises(EngineError, match="failed earlier"):
            await engine.generate(request(9))

    go(main)


def test_logits_that_are_not_finite_fail_the_request_and_name_the_snapshot(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    async def main() -> None:
        await engine.publish(1, {name: tensor * float("nan") for name, tensor in model.state_dict().items()})
        with pytest.raises(EngineError, match=r"not finite \(version 1\)"):
            await engine.generate(request(0, version=1))
        assert (await engine.generate(request(1))).token_ids

    go(main)


def test_closing_fails_what_is_pending_and_refuses_what_comes(model: PreTrainedModel) -> None:
    engine = engine_of(model, stop_token_ids=[])

    async def main() -> None:
        running = asyncio.create_task(engine.generate(request(max_tokens=300)))
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request())

    go(main)


def test_the_greedy_engine_takes_the_most_probable_token_with_its_full_logprob(model: PreTrainedModel) -> None:
    engine = engine_of(model, greedy=True, stop_token_ids=[])
    done = go(lambda: engine.generate(request(max_tokens=6)))
    context = [5, 6, 7]
    for token, logprob in zip(done.token_ids, done.logprobs, strict=True):
        expected = plain_logits(model, context)[-1].log_softmax(-1)
        assert token == int(expected.argmax())
        assert logprob == pytest.approx(float(expected.max()), abs=1e-5)
        context.append(token)


def test_simulated_time_is_charged_by_the_cost_model(model: PreTrainedModel) -> None:
    engine = engine_of(
        model, stop_token_ids=[], costs=CostModel(decode_token=1.0, prefill_token=0.125, generation_step=10.0, publication=5.0)
    )

    async def main() -> float:
        await engine.generate(request(context=tuple(range(8)), max_tokens=3))
        await engine.publish(1, weights_of(model))
        return now()

    # the prompt's tick samples the first token: 3 ticks, 3 sampled, 8 fed
    assert go(main, simulated=True) == 3 * 10.0 + 3 * 1.0 + 8 * 0.125 + 5.0
    assert engine.meters.busy_seconds == 34.0


def test_a_model_with_low_rank_adapters_is_served_merged_under_its_base_names(model: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    adapted = copy.deepcopy(model)
    peft.get_peft_model(adapted, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    engine = engine_of(adapted, stop_token_ids=[])
    assert set(engine._snapshots._targets) == set(dict(model.named_parameters()))

    async def main() -> None:
        done = await engine.generate(request(0, max_tokens=20))
        entries = [(3 + i, logprob, 0) for i, logprob in enumerate(done.logprobs)]
        assert largest_error(adapted, [5, 6, 7, *done.token_ids], entries) < 1e-4
        assert largest_error(model, [5, 6, 7, *done.token_ids], entries) > 1e-2
        await engine.publish(1, weights_of(model))

    go(main)


def test_the_model_of_the_caller_is_left_alone(model: PreTrainedModel) -> None:
    before = model.config._attn_implementation
    engine_of(model)
    assert model.config._attn_implementation == before
    assert not model.training
