"""Where problems come from: generators that need no download, public data sets, and any set or file of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from headrace.environments.base import Task
from headrace.environments.math_problems.datasets import NAMED, ProblemSet
from headrace.environments.math_problems.generated import SINGLE_ANSWER, generated, reasoning_gym
from headrace.environments.math_problems.generators import GENERATORS, LEVELS
from headrace.environments.math_problems.problem import SPLITS, Problem, check_split
from headrace.environments.math_problems.rows import Columns

__all__ = ["GENERATORS", "LEVELS", "NAMED", "OWN_SPLITS", "SINGLE_ANSWER", "SOURCES", "SPLITS", "Columns", "Problem", "ProblemSet", "tasks"]

SOURCES = ("offline", *GENERATORS, *NAMED, "hub", "file", "reasoning-gym")
"""``offline`` is all generators in turn; ``hub`` any Hugging Face set; ``file`` a local JSON Lines or Parquet file."""

OWN_SPLITS = ("train", "test")
"""The splits that data may come with; what else there is, is cut from its training split."""


def tasks(
    split: str,
    count: int,
    *,
    source: str = "offline",
    levels: Sequence[int] = (1, 2, 3),
    seed: int = 0,
    path: str = "",
    hub: str = "",
    hub_config: str | None = None,
    columns: Mapping[str, str] | None = None,
    splits: Sequence[str] | None = None,
    subset: int | None = None,
    sets: Sequence[str] = ("chain_sum", "gcd", "gsm_symbolic"),
) -> list[Task]:
    """The first ``count`` tasks of a split: ``train``, ``warmup`` or ``test`` (also called ``unseen``), always the same.

    The splits share no question. ``levels`` is for generators. ``path``, ``hub``, ``hub_config``, ``columns`` (see
    ``Columns``), ``splits`` (those the data has itself) and ``subset`` are for data sets; for a named set they replace what
    is built in, so that ``source="gsm8k", path="folder"`` reads a local copy. ``sets`` are reasoning-gym's.
    A data set may give fewer than ``count``; a generator that cannot give ``count`` different problems raises ``ValueError``.
    """
    split = check_split(split)
    if source == "offline" or source in GENERATORS:
        return generated(tuple(GENERATORS) if source == "offline" else (source,), tuple(levels), split, count, seed)
    if source == "reasoning-gym":
        return reasoning_gym(tuple(sets), split, count, seed)
    chosen = _problem_set(source, path, hub, hub_config, tuple(sorted((columns or {}).items())), tuple(splits or ()), subset)
    found = chosen.tasks(split, count, seed)
    if not found:
        raise ValueError(f"{source}: split {split!r} holds no problem")
    return found


@lru_cache(maxsize=8)
def _problem_set(
    source: str,
    path: str,
    hub: str,
    hub_config: str | None,
    columns: tuple[tuple[str, str], ...],
    splits: tuple[str, ...],
    subset: int | None,
) -> ProblemSet:
    if source in NAMED:
        base = NAMED[source]
    elif source == "hub" and hub:
        base = ProblemSet(hub.rpartition("/")[2], Columns())
    elif source == "file" and path:
        base = ProblemSet("file", Columns())
    elif source in ("hub", "file"):
        raise ValueError(f'environment.options.source = "{source}" needs environment.options.{"hub" if source == "hub" else "path"}')
    else:
        raise ValueError(f"unknown source of problems {source!r}; known: {', '.join(SOURCES)}")
    return replace(
        base,
        columns=Columns.of(dict(columns), base.columns),
        hub=hub or base.hub,
        hub_config=hub_config if hub_config is not None else base.hub_config,
        path=path,
        splits=splits or (_splits_of(path) if path and source == "file" else base.splits),
        subset=subset if subset is not None else base.subset,
        seen={},
    )


def _splits_of(path: str) -> tuple[str, ...]:
    """Whether local data comes with a test file of its own."""
    test = Path(path.replace("{split}", "test")).expanduser()
    in_folder = any((test / f"test{suffix}").is_file() for suffix in (".jsonl", ".parquet"))
    return ("train", "test") if in_folder or ("{split}" in path and test.is_file()) else ("train",)
