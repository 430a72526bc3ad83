"""Real games from disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.environments.household import HouseholdEnvironment, expert, read_game, solves, tasks, to_pddl
from headrace.environments.household.games import instruction_in

DATA = Path(os.environ.get("HEADRACE_DATA", Path(__file__).parents[4] / "shared" / "data"))
REAL = DATA / "alfworld" / "heat-potato-floorplan14"
real_game = pytest.mark.skipif(
    not REAL.is_dir(), reason=f"the real game is not in {REAL}; set HEADRACE_DATA to the folder of shared test data"
)

GRAMMAR = 'grammar :: """{ "task": [ { "rhs": "Your task is to: %s." } ] }""";'


@real_game
def test_the_real_game_is_read_with_its_instruction_and_solved_by_the_expert() -> None:
    task = read_game(REAL)
    assert task.kind == "pick_heat_then_place_in_recep"
    assert task == read_game(REAL / "initial_state.pddl")
    opening = HouseholdEnvironment().reset_now(task)
    assert opening.startswith(
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a cabinet 8,"
    )
    assert opening.endswith("and a toaster 1.\n\nYour task is to: Heat a potato and place it in the sink.")
    assert solves(task, expert(task))


def test_a_game_file_brings_its_instruction_in_its_grammar(tmp_path: Path) -> None:
    task = tasks("train", 1)[0]
    problem, instruction = to_pddl(task)
    path = tmp_path / "game.tw-pddl"
    for text in (instruction, 'put the "red" mug away. Quickly'):
        path.write_text(json.dumps({"pddl_problem": problem, "grammar": GRAMMAR % json.dumps(text)[1:-1]}))
        assert read_game(path) == read_game(tmp_path)
        assert read_game(path).payload["instruction"] == text
        assert solves(read_game(path), expert(task))


def test_trajectory_data_gives_its_description_or_the_first_annotators() -> None:
    assert instruction_in({"task_desc": "Heat a potato."}) == "Heat a potato"
    assert instruction_in({"turk_annotations": {"anns": [{"task_desc": "Cool it. "}, {"task_desc": "No"}]}}) == "Cool it"
    with pytest.raises(ValueError, match="no task_desc and no annotation"):
        instruction_in({"turk_annotations": {"anns": []}})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds neither"):
        read_game(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no game file"):
        read_game(tmp_path / "game.tw-pddl")
    (tmp_path / "initial_state.pddl").write_text("(define)")
    with pytest.raises(FileNotFoundError, match=r"traj_data\.json must lie beside it"):
        read_game(tmp_path)
    game = tmp_path / "game.tw-pddl"
    for text, sentence in (("{", "is not JSON"), ("[]", "holds no JSON object"), ('{"grammar": "x"}', "it has no 'pddl_problem'")):
        game.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            read_game(game)
    game.write_text(json.dumps({"pddl_problem": "", "grammar": "no task here"}))
    with pytest.raises(ValueError, match='no sentence "Your task is to'):
        read_game(game)
