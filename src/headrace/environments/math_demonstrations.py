"""Scripted solutions of math problems, played in the world itself: material for a cold start.

Generated problems come with their solution in Python; some data sets with a formula, which becomes one call. GSM8K's
worked answers carry calculator marks (``<<48/2=24>>``): each line of words becomes a reply that runs the line's calculation,
and what the tool says takes the place of the marked result.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from headrace.environments._answer_text import normalize, parse_quantity, quantities_equal
from headrace.environments.base import Task
from headrace.environments.math_tool import MathToolEnvironment

_MARK = re.compile(r"<<([^<>]*)>>")
_SIGNS = str.maketrans({"x": "*", "X": "*", "×": "*", "÷": "/", "$": "", "[": "(", "]": ")"})
_CALLS = 7  # most calls of a demonstration: the eighth turn is the answer's


class NoDemonstration(ValueError):
    """The task carries no solution that can be turned into tool calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """Words before a piece of code, and the code."""

    words: str
    code: str

    def action(self) -> str:
        block = f"```python\n{self.code}\n```"
        return f"{self.words}\n{block}" if self.words else block


def expert(task: Task) -> list[str]:
    """Actions that solve ``task``: its calls, then the boxed gold. ``NoDemonstration`` where the task carries no solution."""
    calls, closing = solution(task)
    return [*(call.action() for call in calls), _answer(closing, _gold(task))]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The opening, (action, the world's answer to it) pairs, and whether the last action was the right answer."""

    opening: str
    turns: tuple[tuple[str, str], ...]
    success: bool

    def exchanges(self) -> list[tuple[str, str]]:
        """(what was seen, what was then done) pairs."""
        seen = [self.opening, *(answer for _, answer in self.turns)]
        return [(observation, action) for observation, (action, _) in zip(seen, self.turns, strict=False)]


def demonstration(
    task: Task, seed: int = 0, *, slip: float = 0.05, environment: MathToolEnvironment | None = None
) -> list[tuple[str, str]]:
    """The turns of ``attempt``: (action, the world's answer to it) pairs."""
    return list(attempt(task, seed, slip=slip, environment=environment).turns)


def attempt(task: Task, seed: int = 0, *, slip: float = 0.05, environment: MathToolEnvironment | None = None) -> Attempt:
    """Play one scripted solution.

    ``slip`` is the probability at each call of a weakness: a call that fails and is repeated, a turn of idle words, a wrong
    number, an answer without a calculation. So some attempts fail. The same arguments give the same attempt. ``environment``
    decides the wording of observations and the number of turns.
    """
    if not 0 <= slip < 1:
        raise ValueError(f"slip is {slip}; it is a probability below 1.")
    player = _Player(task, environment or MathToolEnvironment())
    source = random.Random(f"demonstration {task.id} {seed}")
    for said in _script(task, source, slip, player):
        if player.say(said):
            break
    return Attempt(player.opening, tuple(player.turns), player.success)


class _Player:
    """Says things to the world and remembers the answers."""

    def __init__(self, task: Task, world: MathToolEnvironment) -> None:
        self._world = world
        self.opening = world.reset_now(task)
        self.turns: list[tuple[str, str]] = []
        self.success = False

    def say(self, action: str) -> bool:
        step = self._world.step_now(action)
        self.turns.append((action, step.observation))
        self.success = step.success
        return step.done


def _script(task: Task, source: random.Random, slip: float, player: _Player) -> Iterator[str]:
    calls, closing = solution(task)
    gold, astray = _gold(task), False
    for call in calls:
        weakness = source.choice(("broken", "idle", "wrong", "guess")) if source.random() < slip else None
        if weakness == "guess":
            yield _answer("", str(source.randint(1, 100)))
        elif weakness == "broken":
            yield _broken(call, source).action()
        elif weakness == "idle":
            yield "Let me think."
        astray = astray or weakness == "wrong"
        yield (_with_wrong_number(call, source) if weakness == "wrong" else call).action()
    yield _answer(closing, _shown(player.turns, gold) if astray else gold)


def solves(task: Task, turns: Sequence[tuple[str, str]], environment: MathToolEnvironment | None = None) -> bool:
    """Whether (action, answer) pairs end in the right answer, by playing the actions once more."""
    world = environment or MathToolEnvironment()
    world.reset_now(task)
    steps = [world.step_now(action) for action, _ in turns]
    return bool(steps) and steps[-1].success


def _answer(words: str, answer: str) -> str:
    box = f"\\boxed{{{answer}}}"
    return f"{words}\n{box}" if words else box


def _shown(turns: Sequence[tuple[str, str]], gold: str) -> str:
    """What one who believes the tool answers: the number shown last, in the gold's spelling where it is the gold."""
    quantity, wanted = None, parse_quantity(normalize(gold))
    for line in reversed(turns[-1][1].splitlines() if turns else []):
        quantity = parse_quantity(normalize(line))
        if quantity is not None:
            break
    if quantity is None or wanted is None or quantities_equal(quantity, wanted):
        return gold
    return _written(quantity.value)


def _gold(task: Task) -> str:
    """The answer as a solution boxes it. A data set with formulas notes units its own way ("24 (cubes)"): there the bare number."""
    answer = str(task.payload["answer"])
    quantity = parse_quantity(normalize(answer)) if "formula" in task.payload else None
    return answer if quantity is None else _written(quantity.value)


def _written(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):g}"


def _broken(call: Call, source: random.Random) -> Call:
    """A call that ends in an error: a name that does not exist, or a bracket that is not closed."""
    return Call(call.words, source.choice(("print(total)", f"({call.code}", "result")))


def _with_wrong_number(call: Call, source: random.Random) -> Call:
    numbers = list(re.finditer(r"(?<![\w.])\d+(?![\w.])", call.code))
    if not numbers:
        return call
    chosen = source.choice(numbers)
    wrong = str(max(1, int(chosen[0]) + source.choice((-2, -1, 1, 2, 10))))
    return Call(call.words, call.code[: chosen.start()] + wrong + call.code[chosen.end() :])


# --- solutions -----------------------------------------------------------------------------------------------------------------------


def solution(task: Task) -> tuple[list[Call], str]:
    """The calls that solve a task, and words that come before its answer."""
    snippets = task.payload.get("solution")
    if snippets:
        return [Call("", str(snippet)) for snippet in snippets], ""
    worked = task.payload.get("worked")
    if isinstance(worked, str) and "<<" in worked:
        return worked_solution(worked)
    formula = task.payload.get("formula")
    if isinstance(formula, str):
        return [Call("", _formula(formula, str(task.payload["answer"])))], ""
    raise NoDemonstration(f"task {task.id} carries no solution in Python, no worked answer with calculator marks and no formula")


def _formula(formula: str, answer: str) -> str:
    """A data set's formula as Python. ``NoDemonstration`` where it is no arithmetic or its value is not the number in ``answer``."""
    left = formula.partition("=")[0]
    gold = parse_quantity(normalize(answer))
    if gold is None:
        raise NoDemonstration(f"the answer {answer!r} is no number")
    return _calculation(f"{_without_points(left)}={gold.value}")[0]


def _without_points(formula: str) -> str:
    """``( 290.0 / 2.0 )`` as ``(290 / 2)``."""
    return re.sub(r"(?<=\d)\.0+(?!\d)", "", re.sub(r"\(\s+|\s+\)", lambda bracket: bracket[0].strip(), formula))


def worked_solution(worked: str) -> tuple[list[Call], str]:
    """Calls from a worked answer with calculator marks. ``NoDemonstration`` where a mark is no arithmetic or its result is wrong."""
    calls: list[Call] = []
    words = ""
    for line in worked.split("####")[0].strip().splitlines():
        position = 0
        for mark in _MARK.finditer(line):
            code, result = _calculation(mark[1])
            words += line[position : mark.start()]
            said = re.sub(r"\s*=?\s*[$€£]?\s*$", "", words).strip()
            calls.append(Call(said, code))
            position = mark.end()
            words = _result_in_words(line, position, result)
            position += len(words)
        words += line[position:] + "\n"
    if not calls:
        raise NoDemonstration("the worked answer has no calculation in it")
    return _merged(calls), words.strip()


def _result_in_words(line: str, position: int, result: str) -> str:
    """The marked result as the line repeats it after the mark ("24" in ``<<48/2=24>>24 clips``)."""
    match = re.compile(r"[$€£]?-?[\d,]*\.?\d+").match(line, position)
    return match[0] if match else result


def _calculation(mark: str) -> tuple[str, str]:
    """(Python, stated result) of a mark's content; the result must be what the Python gives."""
    left, _, result = mark.rpartition("=")
    code = re.sub(r"(?<=\d),(?=\d{3})", "", left).translate(_SIGNS)
    code = re.sub(r"(\d+(?:\.\d+)?|\.\d+)\s*%", r"(\1/100)", code).strip()
    code = re.sub(r"(?<![\d.])0+(?=\d)", "", code)
    stated = parse_quantity(normalize(result))
    value = _value(code)
    if value is None or stated is None or abs(value - stated.value) > Fraction(1, 100) * max(Fraction(1), abs(value)):
        raise NoDemonstration(f"the mark <<{mark}>> is no arithmetic with that result")
    return code, result.strip()


def _power(left: Fraction, right: Fraction) -> Fraction:
    if right.denominator != 1 or abs(right) > 20:
        raise ValueError("a power that is not small and whole")
    return left ** int(right)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Pow: _power,
}


def _value(code: str) -> Fraction | None:
    """The exact value of an expression of numbers and + - * / // and small powers; ``None`` for anything else."""

    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return Fraction(str(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            return -of(node.operand) if isinstance(node.op, ast.USub) else of(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError

    try:
        return of(ast.parse(code, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _merged(calls: list[Call]) -> list[Call]:
    """At most ``_CALLS`` calls: neighbours share one, with earlier results printed."""
    while len(calls) > _CALLS:
        pairs = range(len(calls) - 1)
        at = min(pairs, key=lambda i: len(calls[i].code) + len(calls[i + 1].code))
        first, second = calls[at], calls[at + 1]
        lines = first.code.splitlines()
        shown = [*lines[:-1], f"print({lines[-1]})"]
        words = "\n".join(part for part in (first.words, second.words) if part)
        calls = [*calls[:at], Call(words, "\n".join([*shown, second.code])), *calls[at + 2 :]]
    return calls
