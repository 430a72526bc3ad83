"""Problems from data sets: GSM8K, DAPO-Math-17K, DeepMath-103K, any other Hugging Face set, any local file."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.environments.base import Task
from headrace.environments.grading import is_gradable
from headrace.environments.math_problems.problem import Problem, rank, split_of
from headrace.environments.math_problems.rows import PLACE, Columns, Row, problem_of, read_file
from headrace.environments.optional import MissingPackage

_log = logging.getLogger(__name__)
_HELD_OUT = {"train": 0.9, "warmup": 0.1}  # of a training split, so that the cold start sees other problems than training


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """A data set. ``splits`` are those it has itself; without a test split a tenth is held out, by each question's text.

    ``subset`` is how many problems of the training split are used at most: a seeded choice, the same in every run.
    ``hub`` is its name (and configuration) on the Hugging Face hub; ``path`` a local file, with ``{split}`` where the
    splits are files of their own, or a folder that holds them.
    """

    name: str
    columns: Columns
    hub: str = ""
    hub_config: str | None = None
    path: str = ""
    splits: tuple[str, ...] = ("train",)
    subset: int | None = None
    counts_steps: bool = False
    seen: dict[str, list[Problem]] = field(default_factory=dict, compare=False, repr=False)

    def tasks(self, split: str, count: int, seed: int) -> list[Task]:
        """The first ``count`` problems of a split in the seed's order (fewer if there are fewer)."""
        problems = sorted(self._split(split), key=lambda problem: rank(problem.digest, seed))
        return [problem.task(self.name) for problem in problems[: min(count, self._most(split))]]

    def _most(self, split: str) -> int:
        return self.subset if self.subset is not None and split == "train" else 2**62

    def _split(self, split: str) -> list[Problem]:
        if "test" not in self.splits:
            return [problem for problem in self._own("train") if split_of(problem.digest) == split]
        if split == "test":
            return self._own("test")
        test = {problem.digest for problem in self._own("test")}
        return [p for p in self._own("train") if p.digest not in test and split_of(p.digest, _HELD_OUT) == split]

    def _own(self, split: str) -> list[Problem]:
        if split not in self.seen:
            self.seen[split] = list(self._problems(split))
        return self.seen[split]

    def _problems(self, split: str) -> Iterator[Problem]:
        """The set's own split without repeated questions and without golds that no grader can compare."""
        digests: set[str] = set()
        dropped = 0
        for number, row in enumerate(self._rows(split), 1):
            problem = problem_of(row, self.columns, f"{self.name} {split}, row {number}")
            if problem.digest in digests:
                continue
            digests.add(problem.digest)
            if not is_gradable(problem.answer):
                dropped += 1
                continue
            yield self._with_level(problem)
        if dropped:
            _log.warning("%s %s: left out %d problems whose gold answer is prose, which cannot be compared", self.name, split, dropped)

    def _with_level(self, problem: Problem) -> Problem:
        """GSM8K's difficulty: the number of calculations in the worked answer."""
        if not self.counts_steps or problem.worked is None:
            return problem
        steps = min(max(problem.worked.count("<<"), 1), 8)
        return replace(problem, level=steps)

    def _rows(self, split: str) -> Iterable[Row]:
        return self._local_rows(split) if self.path else self._hub_rows(split)

    def _local_rows(self, split: str) -> Iterator[Row]:
        path = Path(self.path.replace("{split}", split)).expanduser()
        if path.is_dir():
            found = [path / f"{split}{suffix}" for suffix in (".jsonl", ".parquet") if (path / f"{split}{suffix}").is_file()]
            if not found:
                raise ValueError(f"environment.options.path: {path} holds neither {split}.jsonl nor {split}.parquet")
            path = found[0]
        return read_file(path)

    def _hub_rows(self, split: str) -> Iterator[Row]:
        try:
            library = importlib.import_module("datasets")
        except ImportError:
            raise MissingPackage(
                f"Reading {self.hub} needs the package datasets: install it with `pip install 'headrace[math]'`, "
                "or give a local copy as environment.options.path."
            ) from None
        try:
            table: Any = library.load_dataset(self.hub, self.hub_config, split=split)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{self.name}: the Hugging Face set {self.hub!r} could not be read ({reason}). "
                "Without a network, give a local copy as environment.options.path."
            ) from error
        needed = {place.split(".")[0] for place in self._places()} & set(table.column_names)
        return iter(table.select_columns(sorted(needed)))

    def _places(self) -> list[str]:
        columns = self.columns
        joined = [PLACE.findall(text) or [text] for text in (columns.question, columns.worked, columns.formula) if text]
        return [*(place for places in joined for place in places), *filter(None, (columns.answer, columns.level, columns.id))]


_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem."
)
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'

NAMED: Mapping[str, ProblemSet] = {
    "gsm8k": ProblemSet(
        "gsm8k",
        Columns(answer="", worked="answer"),
        hub="openai/gsm8k",
        hub_config="main",
        splits=("train", "test"),
        counts_steps=True,
    ),
    "dapo": ProblemSet(
        "dapo",
        Columns(question="prompt.0.content", answer="reward_model.ground_truth", before=_DAPO_BEFORE, after=_DAPO_AFTER),
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        subset=1500,
    ),
    "deepmath": ProblemSet("deepmath", Columns(answer="final_answer", level="difficulty"), hub="zwhe99/DeepMath-103K"),
}
