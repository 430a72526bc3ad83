"""Scripted solutions: they solve what they should, and their weaknesses are where they are asked for."""

import os
from pathlib import Path

import pytest

from headrace.environments.base import Task
from headrace.environments.math_demonstrations import Call, NoDemonstration, demonstration, expert, solves, worked_solution
from headrace.environments.math_problems import tasks
from headrace.environments.math_tool import TERSE, MathToolEnvironment
from headrace.environments.python_sandbox import PythonSandbox

pytest.importorskip("pydantic_monty")
GSM8K = Path(os.environ.get("HEADRACE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data")) / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no data at {GSM8K}; set HEADRACE_DATA")
NATALIA = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"


def world() -> MathToolEnvironment:
    return MathToolEnvironment(PythonSandbox(seconds=5.0), texts=TERSE)


def test_the_expert_solves_every_generated_problem() -> None:
    environment = world()
    for task in tasks("train", 150, levels=(1, 2, 3, 4, 5)):
        environment.reset_now(task)
        steps = [environment.step_now(action) for action in expert(task)]
        assert steps[-1].success and not any(step.unmatched for step in steps)


def test_calculator_marks_become_tool_calls_and_the_result_opens_the_next_reply() -> None:
    assert worked_solution(NATALIA) == (
        [
            Call("Natalia sold 48/2", "48/2"),
            Call("24 clips in May.\nNatalia sold 48+24", "48+24"),
        ],
        "72 clips altogether in April and May.",
    )
    task = Task("gsm8k/1", "gsm8k", {"question": "How many?", "answer": "72", "worked": NATALIA})
    assert demonstration(task, slip=0, environment=world()) == [
        ("Natalia sold 48/2\n```python\n48/2\n```", "24.0"),
        ("24 clips in May.\nNatalia sold 48+24\n```python\n48+24\n```", "72"),
        ("72 clips altogether in April and May.\n\\boxed{72}", ""),
    ]


@pytest.mark.parametrize(
    ("formula", "answer", "code", "boxed"),
    [
        ("(74-(29+25))/2=10", "10 (cents)", "(74-(29+25))/2", "10"),
        ("( ( 290.0 / 2.0 ) - 1.5 )", "143.5", "((290 / 2) - 1.5)", "143.5"),
    ],
)
def test_a_formula_becomes_one_call_and_the_bare_number_is_boxed(formula: str, answer: str, code: str, boxed: str) -> None:
    task = Task("asdiv/1", "asdiv", {"question": "How many?", "answer": answer, "formula": formula})
    assert expert(task) == [f"```python\n{code}\n```", f"\\boxed{{{boxed}}}"]
    assert solves(task, demonstration(task, slip=0, environment=world()), world())


@pytest.mark.parametrize(("formula", "answer"), [("61-13=48", "47"), ("LCM[8,9]=72", "72 (pins)"), ("8/14 < 10/13", "Mrs. Doyle's class")])
def test_a_formula_that_is_no_arithmetic_or_gives_another_number_is_no_demonstration(formula: str, answer: str) -> None:
    with pytest.raises(NoDemonstration):
        expert(Task("asdiv/1", "asdiv", {"question": "How many?", "answer": answer, "formula": formula}))


SPELLINGS = [
    ("$1,200*5%=60", "1200*(5/100)"), ("3x4=12", "3*4"), ("20*.01=.2", "20*.01"), ("[2+3]*4=20", "(2+3)*4"), ("10÷4=2.5", "10/4"),
    ("5*05=25", "5*5"),
]  # fmt: skip


@pytest.mark.parametrize(("mark", "code"), SPELLINGS)
def test_the_marks_own_spelling_is_made_python(mark: str, code: str) -> None:
    calls, _ = worked_solution(f"So <<{mark}>> it is.")
    assert [call.code for call in calls] == [code]


@pytest.mark.parametrize("mark", ["48/2=25", "a+b=3", "__import__('os')=1", "9**9**9=1", "1/0=0", "", "=", "5"])
def test_a_mark_that_is_no_arithmetic_with_that_result_is_refused(mark: str) -> None:
    with pytest.raises(NoDemonstration):
        worked_solution(f"So <<{mark}>> it is.")


def test_many_marks_share_calls_so_that_the_turns_suffice() -> None:
    worked = "\n".join(f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}" for n in range(20))
    calls, closing = worked_solution(worked)
    assert len(calls) == 7 and closing == "20"
    task = Task("gsm8k/2", "gsm8k", {"question": "?", "answer": "20", "worked": worked})
    assert solves(task, demonstration(task, slip=0, environment=world()), world())


def test_a_task_without_a_solution_is_refused_by_name() -> None:
    with pytest.raises(NoDemonstration, match="task t/1 carries no solution"):
        expert(Task("t/1", "t", {"question": "?", "answer": "1"}))


def test_the_same_seed_gives_the_same_attempt_and_slips_make_some_fail() -> None:
    environment = world()
    found = tasks("warmup", 60)
    attempts = [demonstration(task, 1, slip=0.4, environment=environment) for task in found]
    assert attempts == [demonstration(task, 1, slip=0.4, environment=environment) for task in found]
    assert attempts != [demonstration(task, 2, slip=0.4, environment=environment) for task in found]
    solved = [solves(task, turns, environment) for task, turns in zip(found, attempts, strict=True)]
    assert 0.3 < sum(solved) / len(solved) < 0.95
    assert any("Error" in observation for turns in attempts for _, observation in turns)
    assert all(solves(task, demonstration(task, 1, slip=0, environment=environment), environment) for task in found)
    with pytest.raises(ValueError, match="slip"):
        demonstration(found[0], slip=1.0)


@needs_gsm8k
def test_almost_all_of_gsm8k_becomes_demonstrations_that_solve_it() -> None:
    environment = world()
    found = tasks("test", 300, source="gsm8k", path=str(GSM8K))
    attempts = {}
    for task in found:
        try:
            attempts[task.id] = demonstration(task, slip=0, environment=environment)
        except NoDemonstration:
            continue
    assert len(attempts) >= 0.97 * len(found)
    assert all(solves(task, attempts[task.id], environment) for task in found if task.id in attempts)
    assert not any("Error" in observation for turns in attempts.values() for _, observation in turns)
