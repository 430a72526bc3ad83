"""Rows of any data set -> problems, by a small mapping; and reading them from local JSON Lines and Parquet files."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headrace.environments.grading import extract_answer
from headrace.environments.math_problems.problem import Problem
from headrace.environments.optional import MissingPackage

Row = Mapping[str, Any]
PLACE = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a row keeps what a problem needs.

    A place is a dotted path (``reward_model.ground_truth``, ``prompt.0.content``); ``question`` may also join several:
    ``{Body} {Question}``. ``worked`` is a solution in words that holds the answer: with ``answer`` empty the gold is taken
    from it by the grader's own extractor. ``formula`` is arithmetic that gives the answer (``(61-13)*2``, with or without
    ``= 96``): scripted solutions run it. ``id`` empty: the id is made from the question's text. ``before`` and ``after``
    are fixed words around every question, which are removed.
    """

    question: str = "question"
    answer: str = "answer"
    worked: str = ""
    formula: str = ""
    level: str = ""
    id: str = ""
    before: str = ""
    after: str = ""

    @classmethod
    def of(cls, mapping: Mapping[str, str], base: Columns | None = None) -> Columns:
        """``base`` (or the defaults) with the entries of a configuration's table; ``ValueError`` for an unknown entry."""
        known = [field.name for field in fields(cls)]
        for name, value in mapping.items():
            if name not in known:
                raise ValueError(f"environment.options.columns has no {name!r}; it has {', '.join(known)}")
            if not isinstance(value, str):
                raise ValueError(f"environment.options.columns.{name} must be text, not {value!r}")
        return replace(base or cls(), **mapping)


def problem_of(row: Row, columns: Columns, where: str) -> Problem:
    """One row as a problem; ``ValueError`` that names the row and the column where something is missing."""
    question = _text(row, columns.question, where).strip()
    question = question.removeprefix(columns.before).removesuffix(columns.after).strip()
    worked = _text(row, columns.worked, where) if columns.worked else None
    answer = _plain(_find(row, columns.answer, where)) if columns.answer else extract_answer(worked or "")
    if not question or not answer:
        raise ValueError(f"{where}: no {'question' if not question else 'answer'} in it")
    name = _find(row, columns.id, where) if columns.id else None
    return Problem(
        question,
        answer,
        _level(_find(row, columns.level, where), where) if columns.level else None,
        None if name is None else str(name),
        worked=worked,
        formula=_text(row, columns.formula, where) if columns.formula else None,
    )


def _level(value: Any, where: str) -> int | None:
    try:
        return None if value is None else round(float(value))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: the level {value!r} is no number") from None


def _text(row: Row, place: str, where: str) -> str:
    if PLACE.search(place):
        return PLACE.sub(lambda match: _plain(_find(row, match[1], where)), place)
    return _plain(_find(row, place, where))


def _find(row: Any, place: str, where: str) -> Any:
    value = row
    for part in place.split("."):
        try:
            value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            has = f"; it has {', '.join(map(str, row))}" if isinstance(row, Mapping) else ""
            raise ValueError(f"{where}: no column {place!r}{has}. Set environment.options.columns.") from None
    return value


def _plain(value: Any) -> str:
    """Text of a cell: 145.0 is written 145, and an empty cell is no text."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else str(value)


def read_file(path: Path) -> Iterator[Row]:
    """The rows of one ``.jsonl`` or ``.parquet`` file."""
    if not path.is_file():
        raise ValueError(f"environment.options.path: there is no file {path}")
    if path.suffix == ".jsonl":
        yield from _json_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise ValueError(f"environment.options.path: {path} is neither .jsonl nor .parquet")


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_line(line, f"{path}, line {number}")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingPackage("Reading Parquet needs the package pyarrow: install it with `pip install pyarrow`.") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=4096):
            yield from batch.to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} could not be read as Parquet ({error})") from None


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object")
    return row
