"""One episode: the policy and the world in turn, until the world ends it or a budget does.

    reset ─► open ─► [ generate ─► add_action ─► step ─► add_observation ] ─► Trajectory
                          │                        │
                      engine deadline     environment deadline         an error or a deadline ─► Failure

Every wait has a deadline, and what is waited for runs in a task of its own: a world or an engine that does not answer, or
that swallows its cancellation, is left behind and named. One thing cannot be interrupted from here: a world that blocks
the event loop (computes or sleeps without awaiting). A world that may block runs its work in a thread or a process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.environments.base import Environment, Step, Task
from headrace.rollout.chat import ChatCodec, Conversation
from headrace.rollout.clock import CostModel, charge, now
from headrace.rollout.engine import Completion, Engine, EngineError, Request, UnknownVersion
from headrace.rollout.trajectory import Dispatch, Failure, Trajectory

T = TypeVar("T")
_log = logging.getLogger(__name__)
_FREE = CostModel()
_endings: set[asyncio.Future[Any]] = set()  # the loop itself holds tasks weakly


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Budgets in tokens, deadlines in seconds.

    ``context_limit`` bounds context and reply together: a turn begins only if the whole ``reply_tokens`` still fit.
    ``engine_deadline`` bounds one reply, ``environment_deadline`` one reset, step or close, ``episode_deadline`` everything
    from reset to the last step. ``mixed_versions`` samples every token under the newest snapshot (the "continue" publication)
    instead of the dispatch's. ``costs`` are charged in simulated time.
    """

    context_limit: int
    reply_tokens: int
    environment_deadline: float = 60.0
    engine_deadline: float = 600.0
    episode_deadline: float = 1800.0
    mixed_versions: bool = False
    costs: CostModel = _FREE

    def __post_init__(self) -> None:
        for name in ("context_limit", "reply_tokens", "environment_deadline", "engine_deadline", "episode_deadline"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.reply_tokens >= self.context_limit:
            raise ValueError(f"reply_tokens ({self.reply_tokens}) must be below context_limit ({self.context_limit})")


async def run_episode(
    dispatch: Dispatch, task: Task, environment: Environment, engine: Engine, codec: ChatCodec, settings: EpisodeSettings
) -> Trajectory | Failure:
    """One attempt at ``task``.

    Ends with the world's own reason, with "context" (the next reply would not fit; the sum is checked before) or with
    "reply" (a reply ran out of its budget; it is trained on and not executed). The last two keep an outcome already earned.
    Errors and deadlines give a ``Failure`` that names task, dispatch, turn and cause; errors of the chat template are a wrong
    set-up, not an attempt's fate, and are raised. In every case, cancellation included, the engine is told once that the
    dispatch has ended and the environment is closed, both in bounded time.
    """
    episode = _Episode(dispatch, task, environment, engine, codec, settings)
    try:
        return await episode.run()
    except _Ended as end:
        return Failure(dispatch, end.reason, end.detail)
    finally:
        await episode.clean_up()


async def run_attempt(
    dispatch: Dispatch, task: Task, make_environment: Callable[[], Environment], engine: Engine, codec: ChatCodec, settings: EpisodeSettings
) -> Trajectory | Failure:
    """``run_episode`` in an environment of its own; one that cannot be made is the world's error, like one that cannot be reset."""
    try:
        environment = make_environment()
    except Exception as error:
        where = f"task {task.id}, dispatch {dispatch.number}"
        return Failure(dispatch, "environment_error", f"{where}: making the environment raised {_told(error)}")
    return await run_episode(dispatch, task, environment, engine, codec, settings)


class _Ended(Exception):
    """The episode ends without an outcome."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class _Late(Exception):
    """A wait outlived its deadline."""


class _Episode:
    def __init__(
        self, dispatch: Dispatch, task: Task, environment: Environment, engine: Engine, codec: ChatCodec, settings: EpisodeSettings
    ) -> None:
        self._dispatch = dispatch
        self._task = task
        self._environment = environment
        self._engine = engine
        self._codec = codec
        self._settings = settings
        self._started = now()
        self._turn = 0
        self._unmatched = 0
        self._generation_seconds = 0.0
        self._environment_seconds = 0.0

    async def run(self) -> Trajectory:
        observation = await self._world("reset", lambda: self._environment.reset(self._task))
        if not isinstance(observation, str):
            raise self._bad_answer("reset", f"returned {type(observation).__name__}, not text")
        conversation = self._codec.open(self._environment.system, self._environment.tools, _well_formed(observation))
        step: Step | None = None
        while len(conversation) + self._settings.reply_tokens <= self._settings.context_limit:
            completion = await self._generate(conversation.context())
            action = self._accept(conversation, completion)
            if completion.stop_reason == "length":
                return self._trajectory(conversation, step, "reply")
            step = await self._step(action)
            if step.done:
                return self._trajectory(conversation, step, step.reason or ("success" if step.success else "done"))
            conversation.add_observation(step.observation)
            self._turn += 1
        return self._trajectory(conversation, step, "context")

    async def clean_up(self) -> None:
        """Both endings begin at once and go on, each within its deadline, even if this wait is cancelled a second time."""
        endings = asyncio.gather(
            self._finish("engine.end", lambda: self._engine.end(self._dispatch.number), self._settings.engine_deadline),
            self._finish("environment.close", self._environment.close, self._settings.environment_deadline),
        )
        _endings.add(endings)
        endings.add_done_callback(_endings.discard)
        endings.add_done_callback(_unheard)
        await asyncio.shield(endings)

    async def _finish(self, what: str, call: Callable[[], Awaitable[None]], seconds: float) -> None:
        try:
            await _within(seconds, asyncio.ensure_future(_called(call)))
        except _Late:
            _log.warning("%s: %s took longer than %g s and was left behind", self._where(), what, seconds)
        except Exception as error:
            _log.warning("%s: %s raised %s", self._where(), what, _one_line(error))

    # --- the two sides ---

    async def _generate(self, context: tuple[int, ...]) -> Completion:
        version = None if self._settings.mixed_versions else self._dispatch.version
        request = Request(self._dispatch.number, self._turn, context, version, self._settings.reply_tokens, self._dispatch.seed)
        started = now()
        try:
            return await self._within_episode("engine", self._settings.engine_deadline, lambda: self._engine.generate(request))
        except UnknownVersion as error:
            raise _Ended("version_gone", f"{self._where()}: {_one_line(error)}") from error
        except _Ended:
            raise
        except Exception as error:
            raise _Ended("engine_error", f"{self._where()}: the engine raised {_told(error)}") from error
        finally:
            self._generation_seconds += now() - started

    def _accept(self, conversation: Conversation, completion: Completion) -> str:
        try:
            return conversation.add_action(completion)
        except EngineError as error:
            raise _Ended("engine_error", f"{self._where()}: {_one_line(error)}") from error

    async def _step(self, action: str) -> Step:
        step = await self._world("step", lambda: self._environment.step(action))
        if not isinstance(step, Step) or not isinstance(step.observation, str):
            raise self._bad_answer("step", f"returned {step!r:.200}, not a Step with text")
        try:
            step = _plain(step)
        except (TypeError, ValueError) as error:
            raise self._bad_answer("step", f"returned {error}") from error
        self._unmatched += step.unmatched
        return step

    async def _world(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        started = now()
        try:
            result = await self._within_episode("environment", self._settings.environment_deadline, call, what)
            if self._settings.costs.environment_step > 0:
                await charge(self._settings.costs.environment_step)
            return result
        except _Ended:
            raise
        except Exception as error:
            raise _Ended("environment_error", f"{self._where()}: the environment's {what} raised {_told(error)}") from error
        finally:
            self._environment_seconds += now() - started

    async def _within_episode(self, side: str, seconds: float, call: Callable[[], Awaitable[T]], what: str = "reply") -> T:
        left = self._started + self._settings.episode_deadline - now()
        try:
            return await _within(min(seconds, left), asyncio.ensure_future(_called(call)))
        except _Late:
            pass
        if left <= seconds:
            limit = self._settings.episode_deadline
            raise _Ended("episode_deadline", f"{self._where()}: the episode took longer than {limit:g} s, last in the {side}'s {what}")
        raise _Ended(f"{side}_deadline", f"{self._where()}: the {side}'s {what} took longer than {seconds:g} s")

    # --- the end ---

    def _trajectory(self, conversation: Conversation, step: Step | None, reason: str) -> Trajectory:
        return Trajectory(
            dispatch=self._dispatch,
            rows=conversation.rows(),
            turns=conversation.turns,
            outcome=_outcome(step),
            success=step is not None and step.success,
            reason=reason,
            unmatched_actions=self._unmatched,
            generation_seconds=self._generation_seconds,
            environment_seconds=self._environment_seconds,
        )

    def _bad_answer(self, what: str, problem: str) -> _Ended:
        return _Ended("environment_error", f"{self._where()}: the environment's {what} {problem}")

    def _where(self) -> str:
        return f"task {self._task.id}, dispatch {self._dispatch.number}, turn {self._turn}"


def _plain(step: Step) -> Step:
    """``step`` in plain Python values: a world may grade with another library's numbers and quote text that is not quite Unicode."""
    if step.reason is not None and not isinstance(step.reason, str):
        raise TypeError(f"the reason {step.reason!r:.100}, which is not text")
    success: Any = step.success
    if success is None or isinstance(success, str):
        raise TypeError(f"success {success!r:.100}, which is not a truth value")
    outcome = None if step.outcome is None else _number(step.outcome)
    if outcome is not None and not (math.isnan(outcome) or 0 <= outcome <= 1):
        raise ValueError(f"an outcome of {outcome}, outside [0, 1]")
    return Step(
        observation=_well_formed(step.observation),
        done=bool(step.done),
        success=bool(success),
        reason=None if step.reason is None else _well_formed(step.reason),
        outcome=outcome,
        unmatched=bool(step.unmatched),
    )


def _number(outcome: Any) -> float:
    if isinstance(outcome, str | bytes):
        raise TypeError(f"the outcome {outcome!r:.100}, which is not a number")
    try:
        return float(outcome)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the outcome {outcome!r:.100}, which is not a number") from error


def _well_formed(text: str) -> str:
    """``text`` with U+FFFD for surrogates without a partner (bytes that a tool decoded badly): no tokenizer can encode those."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _outcome(step: Step | None) -> float:
    """What the world's last word is worth. Before its end, a grade not given yet (None or NaN) is nothing earned."""
    if step is None:
        return 0.0
    if step.outcome is None:
        return float(step.success)
    return step.outcome if step.done or not math.isnan(step.outcome) else 0.0


async def _called(call: Callable[[], Awaitable[T]]) -> T:
    """``call`` as a coroutine in which every fault is an ordinary exception: a world that calls ``sys.exit``, or whose native code
    panics, must not end the run."""
    try:
        return await call()
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error
    except BaseException as error:
        raise RuntimeError(_one_line(error)) from error


async def _within(seconds: float, work: asyncio.Future[T]) -> T:
    """The result of ``work``; ``_Late`` after ``seconds``. Late or cancelled, ``work`` is cancelled and not waited for."""
    try:
        await asyncio.wait((work,), timeout=max(seconds, 0.0))
    except asyncio.CancelledError:
        _abandon(work)
        raise
    if not work.done():
        _abandon(work)
        raise _Late
    if work.cancelled():
        raise RuntimeError("it was cancelled from inside")
    return work.result()


def _abandon(work: asyncio.Future[Any]) -> None:
    work.cancel()
    work.add_done_callback(_unheard)


def _unheard(done: asyncio.Future[Any]) -> None:
    """Whatever came of it is no news any more."""
    if not done.cancelled():
        done.exception()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _told(error: BaseException, frames: int = 3) -> str:
    """The cause in one line, then the innermost frames of its traceback."""
    tail = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-frames:]))
    return f"{_one_line(error)}\n{tail.rstrip()}"
