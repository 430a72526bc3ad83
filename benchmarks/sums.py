"""Adding six numbers step by step, for ``whole_step.py``: one prompt, one reply, one rule for its reward, in both trainers' forms.

To "017+025+038+041+100+002=" the right reply begins "017+025=042 042+038=080 080+041=121" and goes on so. Numbers keep three
digits, so prompts are equally long, and so are replies in this form. The outcome is the share of the right reply's
characters that stand in their place, so that every reply earns something and groups have a spread; one that was cut off gets 0.

``world`` is Headrace's form (``benchmarks/sums.py:world`` in a configuration); ``rows`` and ``outcome`` are TRL's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from headrace.environments.base import Step, Task, ToolSpec
from headrace.environments.worlds import Exchange, World

TERMS, LARGEST = 6, 166


def question(terms: Sequence[int]) -> str:
    return "+".join(f"{term:03}" for term in terms) + "="


def steps(terms: Sequence[int]) -> list[str]:
    total, found = terms[0], []
    for term in terms[1:]:
        found.append(f"{total:03}+{term:03}={total + term:03}")
        total += term
    return found


def outcome(terms: Sequence[int], reply: str) -> float:
    """The share of the right reply's characters that stand in their place."""
    right = " ".join(steps(terms))
    return sum(one == other for one, other in zip(right, reply.strip(), strict=False)) / len(right)


def tasks(split: str, count: int) -> list[Task]:
    if split not in ("train", "warmup"):
        raise ValueError(f"unknown split {split!r}; this world has train, warmup")
    source = random.Random(split)
    terms = [[source.randint(1, LARGEST) for _ in range(TERMS)] for _ in range(count)]
    return [Task(f"{split}-{number}", "sum", {"terms": those}) for number, those in enumerate(terms)]


def rows(count: int) -> list[dict[str, Any]]:
    """The training tasks as rows of a data set of TRL's."""
    found = [task.payload["terms"] for task in tasks("train", count)]
    return [{"prompt": [{"role": "user", "content": question(terms)}], "terms": terms} for terms in found]


class Sums:
    """One attempt: the world's whole say is the question and, at the reply, its outcome."""

    system: str | None = None
    tools: Sequence[ToolSpec] = ()

    async def reset(self, task: Task) -> str:
        self._terms: list[int] = task.payload["terms"]
        return question(self._terms)

    async def step(self, action: str) -> Step:
        reached = outcome(self._terms, action)
        return Step("", done=True, success=reached == 1, reason="success" if reached == 1 else "failure", outcome=reached)

    async def close(self) -> None: ...


def demonstrate(task: Task, seed: int) -> list[Exchange]:
    """The right reply."""
    terms = task.payload["terms"]
    return [(question(terms), " ".join(steps(terms)))]


def world() -> World:
    return World(tasks, Sums, demonstrate)
