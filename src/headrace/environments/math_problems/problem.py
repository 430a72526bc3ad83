"""A problem with its gold answer, and how it becomes a task: stable ids, disjoint splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.environments.base import Task

SPLITS = ("train", "warmup", "test")
_SHARES = {"train": 0.8, "warmup": 0.1, "test": 0.1}  # of problems that come without splits of their own


@dataclass(frozen=True, slots=True)
class Problem:
    """``solution``: Python snippets, each for one tool call, the last of which shows the answer. ``worked``: a solution in words.
    ``formula``: arithmetic that gives the answer."""

    question: str
    answer: str
    level: int | None = None
    id: str | None = None
    solution: tuple[str, ...] = ()
    worked: str | None = None
    formula: str | None = None

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of the question's text, spacing aside: the same problem is the same wherever it is read from."""
        return hashlib.sha256(" ".join(self.question.split()).encode()).hexdigest()[:12]

    def task(self, source: str) -> Task:
        payload: dict[str, Any] = {"question": self.question, "answer": self.answer}
        if self.solution:
            payload["solution"] = list(self.solution)
        if self.worked:
            payload["worked"] = self.worked
        if self.formula:
            payload["formula"] = self.formula
        kind = source if self.level is None else f"{source}-{self.level}"
        return Task(f"{source}/{self.id or self.digest}", kind, payload)


def split_of(digest: str, shares: Mapping[str, float] = _SHARES) -> str:
    """The split that a problem belongs to, from its digest alone: it never depends on how many problems are asked for."""
    position, edge = int(digest, 16) / 16 ** len(digest), 0.0
    for split, share in shares.items():
        edge += share
        if position < edge:
            return split
    return list(shares)[-1]


def rank(digest: str, seed: int) -> str:
    """A sort key that shuffles problems by ``seed``, so that a smaller subset is contained in every larger one."""
    return hashlib.sha256(f"{seed} {digest}".encode()).hexdigest()


def check_split(split: str) -> str:
    """``split``, with "unseen" as another name of "test"; ``ValueError`` for an unknown one."""
    split = "test" if split == "unseen" else split
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; math problems have {', '.join(SPLITS)} (and unseen, which is test)")
    return split
