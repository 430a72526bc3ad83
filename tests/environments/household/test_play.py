"""A person at the terminal."""

from __future__ import annotations

from collections.abc import Callable

from headrace.environments.household import expert, play, tasks

TASK = tasks("train", 1)[0]


def typist(*lines: str) -> Callable[[str], str]:
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


def test_a_person_who_follows_the_expert_solves_the_task() -> None:
    shown: list[str] = []
    assert play(TASK, read=typist(*expert(TASK)), write=shown.append)
    assert "Your task is to: " in shown[0]
    assert "quit" in shown[1]
    assert shown[-1] == "\nSolved."


def test_a_question_mark_lists_what_is_possible_and_costs_nothing() -> None:
    shown: list[str] = []
    assert not play(TASK, horizon=1, read=typist("?", "", "look"), write=shown.append)
    assert "inventory\nlook" in shown[2]
    assert shown[-1] == "\nNot solved within 1 actions."


def test_the_prompt_counts_down() -> None:
    prompts: list[str] = []
    read = typist("look", "look", "quit")

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        return read(prompt)

    assert not play(TASK, horizon=9, read=ask, write=lambda text: None)
    assert prompts == ["\n[9 left] > ", "\n[8 left] > ", "\n[7 left] > "]


def test_quitting_and_the_end_of_input_leave_without_success() -> None:
    assert not play(TASK, read=typist("exit"), write=lambda text: None)
    assert not play(TASK, read=typist(), write=lambda text: None)
