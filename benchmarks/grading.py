"""Grading against real data: agreement with recorded verdicts, golds in rewritten forms, wrong golds, speed.

    python benchmarks/grading.py DATA [--pairs 1000]

DATA is a folder with ``gsm8k/model_solutions.jsonl`` (openai/grade-school-math) and ``math_eval/*.jsonl`` (collected in
QwenLM/Qwen2.5-Math).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.environments._answer_text import normalize, parse_quantity
from headrace.environments.grading import GradingError, equivalent, extract_answer, is_gradable

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
GOLD_FIELDS = {"amc23": "answer", "asdiv": "answer", "college_math": "answer", "mawps_singleop": "target", "svamp": "Answer"}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def agreement(data: Path) -> None:
    print("recorded verdicts (GSM8K test, four models)")
    counts: Counter[str] = Counter()
    started = time.process_time()
    for row in rows(data / "gsm8k" / "model_solutions.jsonl"):
        gold = extract_answer(row["ground_truth"]) or ""
        for model in MODELS:
            answer, recorded = extract_answer(row[model]["solution"]), row[model]["is_correct"]
            counts["all"] += 1
            counts["agree"] += equivalent(answer, gold) == recorded
            counts["no answer in the text"] += answer is None
            counts["exact text would disagree"] += (answer == gold) != recorded
    seconds = time.process_time() - started
    print(
        "  " + ", ".join(f"{name}: {count}" for name, count in counts.items()), f"({counts['all'] / seconds:,.0f} per second of one core)"
    )


def golds(data: Path) -> dict[str, list[str]]:
    found = {name: sorted({str(row[field]) for row in rows(data / "math_eval" / f"{name}.jsonl")}) for name, field in GOLD_FIELDS.items()}
    return {name: [gold.removesuffix(".0") if gold.count(".") == 1 else gold for gold in values] for name, values in found.items()}


def forms(gold: str) -> Iterator[tuple[str, str]]:
    yield "itself", gold
    yield r"\boxed{}", rf"\boxed{{{gold}}}"
    yield "spaces and a full stop", f"  {gold} . "
    if r"\frac" in gold:
        yield r"\dfrac", gold.replace(r"\frac", r"\dfrac")
    quantity = parse_quantity(normalize(gold))
    if quantity is None:
        return
    percent, value = "%" if quantity.percent else "", quantity.value
    yield r"\frac", rf"\frac{{{value.numerator}}}{{{value.denominator}}}{percent}"
    yield "a/b", f"{value.numerator}/{value.denominator}{percent}"
    if value.denominator == 1:
        yield "thousands separators", f"{int(value):,}{percent}"
        yield "with .0", f"{int(value)}.0{percent}"
        if not percent:
            yield "with a unit", rf"{int(value)} \text{{ things}}"
            yield "x = ", f"x = {value}"


def rewritten(found: dict[str, list[str]]) -> None:
    print("golds in rewritten forms: equal / all")
    for name, values in found.items():
        counts: dict[str, list[int]] = {}
        for gold in values:
            for form, text in forms(gold):
                counts.setdefault(form, []).append(equivalent(text, gold))
        table = ", ".join(f"{form} {sum(results)}/{len(results)}" for form, results in counts.items())
        print(f"  {name} ({len(values)} different golds, {sum(map(is_gradable, values))} gradable): {table}")


def pairs(values: list[str], count: int) -> None:
    source = random.Random(0)
    usable = [gold for gold in values if is_gradable(gold)]
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for _ in range(count):
        one, other = source.sample(usable, 2)
        try:
            counts["equal" if equivalent(one, other) else "different"] += 1
        except GradingError:
            counts["no verdict"] += 1
    print(f"{count} random pairs of different golds of college_math: {dict(counts)} in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--pairs", type=int, default=1000)
    arguments = parser.parse_args()
    agreement(arguments.data)
    found = golds(arguments.data)
    rewritten(found)
    pairs(found["college_math"], arguments.pairs)


if __name__ == "__main__":
    main()
