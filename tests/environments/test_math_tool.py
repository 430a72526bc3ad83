"""The math world: what a reply means, how an episode ends, whose word success is."""

import asyncio
import math
from pathlib import Path

import pytest

from headrace.environments import grading, math_tool
from headrace.environments.base import Environment, Step, Task
from headrace.environments.math_options import MathOptions
from headrace.environments.math_play import play
from headrace.environments.math_tool import FULL, TERSE, MathToolEnvironment, Reply, read_reply
from headrace.environments.python_sandbox import PythonSandbox

pytest.importorskip("pydantic_monty")
TASK = Task("t/1", "t", {"question": "What is 6 times 7?", "answer": "42"})
CALL = "```python\n6 * 7\n```"


def world(**options: object) -> MathToolEnvironment:
    made = MathToolEnvironment(PythonSandbox(seconds=2.0), **options)  # type: ignore[arg-type]
    made.reset_now(TASK)
    return made


# --- reading a reply ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (CALL, Reply(calls=("6 * 7",))),
        ("First:\n```py\nx = 1\n```\nthen\n```Python3\nx\n```", Reply(calls=("x = 1", "x"))),
        ("```python\n6 * 7", Reply(calls=("6 * 7",))),  # generation stopped before the closing fence
        ("```python 6 * 7```", Reply(calls=("6 * 7",))),
        ("```python\n```", Reply(calls=("",))),
        ('<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>', Reply(calls=("6 * 7",))),
        ("<tool_call><function=python><parameter=code>\n6 * 7\n</parameter></function></tool_call>", Reply(calls=("6 * 7",))),
        ('{"name": "python", "parameters": {"code": "6 * 7"}}', Reply(calls=("6 * 7",))),
        (r"It is \boxed{42}.", Reply(answer="42")),
        (r"\boxed{41}, no, \boxed{42}", Reply(answer="42")),
        (CALL + "\nSo it is \\boxed{42}.", Reply(answer="42")),  # what is said last counts
        ("\\boxed{41}? Let me check.\n" + CALL, Reply(calls=("6 * 7",))),
        ("```python\nprint('\\\\boxed{9}')\n```", Reply(calls=("print('\\\\boxed{9}')",))),  # a box in code is no answer
        ("The output is\n```output\n\\boxed{9}\n```", Reply()),  # nor is one in another block
        ("The answer is 42.", Reply()),
        ("Hm.", Reply()),
        ("", Reply()),
        (r"\boxed{}", Reply()),
    ],
)
def test_what_a_reply_says_last_counts(text: str, reply: Reply) -> None:
    assert read_reply(text) == reply


def test_an_unboxed_answer_counts_only_where_the_world_allows_it() -> None:
    assert read_reply("The answer is 42.", require_box=False) == Reply(answer="42")
    assert read_reply("Hm.", require_box=False) == Reply()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "python", </tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"code": "1"}}</tool_call>', "no tool 'search'"),
        ('<tool_call>{"name": "python", "arguments": {"query": "1"}}</tool_call>', 'needs the argument "code"'),
    ],
)
def test_a_malformed_call_is_told_what_is_wrong(text: str, problem: str) -> None:
    reply = read_reply(text)
    assert reply.problem is not None and problem in reply.problem
    step = world().step_now(text)
    assert problem in step.observation and step.unmatched and not step.done


# --- episodes ---------------------------------------------------------------------------------------------------------------


def test_it_is_an_environment_with_one_tool_and_instructions() -> None:
    environment = world()
    assert isinstance(environment, Environment)
    assert [tool.name for tool in environment.tools] == ["python"]
    assert environment.system is not None and "8 turns" in environment.system and "{" not in environment.system.replace("\\boxed{}", "")
    assert world(texts=TERSE).system is None and world(texts=TERSE).tools == ()
    alone = world(max_turns=1)
    assert alone.system == FULL.system_alone and "Python" not in str(alone.system) and alone.tools == ()


def test_a_tool_call_is_answered_with_its_output_and_a_boxed_answer_ends_the_episode() -> None:
    environment = world()
    assert environment.reset_now(TASK) == "What is 6 times 7?"
    assert environment.step_now(CALL) == Step("42", False, False, None)
    assert environment.step_now(r"\boxed{42}") == Step("", True, True, "answered")


def test_a_wrong_answer_is_answered_and_no_success() -> None:
    assert world().step_now(r"\boxed{41}") == Step("", True, False, "answered")


def test_the_verifier_decides_not_the_spelling() -> None:
    assert world().step_now(r"\boxed{x = \frac{84}{2}}").success
    assert world().step_now(r"\boxed{42.0 \text{ apples}}").success


def test_variables_last_within_an_episode_and_not_into_the_next() -> None:
    environment = world()
    environment.step_now("```python\nx = 5\n```")
    assert environment.step_now("```python\nx * 2\n```").observation == "10"
    environment.reset_now(TASK)
    assert "NameError" in environment.step_now("```python\nx\n```").observation


def test_errors_silence_and_idle_words_are_normal_observations() -> None:
    environment = world()
    assert environment.step_now("```python\n1 / 0\n```").observation == "line 1: 1 / 0\nZeroDivisionError: division by zero"
    assert environment.step_now("```python\nx = 1\n```").observation == FULL.silent
    idle = environment.step_now("Let me think.")
    assert idle == Step(FULL.reminder, False, False, None, unmatched=True)


def test_several_calls_in_one_reply_run_in_order_up_to_a_limit() -> None:
    environment = world()
    assert environment.step_now("```python\nx = 1\nx\n```\n```python\nx + 1\n```").observation == "1\n2"
    many = environment.step_now("\n".join(f"```python\n{n}\n```" for n in range(6)))
    assert many.observation == "0\n1\n2\n3\n(only the first 4 calls were run)"


@pytest.mark.parametrize("idle", [CALL, "Hm."])
def test_out_of_turns_is_no_success_and_a_win_on_the_last_turn_is(idle: str) -> None:
    environment = world(max_turns=3)
    steps = [environment.step_now(idle) for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True]
    assert (steps[2].success, steps[2].reason) == (False, "horizon")
    environment.reset_now(TASK)
    steps = [environment.step_now(idle), environment.step_now(idle), environment.step_now(r"\boxed{42}")]
    assert (steps[2].done, steps[2].success, steps[2].reason) == (True, True, "answered")


def test_the_last_turn_is_announced() -> None:
    environment = world(max_turns=3)
    assert environment.step_now(CALL).observation == "42"
    assert environment.step_now(CALL).observation == "42\n" + FULL.last_turn


def test_a_grader_error_is_unscored_and_never_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_verdict(answer: str | None, gold: str, *, seconds: float) -> bool:
        raise grading.GradingError("no verdict within 5 s")

    async def no_verdict_async(answer: str | None, gold: str, *, seconds: float) -> bool:
        return no_verdict(answer, gold, seconds=seconds)

    monkeypatch.setattr(math_tool, "equivalent", no_verdict)
    monkeypatch.setattr(math_tool, "equivalent_async", no_verdict_async)
    for step in (world().step_now(r"\boxed{42}"), asyncio.run(world().step(r"\boxed{42}"))):
        assert (step.done, step.success, step.reason) == (True, False, "grader_error")
        assert step.outcome is not None and math.isnan(step.outcome)


def test_an_answer_that_no_grader_can_finish_is_unscored() -> None:
    pytest.importorskip("math_verify")
    step = world(grading_seconds=0.3).step_now(r"\boxed{9^{9^{9^{9}}}}")
    assert step.reason == "grader_error" and step.outcome is not None and math.isnan(step.outcome)


def test_both_ways_of_stepping_give_the_same_episode() -> None:
    actions = [CALL, "Hm.", "```python\n1 / 0\n```", '<tool_call>{"name": "x", "arguments": {}}</tool_call>', r"\boxed{42}"]
    environment = world()
    now = [environment.step_now(action) for action in actions]

    async def later() -> list[Step]:
        other = world()
        await other.reset(TASK)
        steps = [await other.step(action) for action in actions]
        await other.close()
        return steps

    assert asyncio.run(later()) == now


def test_many_episodes_at_once() -> None:
    async def episode(number: int) -> bool:
        environment = MathToolEnvironment(PythonSandbox(seconds=5.0))
        await environment.reset(Task(f"t/{number}", "t", {"question": "?", "answer": str(number)}))
        step = await environment.step(f"```python\nx = {number}\nx\n```")
        final = await environment.step(f"\\boxed{{{step.observation}}}")
        await environment.close()
        return final.success

    async def all_at_once() -> list[bool]:
        return await asyncio.gather(*(episode(number) for number in range(200)))

    assert all(asyncio.run(all_at_once()))


def test_a_task_of_another_world_and_a_step_before_reset_are_refused() -> None:
    with pytest.raises(ValueError, match="no text 'question'"):
        MathToolEnvironment().reset_now(Task("h/1", "h", {"room": 3}))
    with pytest.raises(RuntimeError, match="reset the environment"):
        MathToolEnvironment().step_now(CALL)
    with pytest.raises(ValueError, match="max_turns"):
        MathToolEnvironment(max_turns=0)


# --- options and play --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"source": "gsm9k"}, "environment.options.source must be one of offline"),
        ({"levels": [0]}, "environment.options.levels"),
        ({"levels": []}, "environment.options.levels"),
        ({"python": "docker"}, "environment.options.python"),
        ({"texts": "loud"}, "environment.options.texts"),
        ({"max_turns": 0}, "environment.options.max_turns must be above 0"),
        ({"slip": 1}, "environment.options.slip"),
        ({"subset": 0}, "environment.options.subset must be above 0"),
        ({"tool_memory_mb": 0}, "environment.options.tool_memory_mb must be above 0"),
        ({"levels": 3}, "environment.options.levels must be a list of whole numbers, not 3"),
        ({"levels": [True]}, "environment.options.levels must be a list of whole numbers"),
        ({"splits": "test"}, "environment.options.splits must be a list of texts, not 'test'"),
        ({"splits": ["unseen"]}, r"environment.options.splits must be some of \['train', 'test'\], not \['unseen'\]"),
        ({"columns": "question"}, "environment.options.columns must be a table, not 'question'"),
        ({"path": 3}, "environment.options.path must be text, not 3"),
        ({"max_turns": 2.5}, "environment.options.max_turns must be a whole number, not 2.5"),
        ({"seed": "x"}, "environment.options.seed must be a whole number, not 'x'"),
        ({"require_box": "no"}, "environment.options.require_box must be true or false, not 'no'"),
        ({"tool_seconds": float("inf")}, "environment.options.tool_seconds must be a number, not inf"),
    ],
)
def test_bad_options_are_refused_when_they_are_read(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        MathOptions(**options)  # type: ignore[arg-type]


def test_options_make_tasks_and_environments(tmp_path: Path) -> None:
    options = MathOptions(source="arithmetic", levels=(2,), texts="terse", max_turns=3, tool_seconds=1.0)
    (task,) = options.tasks("train", 1)
    environment = options.environment()
    assert environment.reset_now(task) == task.payload["question"]
    assert environment.step_now("?").observation == TERSE.reminder
    assert environment.step_now(rf"\boxed{{{task.payload['answer']}}}").success


def run_play(*lines: str) -> tuple[bool, str]:
    said: list[str] = []
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    solved = play(TASK, environment=MathToolEnvironment(PythonSandbox(seconds=1.0), max_turns=3), read=read, write=said.append)
    return solved, "\n".join(said)


def test_a_person_runs_code_and_answers() -> None:
    solved, said = run_play("6 * 7", "", "for i in range(2):", "    print(i)", "", "= 42")
    assert solved and said.startswith("What is 6 times 7?") and "\n42\n" in said and "0\n1" in said and said.endswith("Right.")


def test_a_person_who_is_wrong_sees_the_answer_and_may_leave() -> None:
    assert run_play("= 41") == (False, run_play("= 41")[1]) and "the answer is 42" in run_play("= 41")[1]
    assert not run_play("quit")[0] and not run_play("1")[0]
    assert "Not solved" in run_play("1", "2", "3")[1]
