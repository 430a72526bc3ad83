"""The math world's options in a configuration: where problems come from and how they are played."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from headrace.environments.base import Task

if TYPE_CHECKING:
    from headrace.environments.math_tool import MathToolEnvironment


@dataclass(frozen=True, slots=True)
class MathOptions:
    """``[environment.options]`` of the math world.

    ``source`` to ``sets``: see ``math_problems.tasks``. ``texts``: "full", or "terse" for policies trained from nothing.
    ``require_box``: without it the stated fallbacks count as an answer too. ``python``: how the tool runs code (see
    ``python_sandbox``), within ``tool_seconds``, ``tool_memory_mb`` and ``output_chars``. ``grading_seconds``: processor
    time of one symbolic comparison. ``slip``: how often scripted solutions show a weakness.
    """

    source: str = "offline"
    levels: Sequence[int] = (1, 2, 3)
    seed: int = 0
    path: str = ""
    hub: str = ""
    hub_config: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    splits: Sequence[str] | None = None
    subset: int | None = None
    sets: Sequence[str] = ("chain_sum", "gcd", "gsm_symbolic")
    max_turns: int = 8
    texts: Literal["full", "terse"] = "full"
    require_box: bool = True
    python: Literal["monty", "cpython"] = "monty"
    tool_seconds: float = 5.0
    tool_memory_mb: int | None = None
    output_chars: int = 2_000
    grading_seconds: float = 5.0
    slip: float = 0.05

    def __post_init__(self) -> None:
        from headrace.environments.math_problems import LEVELS, OWN_SPLITS, SOURCES

        self._check_types()
        _one_of("source", self.source, SOURCES)
        _one_of("texts", self.texts, ("full", "terse"))
        _one_of("python", self.python, ("monty", "cpython"))
        if not self.levels or any(level not in LEVELS for level in self.levels):
            raise ValueError(f"environment.options.levels must be some of {list(LEVELS)}, not {list(self.levels)}")
        if any(split not in OWN_SPLITS for split in self.splits or ()):
            raise ValueError(f"environment.options.splits must be some of {list(OWN_SPLITS)}, not {list(self.splits or ())}")
        for name in ("max_turns", "tool_seconds", "tool_memory_mb", "output_chars", "grading_seconds", "subset"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"environment.options.{name} must be above 0, not {value!r}")
        if not 0 <= self.slip < 1:
            raise ValueError(f"environment.options.slip is a probability below 1, not {self.slip!r}")

    def _check_types(self) -> None:
        """A configuration holds anything: a text where a list belongs would be taken letter by letter."""
        for name, (wanted, fits) in _TYPES.items():
            value = getattr(self, name)
            if not fits(value) and not (value is None and name in _MAY_BE_NONE):
                raise ValueError(f"environment.options.{name} must be {wanted}, not {value!r}")

    def tasks(self, split: str, count: int) -> list[Task]:
        from headrace.environments import math_problems

        return math_problems.tasks(
            split,
            count,
            source=self.source,
            levels=self.levels,
            seed=self.seed,
            path=self.path,
            hub=self.hub,
            hub_config=self.hub_config,
            columns=self.columns,
            splits=self.splits,
            subset=self.subset,
            sets=self.sets,
        )

    def environment(self) -> MathToolEnvironment:
        """``ValueError`` where the Python tool cannot run on this machine."""
        from headrace.environments.math_tool import FULL, TERSE, MathToolEnvironment
        from headrace.environments.python_sandbox import PythonSandbox

        sandbox = PythonSandbox(
            self.python, seconds=self.tool_seconds, memory_mb=self.tool_memory_mb, output_chars=self.output_chars, seed=self.seed
        )
        texts = TERSE if self.texts == "terse" else FULL
        return MathToolEnvironment(
            sandbox, max_turns=self.max_turns, texts=texts, require_box=self.require_box, grading_seconds=self.grading_seconds
        )

    def demonstration(self, task: Task, seed: int) -> list[tuple[str, str]]:
        """A scripted solution as (what was seen, what was done) pairs, if it ends in the right answer; else an empty list."""
        from headrace.environments.math_demonstrations import NoDemonstration, attempt

        world = self.environment()
        try:
            tried = attempt(task, seed, slip=self.slip, environment=world)
        except NoDemonstration:
            return []
        finally:
            world.close_now()
        return tried.exchanges() if tried.success else []

    def read_answer(self, reply: str) -> str | None:
        """The answer that a reply ends an episode with, as the environment reads it."""
        from headrace.environments.math_tool import read_reply

        return read_reply(reply, require_box=self.require_box).answer

    def same_answer(self, one: str, other: str) -> bool:
        """Whether two answers count as one in a vote; answers that could not be compared do not."""
        from headrace.environments.grading import GradingError, equivalent
        from headrace.environments.optional import MissingPackage

        try:
            return equivalent(one, other, seconds=self.grading_seconds)
        except (GradingError, MissingPackage):
            return False


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _text(value: object) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(fits, value))


_MAY_BE_NONE = ("hub_config", "splits", "subset", "tool_memory_mb")
_TYPES: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "levels": ("a list of whole numbers", _list_of(_whole)),
    "columns": ("a table", lambda value: isinstance(value, Mapping)),
    "require_box": ("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("splits", "sets"), ("a list of texts", _list_of(_text))),
    **dict.fromkeys(("source", "path", "hub", "hub_config"), ("text", _text)),
    **dict.fromkeys(("seed", "subset", "max_turns", "tool_memory_mb", "output_chars"), ("a whole number", _whole)),
    **dict.fromkeys(("tool_seconds", "grading_seconds", "slip"), ("a number", _number)),
}


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"environment.options.{name} must be one of {', '.join(known)}, not {value!r}")
