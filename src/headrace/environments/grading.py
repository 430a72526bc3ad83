"""Is this answer right? One extractor and one equivalence test, used wherever the project looks at an answer.

**Extraction** (``extract_answer``). The last complete ``\\boxed{...}`` counts, whatever stood in earlier ones; an empty last
box is no answer. Without any box: the last ``#### x`` line (GSM8K), else the last ``answer is x`` / ``Answer: x`` / ``A: x``.
There is no "last number in the text" fallback: it would pay for answers that were never given.

**Equivalence** (``equivalent``). Plain numbers, units, lists, tuples and words are decided here, exactly and at once; all else
goes to math-verify in a child process, so that it works on any thread, has a real time limit and cannot take the caller's
memory. docs/grading.md states every rule and its agreement with real data.

**No verdict is not a wrong answer.** Where no verdict is reached (time, memory, a crash) ``GradingError`` is raised.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import re
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from headrace.environments._answer_text import (
    Collection,
    is_words,
    normalize,
    parse_collection,
    parse_quantity,
    quantities_equal,
    squeeze,
    value_of_statement,
    well_formed,
    words_key,
)
from headrace.environments._daemon_threads import DaemonThreads
from headrace.environments._line_process import ChildDied, ChildTooSlow, LineProcess
from headrace.environments.optional import MissingPackage

DEFAULT_SECONDS = 5.0
MAX_SYMBOLIC_CHARACTERS = 4_000  # longer answers are compared as text only
_STARTUP_SECONDS = 60.0  # a new child imports sympy first
_CLOCK_FACTOR = 4.0  # a child that has not answered after this many times its processor seconds, plus the grace, is killed
_GRACE_SECONDS = 2.0
_QUEUE_SECONDS = 120.0


class GradingError(Exception):
    """No verdict: the grader ran out of time or memory, or crashed. The answer is unscored, not wrong."""


# --- extraction ----------------------------------------------------------------------------------------------------------

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]|\\(?:boxed|fbox)\s+(?P<bare>[^\s{}$\\]+)")
_LONGEST_PHRASE = 500
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_ANSWER_START = re.compile(r"\banswer\b(?:[^\n.:=,]{0,60}?\b(?:is|are|should be|must be|equals)\b\s*:?|\**\s*[:=])", re.IGNORECASE)
_ANSWER_LINE = re.compile(r"^[ \t]*A:[ \t]*(?P<answer>\S[^\n]*)$", re.MULTILINE)


def _last_box(text: str) -> str | None:
    """Content of the complete box that starts last, in one pass; ``None`` if there is none."""
    last: tuple[int, str] | None = None
    open_braces: list[tuple[int, int, bool]] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match[0]
        if match["bare"] is not None:
            last = max(last or (-1, ""), (match.start(), match["bare"]))
        elif token.endswith("{") and token != r"\{":
            open_braces.append((match.start(), match.end(), len(token) > 1))
        elif token == "}" and open_braces:
            start, content, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, text[content : match.start()])
    return None if last is None else last[1]


def _trim_sentence(answer: str) -> str:
    """The answer without the sentence around it: text after a full stop, bold marks, a closing full stop."""
    answer = re.split(r"\.\s+(?=[A-Z])|\.\s*$", answer.strip(), maxsplit=1)[0]
    return answer.strip().strip("*").strip()


def extract_answer(text: str) -> str | None:
    """The final answer in a text, or ``None``. See the module's docstring for the order of what counts."""
    box = _last_box(text)
    if box is not None:
        return box.strip() or None
    hashes = _HASHES.findall(text)
    if hashes:
        return _trim_sentence(hashes[-1]) or None
    starts = [match.end() for match in _ANSWER_START.finditer(text)] + [match.start("answer") for match in _ANSWER_LINE.finditer(text)]
    for start in sorted(starts, reverse=True):
        trimmed = _trim_sentence(text[start : start + _LONGEST_PHRASE].split("\n", 1)[0])
        if trimmed:
            return trimmed
    return None


# --- the symbolic grader -----------------------------------------------------------------------------------------------------


class SymbolicGrader:
    """A few child processes that run math-verify; safe to call from any number of threads."""

    def __init__(self, workers: int = 2) -> None:
        self._slots: queue.LifoQueue[LineProcess | None] = queue.LifoQueue()
        for _ in range(workers):
            self._slots.put(None)
        self.owner = os.getpid()

    def compare(self, answer: str, gold: str, seconds: float) -> bool:
        try:
            child = self._slots.get(timeout=_QUEUE_SECONDS)
        except queue.Empty:
            raise GradingError(f"no grader process became free within {_QUEUE_SECONDS:g} s") from None
        fresh = child is None or not child.alive()
        try:
            if child is None or fresh:
                child = LineProcess([sys.executable, "-I", str(Path(__file__).with_name("_grading_worker.py"))])
            allowance = _CLOCK_FACTOR * seconds + _GRACE_SECONDS + (_STARTUP_SECONDS if fresh else 0.0)
            reply = child.request({"answer": answer, "gold": gold, "seconds": seconds}, allowance)
        except ChildTooSlow:
            child = None
            raise GradingError(f"no verdict within {allowance:g} s; the grader process was killed") from None
        except ChildDied as error:
            child = None
            raise GradingError(f"the grader process died: {error}") from None
        finally:
            self._slots.put(child)
        if "equal" in reply:
            return bool(reply["equal"])
        if "missing" in reply:
            raise MissingPackage(_MISSING)
        raise GradingError(str(reply["error"]))

    def close(self) -> None:
        """Kill the idle children. Later calls start new ones."""
        for _ in range(self._slots.qsize()):
            try:
                child = self._slots.get_nowait()
            except queue.Empty:
                return
            if child is not None:
                child.kill()
            self._slots.put(None)


_MISSING = "Comparing answers beyond plain numbers needs math-verify: install it with `pip install 'headrace[math]'`."
_lock = threading.Lock()
_shared: SymbolicGrader | None = None


def shared_grader() -> SymbolicGrader:
    """The grader of this process, made on first use (again after a fork: a parent's pipes cannot be shared)."""
    global _shared
    with _lock:
        if _shared is None or _shared.owner != os.getpid():
            _shared = SymbolicGrader()
            atexit.register(_shared.close)
        return _shared


def require_symbolic() -> None:
    """Raise a clear ``MissingPackage`` if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise MissingPackage(_MISSING)


# --- equivalence ---------------------------------------------------------------------------------------------------------------

Symbolic = Callable[[str, str], bool]
_ASSIGNMENT = re.compile(r"(?P<name>\\?[A-Za-z][A-Za-z_]{0,2}(?:_\{?\w+\}?)?(?:\([a-z]\))?)\s*=(?!=)\s*(?P<value>[^=<>]+)")


def _without_name(text: str, other: str) -> str:
    """``5`` for ``x = 5`` where the other side names nothing or the same; else unchanged."""
    mine, theirs = _ASSIGNMENT.fullmatch(text), _ASSIGNMENT.fullmatch(other)
    if mine is None or (theirs is not None and theirs["name"] != mine["name"]) or (theirs is None and "=" in other):
        return text
    return mine["value"].strip()


def _collections_equal(answer: Collection, gold: Collection, symbolic: Symbolic) -> bool:
    """Order and brackets as the gold has them; a bare list may stand for an ordered tuple, and lists and sets have no order."""
    if len(answer.parts) != len(gold.parts):
        return False
    if answer.ordered and gold.ordered:
        interval_like = len(gold.parts) == 2
        if interval_like and (answer.opening, answer.closing) != (gold.opening, gold.closing):
            return False
    if gold.ordered:
        return answer.opening != "{" and all(_same(a, g, symbolic) for a, g in zip(answer.parts, gold.parts, strict=True))
    if answer.ordered and gold.opening == "{":
        return False
    left = list(gold.parts)
    for part in answer.parts:
        found = next((index for index, candidate in enumerate(left) if _same(part, candidate, symbolic)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same(answer: str, gold: str, symbolic: Symbolic) -> bool:
    answer, gold = normalize(answer), normalize(gold)
    if squeeze(answer) == squeeze(gold):
        return bool(gold)
    answer, gold = value_of_statement(answer), value_of_statement(gold)
    answer, gold = _without_name(answer, gold), _without_name(gold, answer)
    quantities = parse_quantity(answer), parse_quantity(gold)
    if quantities[0] is not None and quantities[1] is not None:
        return quantities_equal(quantities[0], quantities[1])
    if is_words(answer) or is_words(gold):
        return words_key(answer) == words_key(gold)
    collections = parse_collection(answer), parse_collection(gold)
    if collections[0] is not None and collections[1] is not None:
        return _collections_equal(collections[0], collections[1], symbolic)
    if any(one is not None and not one.opening for one in collections):
        return False  # several answers against one
    if not answer or not gold or max(len(answer), len(gold)) > MAX_SYMBOLIC_CHARACTERS or not (well_formed(answer) and well_formed(gold)):
        return False
    return symbolic(answer, gold)


@lru_cache(maxsize=8192)
def _cached(answer: str, gold: str, seconds: float) -> bool:
    return _same(answer, gold, lambda left, right: shared_grader().compare(left, right, seconds))


def equivalent(answer: str | None, gold: str, *, seconds: float = DEFAULT_SECONDS) -> bool:
    """Whether ``answer`` and ``gold`` are the same answer. ``None`` (no answer was found) is never right.

    Works on any thread. ``seconds`` bounds each symbolic comparison in processor time, and four times that (plus 2 s) on the
    clock, whatever the machine's load. Raises ``GradingError`` where no verdict is reached
    and ``MissingPackage`` where math-verify is needed and absent.
    """
    return answer is not None and _cached(answer, gold, float(seconds))


_threads = DaemonThreads(4, "headrace-grading")


async def equivalent_async(answer: str | None, gold: str, *, seconds: float = DEFAULT_SECONDS) -> bool:
    """``equivalent`` without blocking the event loop, on threads of its own."""
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: equivalent(answer, gold, seconds=seconds))


def is_gradable(gold: str) -> bool:
    """Whether a gold answer can be compared: a number, a list, mathematics or a few words, but not a paragraph of prose."""
    text = normalize(gold)
    if not text:
        return False
    return parse_quantity(text) is not None or not is_words(text) or (len(text.split()) <= 4 and "$" not in text)
