"""The configurations that people copy: all of them load, and each recipe's small one trains."""

from pathlib import Path

import pytest

from headrace.algorithms import RECIPES
from headrace.config import load
from headrace.records.metrics import read_metrics
from headrace.training.run import train

CONFIGS = Path(__file__).parents[1] / "configs"
SMOKE = sorted((CONFIGS / "smoke").glob("*.toml"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_configuration_is_valid(path):
    load(path)


def test_every_recipe_has_a_small_configuration():
    assert {load(path).recipe for path in SMOKE} == set(RECIPES)


@pytest.mark.parametrize("path", SMOKE, ids=lambda path: path.stem)
def test_the_small_configuration_of_a_recipe_trains_three_updates(path, cache, tmp_path):
    config = load(path, [f"run.cache={cache}"])
    assert train(config, out=tmp_path / "run").updates == 3
    assert [row.attempts for row in read_metrics(tmp_path / "run")] == [16, 16, 16]
