"""Problems made here, in five levels of difficulty, each with a solution in Python.

A generator draws one problem from a random source. Gold answers are computed beside the solution, not by running it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from headrace.environments.math_problems.problem import Problem

LEVELS = (1, 2, 3, 4, 5)
Generator = Callable[[random.Random, int], Problem]


# --- arithmetic chains ------------------------------------------------------------------------------------------------------


def arithmetic(source: random.Random, level: int) -> Problem:
    """``level`` operations, longer numbers and brackets with the level: ``Compute (37 - 4) * 6 + 125.``"""
    text, value, loosest = _number(source, level)
    for _ in range(level):
        text, value, loosest = _extend(source, level, text, value, loosest)
    return Problem(f"Compute {text}.", str(value), level, solution=(text,))


def _number(source: random.Random, level: int) -> tuple[str, int, int]:
    number = source.randint(2, (99, 99, 99, 200, 999)[level - 1])
    return str(number), number, 3


def _extend(source: random.Random, level: int, text: str, value: int, loosest: int) -> tuple[str, int, int]:
    """Append one operation. ``loosest`` is the loosest binding in ``text``: 1 sum, 2 product, 3 a number."""
    right, number, _ = _number(source, level)
    operator = source.choice("+-" if level == 1 else "+-*")
    if level >= 4 and source.random() < 0.3:
        divisors = [d for d in range(2, 13) if value % d == 0 and value != 0]
        if divisors:
            number = source.choice(divisors)
            right, operator = str(number), "//"
    left = f"({text})" if operator in ("*", "//") and loosest == 1 else text
    results = {"+": value + number, "-": value - number, "*": value * number, "//": value // number}
    return f"{left} {operator} {right}", results[operator], 1 if operator in "+-" else 2


# --- word problems ------------------------------------------------------------------------------------------------------------

_PEOPLE = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatma", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lena")
_THINGS = ("apples", "marbles", "stamps", "coins", "books", "shells", "cards", "pencils", "buttons", "beads")


def word_problem(source: random.Random, level: int) -> Problem:
    """A story of ``level`` changes to a number of things; from level 3 on the solution takes two calls."""
    person, thing = source.choice(_PEOPLE), source.choice(_THINGS)
    start = source.randint(3, 12 * level)
    sentences, value = [f"{person} has {start} {thing}."], start
    steps: list[str] = []
    for _ in range(level):
        sentence, value, step = _event(source, level, person, thing, value)
        sentences.append(sentence)
        steps.append(step)
    question = " ".join([*sentences, f"How many {thing} does {person} have now?"])
    return Problem(question, str(value), level, solution=_two_calls(str(start), steps))


def _event(source: random.Random, level: int, person: str, thing: str, value: int) -> tuple[str, int, str]:
    """A sentence, the number after it, and the step as Python with ``{}`` for the number before it."""
    number, few = source.randint(2, 10 * level), source.randint(2, 5)
    other = source.choice([name for name in _PEOPLE if name != person])
    events = [(f"{other} gives {person} {number} more.", value + number, f"{{}} + {number}")]
    if value > number:
        events.append((f"{person} gives {number} of them to {other}.", value - number, f"{{}} - {number}"))
    if level >= 2:
        events.append((f"Then {person} buys {few} boxes of {number} {thing} each.", value + few * number, f"{{}} + {few} * {number}"))
        if value <= 200:
            times = ("twice", "three times", "four times", "five times")[few - 2]
            events.append((f"A week later {person} has {times} as many.", value * few, f"({{}}) * {few}"))
    if level >= 3 and value % few == 0:
        sentence = f"{person} shares all of them equally among {few} people, {person} being one of them, and keeps one share."
        events.append((sentence, value // few, f"({{}}) // {few}"))
    return source.choice(events)


def _two_calls(start: str, steps: list[str]) -> tuple[str, ...]:
    if len(steps) < 3:
        return (_nested(start, steps),)
    middle = len(steps) // 2
    return (f"x = {_nested(start, steps[:middle])}\nx", _nested("x", steps[middle:]))


def _nested(start: str, steps: list[str]) -> str:
    text = start
    for step in steps:
        text = step.format(text)
    return text.replace(f"({start})", start)


# --- number theory ---------------------------------------------------------------------------------------------------------------


def number_theory(source: random.Random, level: int) -> Problem:
    """Remainders, divisors, digits, primes and congruences; what is asked gets harder with the level."""
    return source.choice(_NUMBER_THEORY[level - 1])(source, level)


def _remainder(source: random.Random, level: int) -> Problem:
    a, b = source.randint(20, 999), source.randint(3, 19)
    return Problem(f"What is the remainder when {a} is divided by {b}?", str(a % b), level, solution=(f"{a} % {b}",))


def _greatest_divisor(source: random.Random, level: int) -> Problem:
    common = source.randint(2, 30)
    a, b = common * source.randint(2, 40), common * source.randint(2, 40)
    question = f"What is the greatest common divisor of {a} and {b}?"
    return Problem(question, str(math.gcd(a, b)), level, solution=(f"import math\nmath.gcd({a}, {b})",))


def _least_multiple(source: random.Random, level: int) -> Problem:
    a, b = source.randint(4, 60), source.randint(4, 60)
    question = f"What is the least common multiple of {a} and {b}?"
    return Problem(question, str(a * b // math.gcd(a, b)), level, solution=(f"import math\nmath.lcm({a}, {b})",))


def _divisors(source: random.Random, level: int) -> Problem:
    n = source.randint(60, 2_000)
    gold = sum(2 if d * d < n else 1 for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    question = f"How many positive divisors does {n} have?"
    return Problem(question, str(gold), level, solution=(f"len([d for d in range(1, {n + 1}) if {n} % d == 0])",))


def _digit_sum(source: random.Random, level: int) -> Problem:
    a, b = source.randint(3, 40), source.randint(5, 25)
    number, gold = a**b, 0
    while number:
        number, digit = divmod(number, 10)
        gold += digit
    question = f"What is the sum of the digits of {a}^{b}?"
    return Problem(question, str(gold), level, solution=(f"sum(int(d) for d in str({a} ** {b}))",))


def _power(source: random.Random, level: int) -> Problem:
    a, b, m = source.randint(3, 99), source.randint(20, 2_000), source.randint(11, 199)
    gold = 1
    for _ in range(b):
        gold = gold * a % m
    question = f"What is the remainder when {a}^{b} is divided by {m}?"
    return Problem(question, str(gold), level, solution=(f"pow({a}, {b}, {m})",))


def _primes(source: random.Random, level: int) -> Problem:
    low = source.randint(2, 500)
    high = low + source.randint(30, 300)
    gold = sum(all(n % d for d in range(2, math.isqrt(n) + 1)) for n in range(low, high + 1))
    question = f"How many prime numbers are there from {low} to {high}, both included?"
    check = f"def prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))\nprime({low})"
    return Problem(question, str(gold), level, solution=(check, f"sum(prime(n) for n in range({low}, {high + 1}))"))


def _congruences(source: random.Random, level: int) -> Problem:
    m, n = source.sample((7, 8, 9, 11, 13, 17, 19, 23, 25), 2)
    gold = source.randint(1, m * n - 1)
    a, b = gold % m, gold % n
    conditions = f"remainder {a} when divided by {m} and remainder {b} when divided by {n}"
    question = f"What is the smallest positive integer that leaves {conditions}?"
    return Problem(question, str(gold), level, solution=(f"[x for x in range(1, {m * n}) if x % {m} == {a} and x % {n} == {b}][0]",))


def _inverse(source: random.Random, level: int) -> Problem:
    m = source.choice((31, 41, 53, 67, 79, 97, 101, 113))
    gold = source.randint(2, m - 2)
    a = pow(gold, -1, m)
    question = f"What is the integer x with 0 < x < {m} for which {a}x leaves remainder 1 when divided by {m}?"
    return Problem(question, str(gold), level, solution=(f"[x for x in range(1, {m}) if {a} * x % {m} == 1][0]",))


_NUMBER_THEORY: tuple[tuple[Generator, ...], ...] = (
    (_remainder,),
    (_greatest_divisor, _least_multiple),
    (_divisors, _digit_sum),
    (_power, _primes),
    (_congruences, _inverse),
)

GENERATORS: Mapping[str, Generator] = {"arithmetic": arithmetic, "word-problems": word_problem, "number-theory": number_theory}
