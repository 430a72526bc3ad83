"""SSPO where it was made for: one group batch reused over several mini-batches, against the other group methods.

    python benchmarks/off_policy.py [--updates 20] [--minibatches 1 4 8] [--recipes grpo gspo gmpo sapo sspo]

Each cell is one run of the household world from the quickstart's warm start: 64 tasks, 8 groups of 8 a batch, one seed (matched
seeds belong to studies). With more mini-batches the later ones of a batch are farther off-policy. Printed per run: reward
area, mean reward of the last five updates, entropy at the first and the last update (nats per action token), and over all
updates the mean effective sample size and standard deviation of the importance ratios and the KL of an update.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from headrace.config import Config, load
from headrace.curves import end_reward, trapezoid_area
from headrace.records.metrics import UpdateMetrics, read_metrics
from headrace.training.run import train

QUICKSTART = Path(__file__).parents[1] / "configs" / "household" / "quickstart.toml"


@dataclass(frozen=True)
class Cell:
    recipe: str
    minibatches: int
    area: float
    end: float
    entropy_first: float
    entropy_last: float
    effective_sample_size: float
    ratio_std: float
    kl: float


def configuration(recipe: str, minibatches: int, updates: int, seed: int) -> Config:
    overrides = {
        "recipe": recipe,
        "seed": seed,
        "environment.tasks": 64,
        "rollout.batch_size": 64,
        "learner.minibatches": minibatches,
        "learner.entropy": "true",
        "evaluation.attempts": 0,
        "run.updates": updates,
        "run.checkpoint_every": updates,
    }
    return load(QUICKSTART, [f"{key}={value}" for key, value in overrides.items()])


def measure(recipe: str, minibatches: int, updates: int, seed: int) -> tuple[Cell, list[UpdateMetrics]]:
    with tempfile.TemporaryDirectory() as folder:
        train(configuration(recipe, minibatches, updates, seed), out=Path(folder) / "run")
        rows = read_metrics(Path(folder) / "run")
    rewards = [row.reward for row in rows]
    entropies = [row.entropy for row in rows if row.entropy is not None]
    return Cell(
        recipe=recipe,
        minibatches=minibatches,
        area=trapezoid_area(rewards),
        end=end_reward(rewards),
        entropy_first=entropies[0],
        entropy_last=entropies[-1],
        effective_sample_size=fmean(row.other["effective_sample_size"] for row in rows),
        ratio_std=fmean(row.ratio_std for row in rows),
        kl=fmean(row.kl for row in rows),
    ), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--minibatches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--recipes", nargs="+", default=["grpo", "gspo", "gmpo", "sapo", "sspo"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write every cell, with its curves, to this file")
    arguments = parser.parse_args()
    print("| recipe | mini-batches | area | last five | entropy first | entropy last | ESS | ratio std | KL |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    cells = []
    for recipe in arguments.recipes:
        for minibatches in arguments.minibatches:
            cell, rows = measure(recipe, minibatches, arguments.updates, arguments.seed)
            figures = (cell.area, cell.end, cell.entropy_first, cell.entropy_last, cell.effective_sample_size, cell.ratio_std, cell.kl)
            print(f"| {recipe} | {minibatches} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |", flush=True)
            curves = {"reward": [row.reward for row in rows], "entropy": [row.entropy for row in rows]}
            cells.append({**asdict(cell), **curves})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(cells, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
