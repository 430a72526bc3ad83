"""Grading against real data: recorded verdicts on model outputs, and public golds in rewritten forms."""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.environments._answer_text import normalize, parse_quantity
from headrace.environments.grading import equivalent, extract_answer

DATA = Path(os.environ.get("HEADRACE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
GOLD_FIELDS = {"amc23": "answer", "asdiv": "answer", "college_math": "answer", "mawps_singleop": "target", "svamp": "Answer"}


def rows(path: str) -> list[dict[str, Any]]:
    file = DATA / path
    if not file.is_file():
        pytest.skip(f"no shared data at {file}; set HEADRACE_DATA")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def golds() -> list[str]:
    found = {str(row[field]) for name, field in GOLD_FIELDS.items() for row in rows(f"math_eval/{name}.jsonl")}
    return sorted(found)


def forms(gold: str) -> Iterator[str]:
    yield gold
    yield rf"\boxed{{{gold}}}"
    yield f"  {gold} . "
    yield gold.replace(r"\frac", r"\dfrac")
    quantity = parse_quantity(normalize(gold))
    if quantity is None:
        return
    percent, value = "%" if quantity.percent else "", quantity.value
    yield f"{value.numerator}/{value.denominator}{percent}"
    yield rf"\frac{{{value.numerator}}}{{{value.denominator}}}{percent}"
    if value.denominator == 1:
        yield f"{int(value):,}{percent}"
        yield f"${int(value)}.0{percent}$"
        yield f"{int(value)}" + (percent or r" \text{ things}")
    else:
        yield f"{float(value)!r}{percent}"


def test_all_recorded_verdicts_on_real_model_outputs_are_reproduced() -> None:
    solutions = rows("gsm8k/model_solutions.jsonl")
    disagreements = []
    for row in solutions:
        gold = extract_answer(row["ground_truth"])
        assert gold is not None
        for model in MODELS:
            verdict = equivalent(extract_answer(row[model]["solution"]), gold)
            if verdict != row[model]["is_correct"]:
                disagreements.append((row["question"], model, verdict))
    assert len(solutions) * len(MODELS) == 5276
    assert disagreements == []


def test_every_gsm8k_gold_is_a_plain_number_and_equals_its_forms() -> None:
    for name in ("train", "test"):
        for row in rows(f"gsm8k/{name}.jsonl"):
            gold = extract_answer(row["answer"])
            assert gold is not None and parse_quantity(normalize(gold)) is not None
            assert all(equivalent(form, gold) for form in forms(gold))


def test_public_golds_equal_themselves_and_their_rewritten_forms() -> None:
    pytest.importorskip("math_verify")
    sample = random.Random(0).sample(golds(), 600)
    assert [(gold, form) for gold in sample for form in forms(gold) if not equivalent(form, gold)] == []


@pytest.mark.slow
def test_every_public_gold_equals_itself_and_its_rewritten_forms() -> None:
    pytest.importorskip("math_verify")
    assert [(gold, form) for gold in golds() for form in forms(gold) if not equivalent(form, gold)] == []


def test_golds_of_different_problems_with_different_numbers_differ() -> None:
    numbers = [gold for gold in golds() if parse_quantity(normalize(gold)) is not None]
    source = random.Random(1)
    for _ in range(2000):
        one, other = source.sample(numbers, 2)
        first, second = parse_quantity(normalize(one)), parse_quantity(normalize(other))
        assert first is not None and second is not None
        if first.value != second.value and not first.percent and not second.percent and first.unit == second.unit:
            assert not equivalent(one, other)


def test_every_number_with_a_unit_in_parentheses_equals_the_bare_number() -> None:
    found = [match for gold in golds() if (match := re.fullmatch(r"(-?\d[\d.,]*) \([A-Za-z ]+\)", gold))]
    assert len(found) > 1000 and [match[0] for match in found if not equivalent(match[1], match[0])] == []
