"""SPO's drift."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch

from headrace.training.drift import DriftMemory
from headrace.training.policy import Policy


@pytest.fixture
def policy(tiny: Any) -> Policy:
    return Policy(tiny.model("Llama"), None)


def attempt(tiny: Any, number: int, task: str, rows: int = 1) -> Any:
    generator = random.Random(number)
    return tiny.trajectory(number, [tiny.row(generator, 8 + number) for _ in range(rows)], task=task)


def nudge(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def plain(tiny: Any, policy: Policy, trajectory: Any) -> torch.Tensor:
    with torch.no_grad():
        return tiny.plain_logprobs(policy.model, trajectory.rows)


def test_drift_is_the_mean_change_on_the_previous_response_since_its_own_update(tiny: Any, policy: Policy) -> None:
    memory = DriftMemory(max_tokens=40)
    first, other = attempt(tiny, 0, "a", rows=2), attempt(tiny, 1, "b")
    assert memory.after_update(policy, [first, other]) == [None, None]
    at_first = plain(tiny, policy, first)
    nudge(policy, 1)
    assert memory.after_update(policy, [attempt(tiny, 2, "c")]) == [None]  # another update in between
    nudge(policy, 2)
    second = attempt(tiny, 3, "a")
    (drift,) = memory.after_update(policy, [second])
    assert drift == pytest.approx(float((plain(tiny, policy, first) - at_first).abs().mean()), rel=1e-3)
    at_second = plain(tiny, policy, second)
    nudge(policy, 3)
    assert memory.after_update(policy, [attempt(tiny, 4, "a")]) == [
        pytest.approx(float((plain(tiny, policy, second) - at_second).abs().mean()), rel=1e-3)
    ]


def test_unchanged_weights_do_not_drift(tiny: Any, policy: Policy) -> None:
    memory = DriftMemory()
    memory.after_update(policy, [attempt(tiny, 0, "a")])
    assert memory.after_update(policy, [attempt(tiny, 1, "a")]) == [pytest.approx(0.0, abs=1e-6)]


def test_a_second_response_in_one_batch_follows_one_of_this_very_update(tiny: Any, policy: Policy) -> None:
    memory = DriftMemory()
    batch = [attempt(tiny, 0, "a"), attempt(tiny, 1, "b"), attempt(tiny, 2, "a")]
    assert memory.after_update(policy, batch) == [None, None, 0.0]
    at_last = plain(tiny, policy, batch[2])
    nudge(policy, 1)
    drifts = memory.after_update(policy, [attempt(tiny, 3, "a")])
    assert drifts == [pytest.approx(float((plain(tiny, policy, batch[2]) - at_last).abs().mean()), rel=1e-3)]


def test_state_survives_a_file_and_continues_to_the_bit(tiny: Any, policy: Policy) -> None:
    memory, restored = DriftMemory(), DriftMemory()
    memory.after_update(policy, [attempt(tiny, 0, "a", rows=2), attempt(tiny, 1, "b")])
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    nudge(policy, 1)
    batch = [attempt(tiny, 2, "b"), attempt(tiny, 3, "a")]
    assert memory.after_update(policy, batch) == restored.after_update(policy, batch)
