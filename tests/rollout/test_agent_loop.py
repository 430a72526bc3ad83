"""One episode, with scripted worlds and engines; deadlines are tested in simulated time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.environments.base import Step, Task, ToolSpec
from headrace.rollout import clock
from headrace.rollout.agent_loop import EpisodeSettings, run_episode
from headrace.rollout.chat import ChatCodec
from headrace.rollout.engine import Completion, EngineError, Request, UnknownVersion
from headrace.rollout.trajectory import Dispatch, Failure, Trajectory, Turn

TASK = Task("pick-7", "pick", {})
DISPATCH = Dispatch(12, "pick-7", "pick", 3, 1.0, 1.0, None, 99)
SETTINGS = EpisodeSettings(context_limit=1000, reply_tokens=20, environment_deadline=5.0, engine_deadline=7.0, episode_deadline=50.0)


def byte_tokenizer() -> Any:
    """One token a byte, so that lengths can be counted by eye."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|user|>", "<|reply|>", "<|end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = (
        "{%- for message in messages -%}{{ '<|reply|>' if message.role == 'assistant' else '<|user|>' }}{{ message.content }}"
        "{%- if message.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|reply|>{%- endif -%}"
    )
    return fast


CODEC = ChatCodec(byte_tokenizer())


class World:
    """Answers action by action; an exception among the answers is raised, a coroutine function awaited."""

    system: str | None = None
    tools: tuple[ToolSpec, ...] = ()

    def __init__(self, *answers: Any, opening: Any = "start", close: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._opening = opening
        self._answers = list(answers)
        self._close = close
        self.actions: list[str] = []
        self.closed = 0

    async def reset(self, task: Task) -> str:
        assert task is TASK
        return await self._give(self._opening)

    async def step(self, action: str) -> Step:
        self.actions.append(action)
        return await self._give(self._answers.pop(0))

    async def close(self) -> None:
        self.closed += 1
        if self._close is not None:
            await self._close()

    async def _give(self, answer: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer


class Speaker:
    """An engine that says what it was given, text by text; a ``Completion``, an exception or a coroutine function stands for itself."""

    def __init__(self, *replies: Any, end: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._replies = list(replies)
        self._end = end
        self.requests: list[Request] = []
        self.ended: list[int] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, BaseException):
            raise reply
        if callable(reply):
            reply = await reply()
        if isinstance(reply, Completion):
            return reply
        ids = CODEC.reply_ids(reply)
        return Completion(ids, (-0.5,) * len(ids), (3,) * len(ids), "stop")

    async def publish(self, version: int, weights: Any) -> None: ...

    async def end(self, dispatch: int) -> None:
        self.ended.append(dispatch)
        if self._end is not None:
            await self._end()

    async def close(self) -> None: ...


def goes_on(text: str = "ok", **options: Any) -> Step:
    return Step(text, False, False, None, **options)


def play(world: World, engine: Speaker, settings: EpisodeSettings = SETTINGS, *, simulated: bool = True) -> Trajectory | Failure:
    result = clock.run(run_episode(DISPATCH, TASK, world, engine, CODEC, settings), simulated=simulated)
    assert engine.ended == [12], "the engine is told exactly once that the dispatch has ended"
    assert world.closed == 1
    return result


async def never() -> Any:
    await asyncio.Event().wait()


def after(seconds: float, result: Any = None) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def wait() -> Any:
        await asyncio.sleep(seconds)
        return result

    return wait


async def stubborn() -> Any:
    """Ignores its cancellation twice."""
    for _ in range(2):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


# --- the ordinary course -------------------------------------------------------------------------------------------------


def test_an_episode_ends_with_the_world_s_reason_and_outcome():
    world = World(goes_on("You arrive."), Step("Done.", True, True, "success"))
    engine = Speaker("go", "take")
    result = play(world, engine)
    assert isinstance(result, Trajectory)
    assert world.actions == ["go", "take"]
    assert (result.dispatch, result.outcome, result.success, result.reason) == (DISPATCH, 1.0, True, "success")
    assert result.turns == (Turn("start", "go"), Turn("You arrive.", "take"))
    (row,) = result.rows
    assert CODEC.writer.decode(row.token_ids) == "<|user|>start<|reply|>go<|end|><|user|>You arrive.<|reply|>take<|end|>"
    assert result.action_tokens == len("go") + len("take") + 2


def test_requests_carry_dispatch_turn_context_version_budget_and_seed():
    engine = Speaker("go", "take")
    play(World(goes_on(), Step("", True, False, "horizon")), engine)
    first, second = engine.requests
    assert (first.dispatch, first.turn, first.version, first.max_tokens, first.seed) == (12, 0, 3, 20, 99)
    assert second.turn == 1
    assert second.token_ids[: len(first.token_ids) + 3] == (*first.token_ids, *CODEC.reply_ids("go"))


def test_mixed_versions_ask_for_the_newest_snapshot():
    engine = Speaker("go")
    play(World(Step("", True, False, "horizon")), engine, EpisodeSettings(1000, 20, mixed_versions=True))
    assert engine.requests[0].version is None


@pytest.mark.parametrize(
    ("step", "outcome", "reason"),
    [
        (Step("", True, False, "horizon"), 0.0, "horizon"),
        (Step("", True, True, None), 1.0, "success"),
        (Step("", True, False, None), 0.0, "done"),
        (Step("", True, False, "answered", outcome=0.25), 0.25, "answered"),
        (Step("", True, False, "answered", outcome=math.nan), math.nan, "answered"),
    ],
)
def test_the_last_step_gives_outcome_and_reason(step, outcome, reason):
    result = play(World(step), Speaker("go"))
    assert isinstance(result, Trajectory)
    assert result.outcome == pytest.approx(outcome, nan_ok=True)
    assert (result.reason, result.success) == (reason, step.success)


def test_unmatched_actions_are_counted():
    world = World(goes_on(unmatched=True), goes_on(), goes_on(unmatched=True), Step("", True, False, "horizon", unmatched=True))
    result = play(world, Speaker("go"))
    assert isinstance(result, Trajectory) and result.unmatched_actions == 3


def test_time_is_split_between_generation_and_world():
    world = World(after(0.5, goes_on()), after(0.25, Step("", True, False, "horizon")), opening=after(1.0, "start"))
    result = play(world, Speaker(after(2.0, "go"), after(3.0, "go")))
    assert isinstance(result, Trajectory)
    assert result.generation_seconds == pytest.approx(5.0)
    assert result.environment_seconds == pytest.approx(1.75)


def test_the_world_s_cost_is_charged_in_simulated_time():
    costs = clock.CostModel(environment_step=0.5)
    result = play(World(Step("", True, False, "horizon")), Speaker("go"), EpisodeSettings(1000, 20, costs=costs))
    assert isinstance(result, Trajectory) and result.environment_seconds == pytest.approx(1.0)  # reset and one step


# --- budgets (fault kind 9) ----------------------------------------------------------------------------------------------


def test_the_next_turn_begins_only_if_context_and_reply_fit_together():
    # "<|user|>start<|reply|>" is 7 tokens, "go<|end|>" 3, "<|user|>ok<|reply|>" 4: after k turns the context holds 7 + 7k.
    for limit, turns in [(33, 1), (34, 2), (40, 2), (41, 3)]:
        engine = Speaker("go")
        result = play(World(*[goes_on()] * 5), engine, EpisodeSettings(limit, 20))
        assert isinstance(result, Trajectory)
        assert (result.reason, len(result.turns), len(engine.requests)) == ("context", turns, turns)
        assert max(len(request.token_ids) for request in engine.requests) + 20 <= limit


def test_an_observation_that_leaves_no_room_for_the_reply_keeps_what_was_earned():
    limit = 100
    fills = "x" * (limit - 5 - 7 - 3 - 2)  # 5 tokens under the limit, reply budget 20
    for step, outcome, success in [
        (goes_on(fills), 0.0, False),
        (goes_on(fills, outcome=0.75), 0.75, False),
        (goes_on(fills, outcome=math.nan), 0.0, False),
        (Step(fills, False, True, None), 1.0, True),
    ]:
        result = play(World(step), Speaker("go"), EpisodeSettings(limit, 20))
        assert isinstance(result, Trajectory)
        assert (result.reason, result.outcome, result.success) == ("context", outcome, success)
        assert result.action_tokens == 3


def test_an_opening_that_fills_the_context_ends_with_nothing_sampled():
    engine = Speaker("go")
    result = play(World(opening="x" * 100), engine, EpisodeSettings(100, 20))
    assert isinstance(result, Trajectory)
    assert (result.reason, result.outcome, result.rows, result.action_tokens) == ("context", 0.0, (), 0)
    assert engine.requests == []


def test_a_reply_out_of_budget_ends_the_episode_is_trained_and_not_executed():
    ids = CODEC.reply_ids("g" * 20)[:-1]
    cut = Completion(ids, (-0.5,) * 20, (3,) * 20, "length")
    world = World(goes_on(outcome=0.5), goes_on())
    result = play(world, Speaker("go", cut))
    assert isinstance(result, Trajectory)
    assert (result.reason, result.outcome, world.actions) == ("reply", 0.5, ["go"])
    assert result.action_tokens == 3 + 20
    assert result.turns[-1].action == "g" * 20


# --- errors --------------------------------------------------------------------------------------------------------------


class Panic(BaseException):
    """What native code raises through its Python bindings."""


def broken_inside() -> Any:
    async def fail() -> Any:
        raise LookupError("no such drawer")

    return fail


@pytest.mark.parametrize(
    ("world", "turn", "what"), [(World(opening=broken_inside()), 0, "reset"), (World(goes_on(), broken_inside()), 1, "step")]
)
def test_a_world_s_exception_is_a_failure_with_its_cause_and_traceback(world, turn, what):
    result = play(world, Speaker("go"))
    assert isinstance(result, Failure)
    assert result.reason == "environment_error"
    first, *trace = result.detail.splitlines()
    assert first == f"task pick-7, dispatch 12, turn {turn}: the environment's {what} raised LookupError: no such drawer"
    assert any("in fail" in line for line in trace) and any("raise LookupError" in line for line in trace)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (SystemExit(3), "RuntimeError: sys.exit(3) was called"),
        (asyncio.CancelledError(), "cancelled from inside"),
        (TimeoutError(), "raised TimeoutError"),
        ("ok", "returned 'ok', not a Step"),
        (Step(None, False, False, None), "not a Step with text"),  # type: ignore[arg-type]
        (goes_on(outcome=1.5), "an outcome of 1.5, outside [0, 1]"),
        (goes_on(outcome="1"), "the outcome '1', which is not a number"),
        (goes_on(outcome=[1.0]), "the outcome [1.0], which is not a number"),
        (Step("ok", True, None, "over"), "success None, which is not a truth value"),  # type: ignore[arg-type]
        (Step("ok", True, True, 7), "the reason 7, which is not text"),  # type: ignore[arg-type]
        (Panic("in native code"), "Panic: in native code"),
    ],
)
def test_whatever_a_world_does_wrong_ends_its_own_episode_only(answer, problem):
    result = play(World(answer), Speaker("go"))
    assert isinstance(result, Failure) and result.reason == "environment_error" and problem in result.detail


def test_a_world_may_grade_with_another_library_s_numbers():
    step = Step("ok", np.bool_(True), np.bool_(True), "success", outcome=np.float32(0.5), unmatched=np.bool_(True))  # type: ignore[arg-type]
    result = play(World(step), Speaker("go"))
    assert isinstance(result, Trajectory)
    graded = (result.outcome, result.success, result.unmatched_actions)
    assert graded == (0.5, True, 1) and [type(value) for value in graded] == [float, bool, int]


def test_text_that_is_not_quite_unicode_is_shown_with_a_replacement_character():
    result = play(World(goes_on("a\ud800b"), Step("ok", True, True, "\udc80"), opening="\ud83d\ude00 \udfff"), Speaker("go", "on"))
    assert isinstance(result, Trajectory)
    assert [turn.observation for turn in result.turns] == ["\U0001f600 \ufffd", "a\ufffdb"] and result.reason == "\ufffd"


def test_an_opening_that_is_no_text_is_the_world_s_error():
    result = play(World(opening=None), Speaker("go"))
    assert isinstance(result, Failure) and "reset returned NoneType, not text" in result.detail


@pytest.mark.parametrize(
    ("reply", "reason", "problem"),
    [
        (EngineError("out of memory"), "engine_error", "the engine raised EngineError: out of memory"),
        (ConnectionError("gone"), "engine_error", "the engine raised ConnectionError: gone"),
        (UnknownVersion("no snapshot 3"), "version_gone", "UnknownVersion: no snapshot 3"),
        (Completion((1,), (), (), "stop"), "engine_error", "completion is uneven"),
    ],
)
def test_engine_errors_are_failures(reply, reason, problem):
    result = play(World(goes_on()), Speaker("go", reply))
    assert isinstance(result, Failure)
    assert result.reason == reason
    assert result.detail.startswith("task pick-7, dispatch 12, turn 1: ") and problem in result.detail


def test_a_failing_end_or_close_keeps_the_outcome_and_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        result = play(World(Step("", True, True, "success"), close=broken_inside()), Speaker("go", end=broken_inside()))
    assert isinstance(result, Trajectory) and result.outcome == 1.0
    assert {record.getMessage() for record in caplog.records} == {
        f"task pick-7, dispatch 12, turn 0: {what} raised LookupError: no such drawer" for what in ("engine.end", "environment.close")
    }


# --- deadlines (fault kind 16) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hang", [never, stubborn], ids=["never", "stubborn"])
@pytest.mark.parametrize(
    ("world", "engine", "reason", "detail"),
    [
        ("reset", "go", "environment_deadline", "turn 0: the environment's reset took longer than 5 s"),
        ("step", "go", "environment_deadline", "turn 1: the environment's step took longer than 5 s"),
        ("fine", "hang", "engine_deadline", "turn 1: the engine's reply took longer than 7 s"),
    ],
)
def test_whoever_does_not_answer_is_named_and_left_behind(hang, world, engine, reason, detail):
    async def main() -> tuple[Trajectory | Failure, float]:
        side = World(goes_on(), hang, opening=hang if world == "reset" else "start")
        speaker = Speaker("go", hang) if engine == "hang" else Speaker("go")
        result = await run_episode(DISPATCH, TASK, side, speaker, CODEC, SETTINGS)
        assert (speaker.ended, side.closed) == ([12], 1)
        return result, clock.now()

    result, seconds = clock.run(main(), simulated=True)
    assert isinstance(result, Failure)
    assert (result.reason, result.detail) == (reason, f"task pick-7, dispatch 12, {detail}")
    assert seconds <= 7.0


def test_the_episode_s_deadline_spans_all_its_waits():
    world = World(*[after(4.0, goes_on())] * 20)
    result = play(world, Speaker(after(6.0, "go")), EpisodeSettings(1000, 20, 5.0, 7.0, episode_deadline=53.0))
    assert isinstance(result, Failure)
    assert result.reason == "episode_deadline"
    assert result.detail == "task pick-7, dispatch 12, turn 5: the episode took longer than 53 s, last in the engine's reply"


def test_a_close_that_hangs_does_not_hang_the_episode(caplog):
    async def main() -> tuple[Trajectory | Failure, float]:
        world = World(Step("", True, True, "success"), close=stubborn)
        return await run_episode(DISPATCH, TASK, world, Speaker("go", end=never), CODEC, SETTINGS), clock.now()

    with caplog.at_level(logging.WARNING):
        result, seconds = clock.run(main(), simulated=True)
    assert isinstance(result, Trajectory) and result.success
    assert seconds == pytest.approx(7.0)
    assert {record.getMessage() for record in caplog.records} == {
        "task pick-7, dispatch 12, turn 0: environment.close took longer than 5 s and was left behind",
        "task pick-7, dispatch 12, turn 0: engine.end took longer than 7 s and was left behind",
    }


# --- cancellation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "engine"),
    [
        (World(opening=never), Speaker("go")),
        (World(never), Speaker("go")),
        (World(goes_on()), Speaker("go", never)),
        (World(never, close=stubborn), Speaker("go", end=never)),
    ],
    ids=["reset", "step", "generate", "step with hanging ends"],
)
def test_cancellation_ends_both_sides_and_is_raised(world, engine):
    async def main() -> float:
        task = asyncio.ensure_future(run_episode(DISPATCH, TASK, world, engine, CODEC, SETTINGS))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return clock.now()

    assert clock.run(main(), simulated=True) <= 1.0 + 7.0
    assert (engine.ended, world.closed) == ([12], 1)


def test_cancelling_again_during_the_ends_neither_skips_nor_cuts_them():
    finished = []

    def slow(name: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def end() -> None:
            await asyncio.sleep(3.0)
            finished.append(name)

        return end

    world, engine = World(never, close=slow("close")), Speaker("go", end=slow("end"))

    async def main() -> None:
        task = asyncio.ensure_future(run_episode(DISPATCH, TASK, world, engine, CODEC, SETTINGS))
        for _ in range(3):
            await asyncio.sleep(1.0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(10.0)

    clock.run(main(), simulated=True)
    assert sorted(finished) == ["close", "end"]
    assert (engine.ended, world.closed) == ([12], 1)


def test_a_conversation_that_the_template_refuses_is_a_wrong_set_up_and_is_raised():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{%- if messages | length > 2 -%}{{ raise_exception('too long') }}{%- endif -%}"
    codec = ChatCodec(tokenizer)
    world, engine = World(goes_on()), Speaker("go")
    with pytest.raises(ValueError, match="too long"):
        clock.run(run_episode(DISPATCH, TASK, world, engine, codec, SETTINGS), simulated=True)
    assert (engine.ended, world.closed) == ([12], 1)


def test_many_episodes_at_once_are_the_same_in_every_run():
    async def main() -> list[Any]:
        def episode(number: int) -> Coroutine[Any, Any, Trajectory | Failure]:
            world = World(*[after(0.1 * (number % 3), goes_on())] * 3, Step("", True, True, "success"))
            return run_episode(DISPATCH, TASK, world, Speaker(after(0.2 * (number % 5), "go")), CODEC, SETTINGS)

        return [(result, clock.now()) for result in await asyncio.gather(*(episode(number) for number in range(20)))]

    assert clock.run(main(), simulated=True) == clock.run(main(), simulated=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_limit": 20, "reply_tokens": 20}, r"reply_tokens \(20\) must be below context_limit \(20\)"),
        ({"context_limit": 0, "reply_tokens": 20}, "context_limit must be above 0"),
        ({"context_limit": 100, "reply_tokens": 20, "engine_deadline": 0.0}, "engine_deadline must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EpisodeSettings(**options)
