import pytest

from headrace import config as configuration
from headrace.config import Config, load, parse, to_toml
from headrace.errors import UserError

TINY = {"warmup": {}}


def refused(data):
    with pytest.raises(UserError) as error:
        parse(data, source="run.toml")
    return str(error.value)


def test_the_smallest_configuration_is_spo_plus_plus_on_the_household():
    config = parse(TINY)
    assert (config.recipe, config.environment.name, config.rollout.batch_size, config.rollout.concurrency) == (
        "spo++",
        "household",
        128,
        64,
    )


@pytest.mark.parametrize(
    ("data", "key", "nearest"),
    [
        ({"learner": {"learning_rte": 5e-5}}, "learner.learning_rte", "learner.learning_rate"),
        ({"learning_rate": 5e-5}, "learning_rate", "learner.learning_rate"),
        ({"rollout": {"learning_rate": 1.0}}, "rollout.learning_rate", "learner.learning_rate"),
        ({"recipy": "spo"}, "recipy", "recipe"),
        ({"environment": {"nme": "household"}}, "environment.nme", "environment.name"),
        ({"environment": {"options": {"horizn": 3}}}, "environment.options.horizn", "horizon"),
        ({"policy": {"lora": {"rnk": 4}}}, "policy.lora.rnk", "policy.lora.rank"),
    ],
)
def test_an_unknown_key_is_refused_by_name_with_the_nearest_valid_one(data, key, nearest):
    message = refused({**TINY, **data})
    assert f"`{key}`" in message and nearest in message and message.startswith("run.toml: ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"recipe": "grpo", "recipe_options": {"group_size": 1}}, ["group"]),
        ({"recipe": "gro"}, ["gro", "grpo"]),
        ({"recipe": "dr_grpo"}, ["learner.max_len"]),
        ({"recipe": "grpo", "rollout": {"batch_size": 100}}, ["multiple", "8"]),
        ({"recipe": "grpo", "rollout": {"concurrency": 4}}, ["concurrency", "8"]),
        ({"recipe_options": {"mesure": "none"}}, ["mesure", "measure"]),
        ({"recipe_options": {"objective": {"hihg": 1.0}}}, ["hihg", "high"]),
        ({"learner": {"learning_rate": -1}}, ["learner.learning_rate"]),
        ({"learner": {"learning_rate": float("inf")}}, ["learner.learning_rate", "finite"]),
        ({"learner": {"betas": [2.0, 0.9]}}, ["learner.betas", "less than 1"]),
        ({"seed": -1}, ["seed", "greater than or equal to 0"]),
        ({"run": 5}, ["run", "it is a section"]),
        ({"evaluation": {"splits": "train"}}, ["evaluation.splits", "list"]),
        ({"policy": {"model": ""}}, ["policy.model"]),
        ({"rollout": {"publication": "later"}}, ["rollout.publication", "drain"]),
        ({"rollout": {"reply_tokens": 2000}}, ["reply_tokens", "context_limit"]),
        ({"run": {"clock": "simulated"}, "engine": {"placement": "process"}}, ["simulated", "local"]),
        ({"policy": {"model": "some/name", "lora": {}}}, ["policy.lora", 'warmup.optimizer = "adamw"']),
        ({"policy": {"lora": {"targets": "q_proj"}}}, ["policy.lora.targets", "all-linear", "list"]),
        ({"environment": {"name": "househld"}}, ["househld", "household"]),
        ({"environment": {"options": {"rooms": "huge"}}}, ["rooms", "huge"]),
    ],
)
def test_a_bad_value_or_combination_is_one_clear_sentence(data, words):
    message = refused({**TINY, **data})
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_tiny_policy_needs_a_warm_start():
    assert "warmup" in refused({})


def test_overrides_are_toml_values_or_bare_words(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[warmup]\n")
    config = load(path, ["recipe=grpo", "run.updates=3", "learner.betas=[0.9, 0.99]", "environment.options.rooms=full"])
    assert (config.recipe, config.run.updates, config.learner.betas, config.environment.options) == (
        "grpo",
        3,
        (0.9, 0.99),
        {"rooms": "full"},
    )


@pytest.mark.parametrize("override", ["run.updates", "=3", "recipe.name=3"])
def test_a_malformed_override_is_refused(tmp_path, override):
    path = tmp_path / "run.toml"
    path.write_text('recipe = "spo"\n[warmup]\n')
    with pytest.raises(UserError):
        load(path, [override])


def test_missing_unreadable_and_broken_files_are_said_by_name(tmp_path):
    with pytest.raises(UserError, match=r"absent.toml: no such"):
        load(tmp_path / "absent.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "broken.toml").write_text("recipe = \n")
    with pytest.raises(UserError, match=r"broken.toml: not valid TOML"):
        load(tmp_path / "broken.toml")


def test_what_is_written_reads_back_equal():
    config = parse({**TINY, "recipe": "grpo", "policy": {"lora": {"rank": 4}}, "environment": {"options": {"horizon": 7}}})
    import tomllib

    assert parse(tomllib.loads(to_toml(config))) == config


def test_a_configuration_cannot_be_changed_after_it_was_read():
    with pytest.raises(Exception, match="frozen"):
        Config(warmup=configuration.WarmupConfig()).seed = 3


def test_a_recipe_of_the_users_own_comes_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom headrace.algorithms import recipe\nmine = dataclasses.replace(recipe('spo++'), rho=0.5)\nnot_one = 3\n"
    )
    config = parse({**TINY, "recipe": f"{tmp_path}/mine.py:mine"})
    assert configuration.resolve_recipe(config).rho == 0.5
    assert "not a headrace.algorithms.Recipe" in refused({**TINY, "recipe": f"{tmp_path}/mine.py:not_one"})
    assert "has no 'absent'" in refused({**TINY, "recipe": f"{tmp_path}/mine.py:absent"})
    assert "no file" in refused({**TINY, "recipe": f"{tmp_path}/other.py:mine"})


def test_every_key_is_documented():
    from pathlib import Path

    page = (Path(__file__).parents[1] / "docs" / "running.md").read_text(encoding="utf-8")
    missing = [key for key in configuration._all_keys(Config) if f"`{key}`" not in page and f"[{key}]" not in page]
    assert missing == []


def test_files_of_one_s_own_are_named_with_their_whole_path(tmp_path, monkeypatch):
    """So that a run finds them again when it is resumed or evaluated from another folder."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "recipe.py").write_text("from headrace.algorithms import RECIPES\nmine = RECIPES['spo']\nloss = mine.objective\n")
    monkeypatch.chdir(tmp_path / "own")
    data = {"recipe": "recipe.py:mine", "environment": {"name": "world.py:make"}, "policy": {"model": "."}}
    config = parse({**data, "recipe_options": {"objective": "recipe.py:loss"}})
    here = tmp_path / "own"
    assert (config.recipe, config.environment.name) == (f"{here}/recipe.py:mine", f"{here}/world.py:make")
    assert config.recipe_options == {"objective": f"{here}/recipe.py:loss"} and config.policy.model == str(here)
    monkeypatch.chdir(tmp_path)
    assert parse({**data, "recipe": "own/recipe.py:mine", "environment": {"name": "own/world.py:make"}, "policy": {"model": "own"}})
    assert parse(config.model_dump()) == config
