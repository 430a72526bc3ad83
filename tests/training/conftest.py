"""A toy run: a one-layer policy in a world of four words; an update takes milliseconds."""

import dataclasses
import importlib.util
import random
from pathlib import Path

import pytest

from headrace.config import Config, parse
from headrace.rollout.chat import ChatCodec
from headrace.rollout.trajectory import Turn
from headrace.training.policy import Policy
from headrace.training.tiny_policy import TinySizes, make_tiny_policy
from headrace.training.warmup import WarmupSettings, warm_start

TOY = Path(__file__).parents[1] / "fakes" / "toy_world.py"


TINY = Path(__file__).parents[1] / "fakes" / "tiny_models.py"


def _loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _toy_module():
    spec = importlib.util.spec_from_file_location("toy_world_for_tests", TOY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def toy_policy(tmp_path_factory):
    """A Hugging Face folder with a one-layer policy that names colours at random: a quarter of its answers are right."""
    toy = _toy_module()
    folder = tmp_path_factory.mktemp("toy") / "policy"
    sizes = dataclasses.replace(TinySizes(), layers=1, width=32, heads=2, kv_heads=1, ffn=64, context=256)
    make_tiny_policy(toy.TEXTS, folder, sizes, seed=0)
    policy = Policy.load(folder)
    codec = ChatCodec(policy.tokenizer)
    answers = random.Random(0)
    conversations = [codec.demonstrate([Turn(f"say {toy.COLOURS[i % 4]}", answers.choice(toy.COLOURS))]) for i in range(256)]
    warm_start(policy, conversations, WarmupSettings(steps=60, learning_rate=1e-2, held_out=0, observation_weight=0.0))
    policy.save(folder)
    return folder


@pytest.fixture
def toy_data(toy_policy, tmp_path):
    """The configuration of a toy run as plain data, to be changed and parsed by a test."""
    return {
        "recipe": "spo++",
        "environment": {"name": f"{TOY}:toy", "tasks": 16},
        "policy": {"model": str(toy_policy)},
        "values": {"rollouts": 2},
        "rollout": {"batch_size": 16, "concurrency": 8, "context_limit": 64, "reply_tokens": 3},
        "learner": {"learning_rate": 3e-3, "minibatches": 2, "max_len": 8},
        "evaluation": {"attempts": 0},
        "run": {"updates": 3, "clock": "simulated", "checkpoint_every": 1, "cache": str(tmp_path / "cache")},
    }


@pytest.fixture
def toy_config(toy_data):
    def make(**sections) -> Config:
        data = {key: dict(value) if isinstance(value, dict) else value for key, value in toy_data.items()}
        for name, value in sections.items():
            data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
        return parse(data)

    return make


@pytest.fixture(scope="session")
def tiny():
    """Tiny random models of real architectures, and made-up trajectories."""
    return _loaded(TINY, "tiny_models").Tiny
