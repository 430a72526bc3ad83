import pytest

from fakes import toy_world
from headrace.environments import household
from headrace.errors import UserError
from headrace.play import play


def answers(*lines):
    waiting = list(lines)

    def read(_prompt):
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return read


def test_a_person_solves_a_household_task_with_the_experts_actions():
    actions = household.expert(household.tasks("train", 3)[2])
    said = []
    assert play("household", split="train", number=2, options=["horizon=30"], read=answers(*actions), write=said.append)
    assert any("Your task is to" in text for text in said)


def test_any_world_can_be_played():
    said = []
    assert play(
        f"{toy_world.__file__}:toy", split="train", number=1, options=["turns=2"], read=answers("green", "green"), write=said.append
    )
    assert said[0] == "say green" and said[-1] == "\nSolved. (success)"


def test_leaving_early_is_not_solving():
    for lines in (["quit"], []):
        assert not play(f"{toy_world.__file__}:toy", split="train", number=0, options=[], read=answers(*lines), write=lambda _: None)


@pytest.mark.parametrize(
    ("world", "options", "words"),
    [
        ("househld", [], "household"),
        ("household", ["rooms=huge"], "huge"),
        ("household", ["rooms"], "name=value"),
        ("household", ["room=3"], "rooms"),
    ],
)
def test_a_wrong_word_is_one_clear_sentence(world, options, words):
    with pytest.raises(UserError, match=words):
        play(world, split="train", number=0, options=options)


def test_what_a_world_lacks_here_is_one_clear_sentence(monkeypatch):
    from headrace import play as module

    def lacking(*_arguments):
        raise RuntimeError("pip install 'headrace[math]'")

    monkeypatch.setattr(module, "_play", lacking)
    with pytest.raises(UserError, match="pip install"):
        play("household", split="train", number=0, options=[])
