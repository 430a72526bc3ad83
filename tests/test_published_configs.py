"""The configurations for Qwen2.5 and Qwen3.5, each with a tiny model of the same architecture in the published form.

Everything stays as the file says but for sizes, the learning rate (two updates of 1e-6 would not show) and, where two runs are
compared to the bit, the staleness: what is under way when a run stops leaves again later than it had.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from fakes import tiny_qwen
from headrace.config import load, resolve_recipe
from headrace.environments.household import tasks as household_tasks
from headrace.environments.worlds import make
from headrace.records.metrics import read_metrics
from headrace.records.run_store import RunReader
from headrace.rollout.trajectory import Consumption, Receipt
from headrace.training.replay import replay
from headrace.training.run import train

CONFIGS = Path(__file__).parents[1] / "configs"
HOUSEHOLD = ("household/qwen3.5-0.8b.toml", "household/qwen3.5-2b.toml")
MATH = ("math/qwen3.5-0.8b.toml", "math/qwen3.5-2b.toml", "math/qwen2.5-0.5b-gsm8k.toml", "math/qwen2.5-7b-deepmath.toml")
DEFAULT = {HOUSEHOLD[0], MATH[0], MATH[2]}
ALL = [pytest.param(name, id=name, marks=() if name in DEFAULT else pytest.mark.slow) for name in HOUSEHOLD + MATH]
SINGLE = ["rollout.batch_size=4", "rollout.concurrency=4", "values.rollouts=1"]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The tiny models and data sets, each made when first asked for."""
    root, found = tmp_path_factory.mktemp("published"), {}

    def once(name, make_it):
        if name not in found:
            found[name] = make_it(root / name)
        return found[name]

    return once


def household_material(_):
    """Texts for the tokenizer, and actions to be cloned whatever is seen: enough for replies that end."""
    world = make("household", {"rooms": "full"})
    seen = [exchange for task in household_tasks("warmup", 12, rooms="full") for exchange in world.demonstrate(task, 0)]
    return tiny_qwen.Material([text for exchange in seen for text in exchange], [("Nothing happens.", action) for _, action in seen])


def math_material(options):
    guesses, world = tiny_qwen.guesses(), make("math", options).environment()
    texts = [text for exchange in guesses for text in exchange] + [world.system] * 2
    return tiny_qwen.Material(texts, guesses, world.system, world.tools)


@pytest.fixture
def small(made, tmp_path):
    """``small(name, *overrides)``: the configuration in a size for tests."""

    def configuration(name, *overrides):
        path = CONFIGS / name
        family = "Qwen3.5" if "qwen3.5" in name else "Qwen2.5"
        kind = name.partition("/")[0]
        material = household_material if kind == "household" else math_material
        model = made(f"{family}-{kind}", lambda folder: tiny_qwen.write_model(family, material(load(path).environment.options), folder))
        changes = [f"policy.model={model}", "environment.tasks=6", "learner.learning_rate=1e-2"]
        changes += [f"run.cache={tmp_path / 'cache'}", "run.clock=simulated", "run.checkpoint_every=1", "policy.device=cpu"]
        changes += ["rollout.reply_tokens=12", "rollout.context_limit=1024"]
        changes += ["rollout.batch_size=8", "rollout.concurrency=8"] if family == "Qwen2.5" else SINGLE
        if kind == "household":
            changes += ["environment.options.horizon=2", "evaluation.attempts=1", "evaluation.tasks={train = 1, seen = 1, unseen = 1}"]
        else:
            source = load(path).environment.options["source"]
            changes.append(f"environment.options.path={made(source, lambda folder: tiny_qwen.write_data(source, folder))}")
        return load(path, [*changes, *overrides])

    return configuration


def weights(folder):
    return load_file(folder / "policy" / "model.safetensors")


def consumed(folder):
    with RunReader(folder) as reader:
        return [event for _, event in reader.events() if isinstance(event, Consumption)]


@pytest.mark.parametrize("name", ALL)
def test_it_rolls_out_trains_and_goes_on_after_a_stop_as_if_there_had_been_none(name, small, tmp_path):
    """The run is stopped where a version is published: what leaves before depends on how many updates are still to come."""
    half = load(CONFIGS / name).run.publish_every

    def config(updates):
        return small(name, f"run.updates={updates}", "rollout.max_staleness=0")

    train(config(2 * half), out=tmp_path / "whole")
    train(config(half), out=tmp_path / "parts")
    halfway = weights(tmp_path / "parts")
    train(config(2 * half), out=tmp_path / "parts", resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert consumed(tmp_path / "whole") == consumed(tmp_path / "parts")
    assert all((whole[key] == parts[key]).all() for key in whole)
    assert any((whole[key] != halfway[key]).any() for key in whole)
    assert {event.advantage for event in consumed(tmp_path / "parts")} - {0.0}
    assert replay(tmp_path / "parts", resolve_recipe(config(2 * half))).ok
    if name in MATH:
        with RunReader(tmp_path / "parts") as reader:
            assert {event.success for _, event in reader.events() if isinstance(event, Receipt)} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOUSEHOLD + MATH)
def test_it_goes_on_with_the_staleness_of_the_file(name, small, tmp_path):
    train(small(name, "run.updates=1"), out=tmp_path / "run")
    config = small(name, "run.updates=3")
    assert train(config, out=tmp_path / "run", resume=True).updates == 3
    used = [event.dispatch for event in consumed(tmp_path / "run")]
    assert len(used) == len(set(used)) == 3 * config.rollout.batch_size == sum(row.attempts for row in read_metrics(tmp_path / "run"))
    assert replay(tmp_path / "run", resolve_recipe(config)).ok
