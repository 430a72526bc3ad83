"""Two recipes on one world with matched seeds, each at the learning rate that suits it best.

    python benchmarks/matched_seeds.py [--config FILE] [--recipes spo++ spo] [--rates 5e-5 1e-4 2e-4 4e-4] [--seeds 8] [--set KEY=VALUE ...]

First every recipe tries every learning rate on ``--tuning-seeds`` seeds (100, 101, ...) and keeps the one with the largest area
(one rate given: nothing is tried). Then both run on seeds 0, 1, ...; a seed fixes the order of tasks, the sampling and the
world, and both start from one warm start and one set of offline values. Printed: every run, and the paired differences, first
recipe minus second, with their mean, standard deviation and p: the share of all ways to flip the signs of the differences whose
mean lies at least as far from zero (an exact test; 8 seeds can reach 2/256).

*Area* and *last five* are the world's own measures of the training reward (``headrace.curves``: in the math world a point is
the mean of two updates, the area the mean of the points). *Held out* is the success on the split "test" (or "unseen") after training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from headrace.config import Config, load
from headrace.curves import curve_summary
from headrace.errors import UserError
from headrace.records.metrics import read_metrics
from headrace.training.run import train

MATH = Path(__file__).parents[1] / "configs" / "math" / "quickstart.toml"
HELD_OUT = ("test", "unseen")
FIGURES = ("area", "last five", "held out")


@dataclass(frozen=True)
class Result:
    recipe: str
    rate: float
    seed: int
    area: float
    end: float
    held_out: float
    rewards: tuple[float, ...]

    def figures(self) -> tuple[float, float, float]:
        return self.area, self.end, self.held_out


def configuration(path: Path, overrides: Sequence[str], recipe: str, rate: float, seed: int) -> Config:
    given = load(path, overrides)
    split = next((split for split in given.evaluation.splits if split in HELD_OUT), None)
    if split is None or not given.evaluation.attempts:
        raise UserError(f"{path}: success is compared on a held-out split: evaluation.splits must name test or unseen, with attempts")
    fixed = [f"recipe={recipe}", f"learner.learning_rate={rate}", f"seed={seed}", f'evaluation.splits=["{split}"]']
    return load(path, [*overrides, *fixed, f"run.checkpoint_every={max(1, given.run.updates)}"])


def measure(config: Config) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, out=Path(folder) / "run")
        if result.interrupted:
            raise SystemExit(130)
        rewards = [row.reward for row in read_metrics(Path(folder) / "run")]
    summary = curve_summary(rewards, config.environment.name)
    held_out = next(row for row in result.evaluations if row.split in HELD_OUT and row.update == config.run.updates)
    return Result(config.recipe, config.learner.learning_rate, config.seed, summary.area, summary.end, held_out.success, tuple(rewards))


def best_rate(arguments: argparse.Namespace, recipe: str) -> float:
    """The learning rate with the largest mean area over the tuning seeds."""
    if len(arguments.rates) == 1:
        return float(arguments.rates[0])
    areas: dict[float, float] = {}
    for rate in arguments.rates:
        runs = [show(measure(configuration(arguments.config, arguments.set, recipe, rate, seed))) for seed in tuning_seeds(arguments)]
        areas[rate] = fmean(run.area for run in runs)
    return max(areas, key=lambda rate: areas[rate])


def tuning_seeds(arguments: argparse.Namespace) -> range:
    return range(100, 100 + arguments.tuning_seeds)


def show(result: Result) -> Result:
    figures = " | ".join(f"{figure:.3f}" for figure in result.figures())
    print(f"| {result.recipe} | {result.rate:g} | {result.seed} | {figures} |", flush=True)
    return result


def differences(first: Sequence[Result], second: Sequence[Result]) -> None:
    """Mean, standard deviation and sign-flip p of the paired differences of every figure."""
    print(f"\n{first[0].recipe} minus {second[0].recipe}, {len(first)} matched seeds:\n")
    print("| figure | " + " | ".join(f"seed {run.seed}" for run in first) + " | mean | sd | p |")
    print("| --- |" + " --- |" * (len(first) + 3))
    for number, name in enumerate(FIGURES):
        gaps = [one.figures()[number] - other.figures()[number] for one, other in zip(first, second, strict=True)]
        each = " | ".join(f"{gap:+.3f}" for gap in gaps)
        print(f"| {name} | {each} | {fmean(gaps):+.3f} | {stdev(gaps):.3f} | {sign_flip_p(gaps):.3f} |")


def sign_flip_p(gaps: Sequence[float]) -> float:
    """Two-sided exact sign-flip test of mean zero."""
    reached = abs(sum(gaps)) - 1e-12
    flips = [abs(sum(sign * gap for sign, gap in zip(signs, gaps, strict=True))) for signs in itertools.product((-1, 1), repeat=len(gaps))]
    return sum(flip >= reached for flip in flips) / len(flips)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=MATH)
    parser.add_argument("--recipes", nargs=2, default=["spo++", "spo"], metavar=("FIRST", "SECOND"))
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-5, 1e-4, 2e-4, 4e-4])
    parser.add_argument("--tuning-seeds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="also write every run, with its curve, to this file")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("a standard deviation needs at least 2 seeds")
    print("| recipe | learning rate | seed | " + " | ".join(FIGURES) + " |\n| --- | --- | --- | --- | --- | --- |")
    for recipe, rate in itertools.product(arguments.recipes, arguments.rates):
        configuration(arguments.config, arguments.set, recipe, rate, 0)  # refused now rather than after hours
    rates = {recipe: best_rate(arguments, recipe) for recipe in arguments.recipes}
    runs: dict[str, list[Result]] = {recipe: [] for recipe in arguments.recipes}
    for seed in range(arguments.seeds):
        for recipe in arguments.recipes:
            runs[recipe].append(show(measure(configuration(arguments.config, arguments.set, recipe, rates[recipe], seed))))
    differences(*runs.values())
    if arguments.json is not None:
        every = [asdict(run) for recipe_runs in runs.values() for run in recipe_runs]
        arguments.json.write_text(json.dumps(every, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"matched_seeds.py: {error}") from None
