"""A child process that compares answers with math-verify: one JSON request a line on stdin, one JSON reply on stdout.

Run by file path, so it imports nothing of the project. Symbolic algebra can take for ever and all memory there is, and
math-verify bounds itself with signals, which only work on a main thread: here is one, with a memory limit around it.
Seconds are of processor time, so that a busy machine gives the same verdicts as an idle one.
"""

from __future__ import annotations

import cmath
import contextlib
import importlib
import itertools
import json
import logging
import os
import random
import resource
import signal
import sys
import time
from typing import Any

MEMORY_BYTES = 2 * 1024**3


class OutOfTime(BaseException):
    """Raised by the alarm. Not an ``Exception``: sympy and math-verify swallow those in many places."""


def _alarm(signum: int, frame: object) -> None:
    raise OutOfTime


def plainly_different(gold: Any, answer: Any) -> bool:
    """Kinds that cannot be equal and on which symbolic comparison is slow or misled.

    A single expression against a range of numbers, several numbers, a matrix, or an equation that defines no name;
    definitions of two names of which neither is used by the other.
    """
    sympy = importlib.import_module("sympy")
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, sympy.Expr) and not isinstance(one, sympy.MatrixExpr):
            several = isinstance(other, (sympy.FiniteSet, sympy.Tuple)) and len(other.args) > 1
            equation = isinstance(other, sympy.Eq) and not is_name(other.lhs) and not is_name(other.rhs)
            if several or equation or isinstance(other, (sympy.Interval, sympy.Union, sympy.MatrixBase)):
                return True
    if not all(isinstance(side, sympy.Eq) and is_name(side.lhs) for side in (gold, answer)) or str(gold.lhs) == str(answer.lhs):
        return False
    used = [{symbol.name for symbol in side.rhs.free_symbols} for side in (answer, gold)]
    return not any({symbol.name for symbol in side.lhs.free_symbols} & names for side, names in zip((gold, answer), used, strict=True))


def is_name(left_side: Any) -> bool:
    """Whether the left side of an equation is a name, possibly of several letters or with arguments: ``y``, ``AB``, ``s(t)``."""
    parts = left_side.args if left_side.is_Mul or left_side.is_Function else (left_side,)
    return all(part.is_Symbol for part in parts)


def expressions(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    """The two sides to evaluate: expressions, or the right sides of ``y = ...`` where the names agree; else ``None``."""
    sympy = importlib.import_module("sympy")
    defines = [isinstance(side, sympy.Eq) and is_name(side.lhs) for side in (gold, answer)]
    if all(defines) and str(gold.lhs) != str(answer.lhs):
        return None
    sides = tuple(side.rhs if is_definition else side for side, is_definition in zip((gold, answer), defines, strict=True))
    return (sides[0], sides[1]) if all(isinstance(side, sympy.Expr) for side in sides) else None


def differences(gold: Any, answer: Any, points: int = 5) -> list[float]:
    """Relative differences of two expressions with variables, at random points (fixed by the variables' names) where both are finite."""
    pair = expressions(gold, answer)
    names = sorted({symbol.name for side in pair or () for symbol in side.free_symbols})
    found: list[float] = []
    if pair is None or not names:
        return found
    source = random.Random("|".join(names))
    for _ in range(points):
        values = {name: source.uniform(0.2, 1.9) for name in names}
        try:
            left, right = (complex(side.subs({symbol: values[symbol.name] for symbol in side.free_symbols}).evalf(15)) for side in pair)
        except Exception:
            continue
        if cmath.isfinite(left) and cmath.isfinite(right):
            found.append(abs(left - right) / max(abs(left), abs(right), 1e-9))
    return found


def probe(gold: Any, answer: Any, seconds: float) -> list[float]:
    """``differences``, or nothing where they take longer than ``seconds``. Clears the running alarm."""
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        return differences(gold, answer)
    except OutOfTime:
        return []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def read(text: str) -> list[Any]:
    """The expressions that math-verify finds in LaTeX without delimiters; nothing where it cannot parse it."""
    library = importlib.import_module("math_verify")
    latex = [library.LatexExtractionConfig(boxed_match_priority=0)]
    return [item for item in library.parse(f"${text}$", extraction_config=latex, parsing_timeout=None) if not isinstance(item, str)]


def compare(answer: str, gold: str, seconds: float) -> dict[str, Any]:
    """``{"equal": bool}``, or ``{"error": why}`` where no verdict was reached.

    Expressions with variables that clearly differ at random points are different: symbolic simplification, which can take
    for ever, is left to those that may be equal. Where it runs out of time, agreement at every point decides.
    """
    library = importlib.import_module("math_verify")
    deadline = time.process_time() + seconds
    signal.setitimer(signal.ITIMER_PROF, seconds)
    golds, answers = read(gold), read(answer)
    error = None
    for one_gold, one_answer in itertools.product(golds, answers):
        if plainly_different(one_gold, one_answer):
            continue
        found = probe(one_gold, one_answer, max(0.05, 0.3 * (deadline - time.process_time())))
        if sum(difference > 1e-3 for difference in found) >= 3:
            continue
        try:
            signal.setitimer(signal.ITIMER_PROF, max(0.05, deadline - time.process_time()))
            if library.verify(one_gold, one_answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True):
                return {"equal": True}
        except OutOfTime:
            if len(found) >= 4 and max(found) < 1e-9:
                return {"equal": True}
            error = f"no verdict within {seconds:g} s of processor time"
            break
        except (Exception, RecursionError) as failure:
            error = f"{type(failure).__name__} while comparing"
    return {"error": error} if error else {"equal": False}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    with contextlib.suppress(ImportError):
        importlib.import_module("math_verify")  # loaded before the first clock starts
    signal.signal(signal.SIGPROF, _alarm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reply: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = compare(request["answer"], request["gold"], request["seconds"])
        except OutOfTime:
            reply = {"error": f"no verdict within {request['seconds']:g} s of processor time"}
        except ImportError:
            reply = {"missing": "math-verify"}
        except (Exception, MemoryError, RecursionError) as failure:
            reply = {"error": f"{type(failure).__name__} while reading"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
