"""Mathematics with a Python tool: a problem, some turns in which code is run, a final boxed answer.

An action is a whole reply. What it says last counts:

- an answer in ``\\boxed{}`` after its last call: the episode is over, and the verifier's word is the outcome, 1 or 0;
- a call of the tool ``python`` (a fenced ```python block, or the model's native tool format): the code runs, and what it
  prints and the value of its last expression are the observation;
- neither: a short reminder, counted as unmatched.

Out of turns is no success. Where the verifier reaches no verdict the outcome is NaN: unscored, not wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.grading import GradingError, equivalent, equivalent_async, extract_answer
from headrace.environments.python_sandbox import PythonSandbox, ToolResult
from headrace.environments.tool_calls import ToolCall, read_tool_calls

PYTHON_TOOL = ToolSpec(
    "python",
    "Run Python code and see what it prints and the value of its last expression. Variables stay defined.",
    {"type": "object", "properties": {"code": {"type": "string", "description": "Python code"}}, "required": ["code"]},
)
MAX_CALLS = 4  # of one reply; further ones do not run
MAX_ACTION = 100_000  # characters of a reply that are looked at


@dataclass(frozen=True, slots=True)
class MathTexts:
    """Everything the world says. ``{turns}``, ``{question}``, ``{output}`` stand for the number of turns, and so on."""

    system: str | None = (
        "Solve the problem. You can run Python code: call the tool python, or write a block that begins with ```python and ends "
        "with ```. The next message is its output. You have {turns} turns. Give the final answer in \\boxed{}."
    )
    system_alone: str | None = "Solve the problem. Give the final answer in \\boxed{}."
    """Instead of ``system`` where there is one turn only, so that no code can be run."""
    question: str = "{question}"
    output: str = "{output}"
    silent: str = "(no output; print a value, or end with an expression)"
    reminder: str = "Write a ```python block, or give the final answer in \\boxed{}."
    last_turn: str = "This is the last turn: give the final answer in \\boxed{}."
    too_many: str = "(only the first {calls} calls were run)"


FULL = MathTexts()
TERSE = MathTexts(system=None, system_alone=None, silent="(no output)", reminder="?", last_turn="", too_many="")
"""For policies that are trained from nothing: no instructions, the shortest answers."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An action as the world understands it: an answer, or code to run, or a problem to report."""

    answer: str | None = None
    calls: tuple[str, ...] = ()
    problem: str | None = None


_FENCE = re.compile(r"```(?:python3?|py|tool_code)\b[ \t]*\n?(.*?)(?:\n?[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)
_OTHER_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_CALL_END = re.compile(r"</tool_call>|</function>")


def read_reply(text: str, *, require_box: bool = True) -> Reply:
    """What a reply asks for. ``require_box=False`` also takes an unboxed ``The answer is 5`` (see ``grading``) for an answer."""
    text = text[-MAX_ACTION:]
    native = read_tool_calls(text)
    fences = [] if native else list(_FENCE.finditer(text))
    answer = _answer_after_calls(text, bool(native), fences, require_box)
    if answer is not None or not (native or fences):
        return Reply(answer=answer)
    if fences:
        return Reply(calls=tuple(fence[1] for fence in fences))
    codes: list[str] = []
    for call in native:
        if not isinstance(call, ToolCall):
            return Reply(problem=call.problem)
        if call.name != PYTHON_TOOL.name:
            return Reply(problem=f"There is no tool {call.name[:40]!r}; the tool is python.")
        code = call.arguments.get("code")
        if not isinstance(code, str):
            return Reply(problem='The tool python needs the argument "code", a text.')
        codes.append(code)
    return Reply(calls=tuple(codes))


def _answer_after_calls(text: str, native: bool, fences: Sequence[re.Match[str]], require_box: bool) -> str | None:
    """The answer in what follows the last call; in all of the text, code blocks aside, where there is no call."""
    if native:
        ends = [match.end() for match in _CALL_END.finditer(text)]
        rest = text[ends[-1] :] if ends else ""
    else:
        rest = text[fences[-1].end() :] if fences else text
    rest = _OTHER_FENCE.sub(" ", rest)
    return extract_answer(rest) if not require_box or r"\boxed" in rest or r"\fbox" in rest else None


class MathToolEnvironment:
    """One problem at a time. ``reset_now`` and ``step_now`` are ``reset`` and ``step`` for callers without an event loop."""

    def __init__(
        self,
        sandbox: PythonSandbox | None = None,
        *,
        max_turns: int = 8,
        texts: MathTexts = FULL,
        require_box: bool = True,
        grading_seconds: float = 5.0,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {max_turns}")
        self._sandbox = sandbox or PythonSandbox()
        self.max_turns, self._texts = max_turns, texts
        self._require_box, self._grading_seconds = require_box, grading_seconds
        self._task: Task | None = None
        self._turns = 0
        instructions = texts.system if max_turns > 1 else texts.system_alone
        self.system: str | None = None if instructions is None else instructions.replace("{turns}", str(max_turns))
        self.tools: Sequence[ToolSpec] = (PYTHON_TOOL,) if instructions is not None and max_turns > 1 else ()

    async def reset(self, task: Task) -> str:
        return self.reset_now(task)

    def reset_now(self, task: Task) -> str:
        for part in ("question", "answer"):
            if not isinstance(task.payload.get(part), str):
                raise ValueError(f"task {task.id}: its payload has no text {part!r}, so it is not a math problem")
        self._sandbox.reset()
        self._task, self._turns = task, 0
        return self._texts.question.replace("{question}", str(task.payload["question"]))

    async def step(self, action: str) -> Step:
        begun = self._begin(action)
        if isinstance(begun, Step):
            return begun
        if begun.answer is not None:
            gold = self._gold()
            return await _verdict_async(lambda: equivalent_async(begun.answer, gold, seconds=self._grading_seconds))
        return self._observed(begun, [await self._sandbox.run_async(code) for code in begun.calls[:MAX_CALLS]])

    def step_now(self, action: str) -> Step:
        begun = self._begin(action)
        if isinstance(begun, Step):
            return begun
        if begun.answer is not None:
            gold = self._gold()
            return _verdict(lambda: equivalent(begun.answer, gold, seconds=self._grading_seconds))
        return self._observed(begun, [self._sandbox.run(code) for code in begun.calls[:MAX_CALLS]])

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self._task = None
        self._sandbox.close()

    def _gold(self) -> str:
        assert self._task is not None
        return str(self._task.payload["answer"])

    def _begin(self, action: str) -> Reply | Step:
        """Count the turn and read the reply: what is to be done, or the step where nothing is."""
        if self._task is None:
            raise RuntimeError("reset the environment with a task before the first step")
        self._turns += 1
        reply = read_reply(action, require_box=self._require_box)
        if reply.answer is not None:
            return reply
        if self._turns >= self.max_turns:
            return Step("", True, False, "horizon", unmatched=not reply.calls)
        if not reply.calls:
            return Step(self._with_notice(reply.problem or self._texts.reminder), False, False, None, unmatched=True)
        return reply

    def _observed(self, reply: Reply, results: Sequence[ToolResult]) -> Step:
        parts = [result.text or self._texts.silent for result in results]
        if len(reply.calls) > MAX_CALLS and self._texts.too_many:
            parts.append(self._texts.too_many.replace("{calls}", str(MAX_CALLS)))
        return Step(self._with_notice(self._texts.output.replace("{output}", "\n".join(parts))), False, False, None)

    def _with_notice(self, observation: str) -> str:
        last = self._turns == self.max_turns - 1 and self._texts.last_turn
        return f"{observation}\n{self._texts.last_turn}" if last else observation


def _verdict(ask: Callable[[], bool]) -> Step:
    try:
        return _answered(ask())
    except GradingError as error:
        return _unscored(error)


async def _verdict_async(ask: Callable[[], Awaitable[bool]]) -> Step:
    try:
        return _answered(await ask())
    except GradingError as error:
        return _unscored(error)


def _answered(right: bool) -> Step:
    return Step("", True, right, "answered")


def _unscored(error: GradingError) -> Step:
    return Step(f"(no verdict: {error})", True, False, "grader_error", outcome=math.nan)
