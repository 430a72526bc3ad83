"""Answers: which one counts, and which are the same."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.environments import grading
from headrace.environments.grading import GradingError, SymbolicGrader, equivalent, extract_answer, is_gradable

SAME = [
    # integers, signs, Unicode
    ("42", "42"), ("42.0", "42"), ("+3", "3"), ("-7", "- 7"), ("−7", "-7"), ("(3)", "3"), ("007", "7"),
    # fractions, mixed numbers, decimals
    ("1/2", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac12", "0.5"), (r"\dfrac{3}{4}", "0.75"), (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("1 1/2", "3/2"), (r"1\frac{1}{2}", "1.5"), ("-1 1/2", "-3/2"), ("3½", "3.5"), ("0.333333", "1/3"), (".5", "1/2"),
    ("33.599999999999994", "33.6"), ("1.5e3", "1500"), (r"1.5\times 10^{3}", "1500"), ("1e-7", "0.0000001"),
    # percent
    ("50%", "0.5"), (r"50\%", r"\frac{1}{2}"), ("50%", "50"), ("50", "50%"), ("12.5 percent", "12.5%"), (r"5\%", "0.05"),
    # thousands, money, magnitudes
    ("1,000", "1000"), ("1{,}000", "1000"), ("1 000", "1000"), ("1,00,000", "100000"), ("$1,234.50", "1234.5"), (r"\$5", "5"),
    ("18 dollars", "$18"), ("50 cents", "$0.50"), ("3 million", "3,000,000"), ("2 dozen", "24"),
    # units
    ("5 cm", "5"), (r"5 \text{ cm}", "5 cm"), (r"5\,\mathrm{cm}", "5"), ("5 km", "5000 m"), ("9 apples", "9 (apples)"), ("5m", "5"),
    ("2", "2 (times)"), ("3 times", "3"),
    (r"90^\circ", "90 degrees"), ("12 inches", "1 foot"), (r"12 \text{ cm}^2", "12"), ("2 hours", "120 minutes"), ("3:30 p.m.", "3:30 PM"),
    # intervals, tuples, sets, lists
    ("[0,1)", r"\left[0, 1\right)"), ("(1/2, 3)", "(0.5,3)"), (r"(-\infty,3)", r"(-\infty, 3)"), ("(1,2,3)", r"\left(1, 2, 3\right)"),
    ("2,3", "3,2"), (r"\{1,2\}", r"\{2,1\}"), ("1 and 2", "2, 1"), ("$1$ and $2$", "1,2"), (r"1 \text{ or } 2", "1, 2"), (r"\pm 3", "3,-3"),
    ("3, 4", "(3, 4)"), (r"\{5\}", r"\{5.0\}"),
    # names and statements
    ("x=5", "5"), ("5", "x = 5"), (r"\log_6(216)=3", "3"), ("3 + 4 = 7", "7"),
    # wrapping
    ("$42$", "42"), (r"\(42\)", "42"), (r"\boxed{42}", "42"), ("**42**", "42"), (" 42. ", "42"),
    (r"\text{Monday}", "monday"), ("Yes.", "yes"),
]  # fmt: skip

SAME_BY_ALGEBRA = [
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt{2}}"), (r"x^2+2x+1", "(x+1)^2"), (r"2\pi", "2π"), (r"\log_2 8", "3"), ("2+3i", "3i+2"), ("1:2", "1/2"),
    ("2^{10}", "1024"), ("x>3", r"(3,\infty)"), ("3<x", "x>3"), (r"\sqrt{2}, -\sqrt{2}", r"\pm\sqrt 2"), ("y = 2x+1", "y=1+2x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left[\begin{array}{c}1 \\ 2\end{array}\right]"), (r"(\frac{\sqrt{4}}{4}, 1)", "(0.5, 1)"),
]  # fmt: skip

DIFFERENT = [
    ("42", "43"), ("-7", "7"), ("1/2", "1/3"), ("0.33", "1/3"), ("0", "0.0000001"), ("1000000", "1000001"), ("1 1/2", "11/2"), ("1", "10"),
    ("0.5%", "0.5"), ("1%", "1.5"), ("3 million", "3"), ("5 km", "5 m"), ("3 a.m.", "3 p.m."), ("3:30", "4:30"), ("1:20", "2:40"),
    ("(1,2)", "(2,1)"), ("[0,1]", "[0,1)"), ("(0,1)", "[0,1]"), ("1,2,3", "1,2"), ("(1,2,3)", "(1,3,2)"), (r"\{1,2\}", r"\{1,3\}"),
    ("1, 2", "12"), (r"3 \text{ times } 5", "3"),
    ("1, 1, 2", "1, 2, 2"), (r"\{1,2\}", "(1,2)"), ("listen", "silent"), ("no", "on"), (r"\text{yes}", "no"), ("", "5"), ("12_8", "12_9"),
    ("5x", "5"), ("x", "5"), ("2", r"\pm 2"), ("5 and 6", "6"), ("2^{10}", "1025"), (r"\infty", r"-\infty"), ("1/0", "5"), ("x=5", "y=5"),
    ("(1,234)", "1234"), (r"\log_6(216)=3", r"\log_2(16)=4"), ("x^2+2x", "(x+1)^2"), ("y=x", "y=x+1"), ("__import__('os').getcwd()", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_plain_answers_are_the_same_without_the_symbolic_grader(answer: str, gold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "shared_grader", lambda: pytest.fail("asked the symbolic grader"))
    assert equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), SAME_BY_ALGEBRA)
def test_mathematics_is_the_same_by_algebra(answer: str, gold: str) -> None:
    pytest.importorskip("math_verify")
    assert equivalent(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different_answers_are_different(answer: str, gold: str) -> None:
    pytest.importorskip("math_verify")
    assert not equivalent(answer, gold)


def test_no_answer_is_never_right() -> None:
    assert not equivalent(None, "5")
    assert not equivalent(None, "")
    assert not equivalent("", "")


FORMS = ["{:d}", "{:,}", "{:d}.0", "${:d}$", r"\boxed{{{:,}}}", "{:d} apples", "x = {:d}", "{:d}/1"]


@given(st.integers(-(10**12), 10**12), st.sampled_from(FORMS))
def test_an_integer_equals_itself_however_it_is_written(number: int, form: str) -> None:
    assert equivalent(form.format(number), str(number))
    assert not equivalent(form.format(number + 1), str(number))


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=500))
def test_a_fraction_equals_its_other_forms(value: Fraction) -> None:
    plain = f"{value.numerator}/{value.denominator}"
    whole, rest = divmod(abs(value), 1)
    sign = "-" if value < 0 else ""
    assert equivalent(rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}", plain)
    assert equivalent(f"{float(value):.12f}", plain)
    assert equivalent(f"{sign}{whole} {rest.numerator}/{rest.denominator}", plain)
    assert equivalent(rf"{sign}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}", plain)


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_is_read_without_an_exception(text: str, other: str) -> None:
    extract_answer(text)
    assert isinstance(grading._same(text, other, lambda answer, gold: False), bool)
    is_gradable(text)


# --- extraction ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{3}. No, wrong: \boxed{4}.", "4"),  # the first one is retracted
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x = \boxed{7}}", "7"),
        (r"\boxed 5", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),  # cut off inside the second box
        (r"The answer is 9. \boxed{5}", "5"),  # a box comes before every fallback
        (r"\boxed{5} but the last is empty \boxed{}", None),
        ("48/2 = 24\n#### 1,234", "1,234"),
        ("#### 1\n#### 2", "2"),
        ("The answer is 42.", "42"),
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct.", "$\\frac{1}{2}$"),
        ("**Answer:** 5", "5"),
        ("Answer: 3.14.", "3.14"),
        ("She makes 16 - 3 = 13\nA: 18", "18"),
        ("The answer is 3. Wait, the answer is 4.", "4"),
        ("So the answer should be 7", "7"),
        ("It was 1995 and 12 of them left.", None),  # a number somewhere is not an answer
        ("The answer, as they say, depends.", None),
        ("", None),
        (r"\boxed{", None),
    ],
)
def test_the_answer_that_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_extraction_takes_linear_time() -> None:
    boxes = [r"\boxed{" * 40_000, r"\boxed{" * 20_000 + "}" * 20_000]
    texts = [*boxes, "answer is " * 30_000, "answer " * 40_000, "####" * 50_000, "A: " * 50_000]
    started = time.process_time()
    for text in texts:
        extract_answer(text)
    assert time.process_time() - started < 5


# --- no verdict, threads, processes -------------------------------------------------------------------------------------------


def test_the_score_is_the_same_on_the_main_thread_in_a_worker_thread_and_in_an_event_loop() -> None:
    pytest.importorskip("math_verify")
    cases = [*SAME_BY_ALGEBRA[:4], *DIFFERENT[-4:]]
    here = [equivalent(answer, gold) for answer, gold in cases]
    grading._cached.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda case: equivalent(*case), cases)) == here
    grading._cached.cache_clear()

    async def all_at_once() -> list[bool]:
        return await asyncio.gather(*(grading.equivalent_async(answer, gold) for answer, gold in cases))

    assert asyncio.run(all_at_once()) == here


def test_a_comparison_that_never_ends_is_an_error_in_time_on_any_thread() -> None:
    pytest.importorskip("math_verify")
    equivalent("x+1", "1+x")  # the grader's process is running
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(equivalent(r"9^{9^{9^{9}}}", "5", seconds=0.5))
        except GradingError as error:
            outcome.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert isinstance(outcome[0], GradingError) and "0.5 s" in str(outcome[0])
    assert time.monotonic() - started < 20
    assert equivalent("x+2", "2+x")  # and the next comparison works


def test_an_answer_that_is_no_mathematics_is_wrong_without_an_error() -> None:
    for garbage in ("(" * 3000, r"\frac{" * 500, "[" * 50 + "1" + "]" * 50, "}{", "\\", "$", "#" * 5000, "\0\n\t"):
        assert not equivalent(garbage, "5")


def test_a_grader_process_that_dies_is_an_error_and_is_replaced() -> None:
    pytest.importorskip("math_verify")
    grader = SymbolicGrader(workers=1)
    try:
        assert grader.compare("x+1", "1+x", 5)
        child = grader._slots.get_nowait()
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)  # alive, but it will never answer
        grader._slots.put(child)
        threading.Timer(0.3, lambda: os.kill(child.pid, signal.SIGKILL)).start()
        with pytest.raises(GradingError, match="died"):
            grader.compare("x+1", "1+x", 5)
        assert grader.compare("x+1", "1+x", 5)
    finally:
        grader.close()


def test_a_grader_process_that_hangs_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(grading, "_GRACE_SECONDS", 0.2)
    grader = SymbolicGrader(workers=1)
    try:
        assert grader.compare("x+1", "1+x", 5)
        child = grader._slots.get_nowait()
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        grader._slots.put(child)
        with pytest.raises(GradingError, match="killed"):
            grader.compare("x+1", "1+x", 0.2)
        assert not child.alive()
        assert grader.compare("x+1", "1+x", 5)
    finally:
        grader.close()


def test_without_math_verify_numbers_are_graded_and_the_rest_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def compare(self, answer: str, gold: str, seconds: float) -> bool:
            raise ModuleNotFoundError(grading._MISSING)

    monkeypatch.setattr(grading, "shared_grader", Absent)
    grading._cached.cache_clear()
    assert equivalent("1/2", "0.5")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'headrace\[math\]'"):
        equivalent("x+1", "1+x")


def test_a_fork_gets_a_grader_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = grading.shared_grader()
    assert grading.shared_grader() is first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert grading.shared_grader() is not first


COMPARABLE = ["5", r"\frac{1}{2}", "x^2+1", "Monday", "Mrs. Hilt", "(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}", "9 (apples)"]


@pytest.mark.parametrize("gold", COMPARABLE)
def test_a_gold_that_can_be_compared(gold: str) -> None:
    assert is_gradable(gold)


@pytest.mark.parametrize("gold", ["", "No. It has a nonzero determinant for all $t$", "There is no possible choice of k which works."])
def test_a_gold_that_is_prose(gold: str) -> None:
    assert not is_gradable(gold)
