"""What the comparison of whole steps rests on: both trainers get the same prompts and reward the same replies alike."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.open_doors import load_object
from headrace.rollout.chat import ChatCodec
from headrace.training.tiny_policy import TinySizes, fit_tokenizer

SUMS = Path(__file__).parents[1] / "benchmarks" / "sums.py"
TERMS = [17, 25, 38, 41, 100, 2]
RIGHT = "017+025=042 042+038=080 080+041=121 121+100=221 221+002=223"


def of_sums(name: str):  # type: ignore[no-untyped-def]
    return load_object(f"{SUMS}:{name}", "benchmark")


def test_both_trainers_read_the_same_prompt_tokens() -> None:
    tasks, rows = of_sums("tasks")("train", 8), of_sums("rows")(8)
    texts = [row["prompt"][0]["content"] for row in rows]
    tokenizer = fit_tokenizer([*texts, RIGHT], TinySizes(split_digits=True))
    codec, environment = ChatCodec(tokenizer), of_sums("world")().environment()
    for task, row in zip(tasks, rows, strict=True):
        observation = asyncio.run(environment.reset(task))
        ours = codec.open(environment.system, environment.tools, observation).context()
        theirs = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert list(ours) == list(theirs)
        assert task.payload["terms"] == row["terms"]


def test_a_right_reply_earns_one_and_others_their_share_of_right_characters() -> None:
    outcome = of_sums("outcome")
    assert of_sums("question")(TERMS) == "017+025+038+041+100+002="
    assert " ".join(of_sums("steps")(TERMS)) == RIGHT
    assert outcome(TERMS, RIGHT) == 1.0
    assert outcome(TERMS, RIGHT[:-1] + "4") == pytest.approx(58 / 59)
    assert outcome(TERMS, "017+025=") == pytest.approx(8 / 59)
    assert outcome(TERMS, "") == 0.0


def test_the_world_rewards_a_reply_by_the_same_rule() -> None:
    (task,) = of_sums("tasks")("train", 1)
    environment = of_sums("world")().environment()

    async def reply(text: str) -> tuple[float | None, bool]:
        await environment.reset(task)
        step = await environment.step(text)
        return step.outcome, step.success

    right = " ".join(of_sums("steps")(task.payload["terms"]))
    assert asyncio.run(reply(right)) == (1.0, True)
    assert asyncio.run(reply(right[:10])) == (pytest.approx(10 / 59), False)
