"""Where math problems come from: stable, disjoint, right, and read from any set."""

import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.environments import math_problems
from headrace.environments.base import Task
from headrace.environments.grading import equivalent
from headrace.environments.math_problems import GENERATORS, LEVELS, NAMED, SPLITS, tasks
from headrace.environments.math_problems.datasets import _DAPO_AFTER, _DAPO_BEFORE
from headrace.environments.math_problems.problem import Problem, split_of
from headrace.environments.python_sandbox import PythonSandbox

GSM8K = Path(os.environ.get("HEADRACE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data")) / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no data at {GSM8K}; set HEADRACE_DATA")


def ids(found: list[Task]) -> list[str]:
    return [task.id for task in found]


def questions(found: list[Task]) -> set[str]:
    return {" ".join(str(task.payload["question"]).split()) for task in found}


# --- generators ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_solution_in_python_gives_the_gold(kind: str, level: int) -> None:
    pytest.importorskip("pydantic_monty")
    sandbox = PythonSandbox(seconds=5.0)
    for task in tasks("train", 40, source=kind, levels=(level,)):
        sandbox.reset()
        results = [sandbox.run(code) for code in task.payload["solution"]]
        assert all(result.error is None and result.output for result in results)
        assert equivalent(results[-1].output, task.payload["answer"]), task
        assert task.kind == f"{kind}-{level}"


def test_the_same_call_gives_the_same_tasks_and_more_tasks_begin_with_fewer() -> None:
    assert ids(tasks("train", 30)) == ids(tasks("train", 30))
    assert ids(tasks("train", 90))[:9] == ids(tasks("train", 9))
    assert ids(tasks("train", 30, seed=1)) != ids(tasks("train", 30))


def test_ids_do_not_change_from_one_version_to_the_next() -> None:
    """A prompt value follows its task by id: these must stay as they are."""
    assert ids(tasks("train", 3)) == ["arithmetic/4082b7589227", "word-problems/2ba90fadabee", "number-theory/67b6625287c1"]
    assert tasks("train", 1)[0].payload["question"] == "Compute 11 - 97."


@pytest.mark.parametrize("kind", GENERATORS)
def test_splits_share_no_question(kind: str) -> None:
    train, warmup, test = (questions(tasks(split, 120, source=kind)) for split in SPLITS)
    assert len(train) == len(warmup) == len(test) == 120
    assert not train & warmup and not train & test and not warmup & test
    assert not questions(tasks("train", 120, source=kind, seed=1)) & test


def test_kinds_and_levels_take_turns() -> None:
    kinds = [task.kind for task in tasks("train", 9, levels=(1, 4))]
    assert kinds[:6] == [f"{kind}-{level}" for level in (1, 4) for kind in GENERATORS]
    assert kinds[6:] == kinds[:3]


def test_higher_levels_have_longer_questions() -> None:
    def mean_length(level: int) -> float:
        found = tasks("train", 100, source="word-problems", levels=(level,))
        return sum(len(task.payload["question"]) for task in found) / 100

    lengths = [mean_length(level) for level in LEVELS]
    assert lengths == sorted(lengths)


def test_asking_for_more_than_there_is_says_so() -> None:
    with pytest.raises(ValueError, match=r"arithmetic of level 1 has only .* different problems in split 'test'"):
        tasks("test", 5000, source="arithmetic", levels=(1,))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"split": "validation"}, "unknown split 'validation'"),
        ({"source": "gsm9k"}, "unknown source of problems 'gsm9k'"),
        ({"levels": (6,)}, "levels 1 to 5, not 6"),
        ({"source": "hub"}, "needs environment.options.hub"),
        ({"source": "file"}, "needs environment.options.path"),
        ({"source": "reasoning-gym", "sets": ("sudoku",)}, "'sudoku' is not used here"),
    ],
)
def test_bad_arguments_are_refused_with_what_would_be_right(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tasks(**{"split": "train", "count": 1} | arguments)


def test_unseen_is_another_name_of_test() -> None:
    assert ids(tasks("unseen", 5)) == ids(tasks("test", 5))


# --- files -----------------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_local_file_is_read_by_a_mapping_and_cut_into_disjoint_splits(tmp_path: Path) -> None:
    rows = [{"Body": f"There are {n} cats.", "Question": "How many?", "gold": {"value": float(n)}, "hard": 2.6} for n in range(300)]
    path = write(tmp_path / "cats.jsonl", rows)
    columns = {"question": "{Body} {Question}", "answer": "gold.value", "level": "hard"}
    found = {split: tasks(split, 10**6, source="file", path=path, columns=columns) for split in SPLITS}
    assert sum(map(len, found.values())) == 300 and all(len(part) > 10 for part in found.values())
    assert not questions(found["train"]) & questions(found["test"])
    task = found["train"][0]
    number = task.payload["answer"]
    assert task.payload == {"question": f"There are {number} cats. How many?", "answer": number} and "." not in number
    assert task.kind == "file-3" and task.id == f"file/{Problem(task.payload['question'], '').digest}"


def test_a_formula_column_travels_with_the_task(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", [{"question": f"{n} and 2?", "answer": n + 2, "formula": f"{n}+2"} for n in range(50)])
    task = tasks("train", 1, source="file", path=path, columns={"formula": "formula"})[0]
    assert task.payload["formula"] == f"{int(task.payload['answer']) - 2}+2"


def test_a_smaller_subset_is_contained_in_a_larger_one_and_depends_on_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "n.jsonl", [{"question": f"What is {n}?", "answer": str(n)} for n in range(400)])
    some = ids(tasks("train", 400, source="file", path=path, subset=50))
    assert len(some) == 50
    assert ids(tasks("train", 400, source="file", path=path, subset=100))[:50] == some
    assert ids(tasks("train", 50, source="file", path=path, seed=1)) != some
    assert len(tasks("test", 400, source="file", path=path, subset=5)) > 5  # the subset bounds training only


def test_repeated_questions_are_one_task_and_prose_golds_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"What is  {n}?", "answer": str(n)} for n in range(50)] * 3
    rows += [{"question": "Why?", "answer": "Because the determinant is nonzero for all values of t."}]
    path = write(tmp_path / "r.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        assert sum(len(tasks(split, 10**6, source="file", path=path)) for split in SPLITS) == 50
    assert "left out 1 problems whose gold answer is prose" in caplog.text


def test_questions_of_the_test_file_are_left_out_of_training(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": f"Q {n}", "answer": "1"} for n in range(100)])
    write(tmp_path / "test.jsonl", [{"question": f"Q  {n}", "answer": "1"} for n in range(90, 120)])
    for path in (str(tmp_path), str(tmp_path / "{split}.jsonl")):
        found = {split: questions(tasks(split, 10**6, source="file", path=path)) for split in SPLITS}
        assert len(found["test"]) == 30
        assert len(found["train"]) + len(found["warmup"]) == 90
        assert not (found["train"] | found["warmup"]) & found["test"] and not found["train"] & found["warmup"]


def test_the_gold_can_come_from_a_worked_solution_by_the_one_extractor(tmp_path: Path) -> None:
    rows = [{"problem": f"P{n}", "solution": rf"It was \boxed{{0}}, so \boxed{{{n}}}."} for n in range(30)]
    path = write(tmp_path / "w.jsonl", rows)
    found = tasks("train", 5, source="file", path=path, columns={"question": "problem", "answer": "", "worked": "solution"})
    assert all(task.payload["question"] == f"P{task.payload['answer']}" for task in found)


def test_ids_of_the_data_are_kept_where_a_column_has_them(tmp_path: Path) -> None:
    path = write(tmp_path / "i.jsonl", [{"question": f"Q{n}", "answer": "1", "meta": {"key": f"k{n}"}} for n in range(30)])
    assert all(task.id.startswith("file/k") for task in tasks("train", 9, source="file", path=path, columns={"id": "meta.key"}))


def test_parquet_is_read_too(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": [{"role": "user", "content": f"Q{n}"}], "reward_model": {"ground_truth": str(n)}} for n in range(30)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    columns = {"question": "prompt.0.content", "answer": "reward_model.ground_truth"}
    found = tasks("train", 5, source="file", path=str(tmp_path / "p.parquet"), columns=columns)
    assert all(task.payload["question"] == f"Q{task.payload['answer']}" for task in found)


@pytest.mark.parametrize(
    ("content", "columns", "complaint"),
    [
        ('{"question": "a"}\n', {}, r"file train, row 1: no column 'answer'; it has question. Set environment.options.columns"),
        ('{"question": "a", "answer": ""}\n', {}, "row 1: no answer in it"),
        ('{"question": "a", "answer": null}\n', {}, "row 1: no answer in it"),
        ('{"question": null, "answer": "1"}\n', {}, "row 1: no question in it"),
        ('{"question": "a", "answer": "1", "hard": "very"}\n', {"level": "hard"}, "row 1: the level 'very' is no number"),
        ("{question\n", {}, r"f.jsonl, line 1 is not JSON"),
        ("[1]\n", {}, "line 1 is not a JSON object"),
        ('{"question": "a", "answer": "1"}\n', {"anwser": "b"}, "columns has no 'anwser'; it has question, answer"),
        ('{"question": "a", "answer": "1"}\n', {"answer": 3}, "columns.answer must be text"),
    ],
)
def test_bad_rows_and_mappings_name_the_place(tmp_path: Path, content: str, columns: dict[str, Any], complaint: str) -> None:
    (tmp_path / "f.jsonl").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        tasks("train", 1, source="file", path=str(tmp_path / "f.jsonl"), columns=columns)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "latin.jsonl").write_bytes('\n{"question": "é", "answer": "1"}\n'.encode("latin-1"))
    (tmp_path / "text.parquet").write_text("no Parquet")
    for name, complaint in (
        ("latin.jsonl", "latin.jsonl, line 2 is not UTF-8"),
        ("text.parquet", "text.parquet could not be read as Parquet"),
    ):
        with pytest.raises(ValueError, match=complaint):
            tasks("train", 1, source="file", path=str(tmp_path / name))


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    for name, complaint in (("no.jsonl", "there is no file"), ("x.csv", "neither .jsonl nor .parquet")):
        (tmp_path / "x.csv").write_text("a,b\n")
        with pytest.raises(ValueError, match=complaint):
            tasks("train", 1, source="file", path=str(tmp_path / name))
    with pytest.raises(ValueError, match=r"holds neither test.jsonl nor test.parquet"):
        tasks("train", 1, source="gsm8k", path=str(tmp_path))


# --- named sets ----------------------------------------------------------------------------------------------------------------


class FakeTable(list[dict[str, Any]]):
    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> "FakeTable":
        return FakeTable({name: row[name] for name in names} for row in self)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], FakeTable]:
    """A stand-in for the package datasets: what it holds is by (name, configuration, split)."""
    tables: dict[tuple[str, str | None, str], FakeTable] = {}
    library = types.ModuleType("datasets")
    library.load_dataset = lambda name, config, split: tables[name, config, split]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    math_problems._problem_set.cache_clear()
    return tables


def test_dapo_is_read_without_its_repetitions_and_its_wrapping_words(hub: dict[tuple[str, str | None, str], FakeTable]) -> None:
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{_DAPO_BEFORE}\n\nWhat is {n} + 1?\n\n{_DAPO_AFTER}"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
        }
        for n in range(40)
    ]
    hub["BytedTsinghua-SIA/DAPO-Math-17k", None, "train"] = FakeTable(rows * 3)
    found = tasks("train", 10**6, source="dapo", subset=20)
    assert len(found) == 20 and NAMED["dapo"].subset == 1500
    assert all(task.payload["question"] == f"What is {int(task.payload['answer']) - 1} + 1?" for task in found)
    assert found[0].id.startswith("dapo/")


def test_deepmath_is_read_with_its_difficulty(hub: dict[tuple[str, str | None, str], FakeTable]) -> None:
    rows = [{"question": f"Q{n}", "final_answer": r"\frac{1}{2}", "difficulty": 5.5, "topic": "Algebra"} for n in range(40)]
    hub["zwhe99/DeepMath-103K", None, "train"] = FakeTable(rows)
    found = tasks("train", 5, source="deepmath")
    assert found[0].kind == "deepmath-6" and found[0].payload["answer"] == r"\frac{1}{2}"


def test_any_hub_set_is_read_by_a_mapping(hub: dict[tuple[str, str | None, str], FakeTable]) -> None:
    hub["me/mine", "hard", "train"] = FakeTable([{"q": f"Q{n}", "a": n} for n in range(40)])
    found = tasks("train", 5, source="hub", hub="me/mine", hub_config="hard", columns={"question": "q", "answer": "a"})
    assert found[0].id.startswith("mine/") and found[0].payload["question"] == f"Q{found[0].payload['answer']}"


def test_a_formula_of_a_hub_set_may_join_columns(hub: dict[tuple[str, str | None, str], FakeTable]) -> None:
    hub["me/sums", None, "train"] = FakeTable({"question": f"Q{n}", "answer": n + 1, "a": n, "b": 1, "c": 0} for n in range(30))
    (task, *_) = tasks("train", 1, source="hub", hub="me/sums", columns={"formula": "{a} + {b}"})
    assert task.payload["formula"] == f"{int(task.payload['answer']) - 1} + 1"


def test_a_set_that_cannot_be_read_is_named(hub: dict[tuple[str, str | None, str], FakeTable]) -> None:
    with pytest.raises(ValueError, match=r"the Hugging Face set 'zwhe99/DeepMath-103K' could not be read \(KeyError"):
        tasks("train", 1, source="deepmath")


def test_without_the_package_a_hub_set_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    math_problems._problem_set.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'headrace\[math\]'.* or give a local copy"):
        tasks("train", 1, source="deepmath")


def test_reasoning_gym_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("reasoning_gym")
    library.create_dataset = lambda name, seed, size: [{"question": f"{name} {n}?", "answer": n} for n in range(size)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)
    found = tasks("train", 5, source="reasoning-gym", sets=("gcd", "lcm"))
    assert [task.kind for task in found] == ["reasoning-gym/gcd", "reasoning-gym/lcm"] * 2 + ["reasoning-gym/gcd"]
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"headrace\[reasoning-gym\]"):
        tasks("train", 1, source="reasoning-gym")


def test_reasoning_gym_itself() -> None:
    pytest.importorskip("reasoning_gym")
    found = tasks("train", 6, source="reasoning-gym")
    assert ids(found) == ids(tasks("train", 6, source="reasoning-gym"))
    assert not questions(tasks("train", 60, source="reasoning-gym")) & questions(tasks("test", 10, source="reasoning-gym"))


def test_every_named_set_is_a_source() -> None:
    assert set(NAMED) | set(GENERATORS) < set(math_problems.SOURCES)


@needs_gsm8k
def test_gsm8k_from_a_local_folder() -> None:
    found = {split: tasks(split, 10**6, source="gsm8k", path=str(GSM8K)) for split in SPLITS}
    assert len(found["test"]) == 1319 and len(found["train"]) + len(found["warmup"]) == 7473
    assert not questions(found["train"]) & questions(found["test"]) and not questions(found["train"]) & questions(found["warmup"])
    assert {task.kind for task in found["test"]} <= {f"gsm8k-{steps}" for steps in range(1, 9)}
    natalia = next(task for part in found.values() for task in part if task.payload["question"].startswith("Natalia sold clips"))
    assert natalia.payload["answer"] == "72" and natalia.kind == "gsm8k-2"


def test_the_split_of_a_problem_depends_on_its_text_alone() -> None:
    counts = dict.fromkeys(SPLITS, 0)
    for number in range(2000):
        counts[split_of(Problem(f"Q{number}", "1").digest)] += 1
    assert 1500 < counts["train"] < 1700 and 140 < counts["warmup"] < 260 and 140 < counts["test"] < 260
