"""Real games from disk, for the fast simulator: ``game.tw-pddl`` and ``initial_state.pddl``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.environments.base import Task
from headrace.environments.household.pddl import from_pddl

_TASK_RULE = re.compile(r'"Your task is to: ((?:[^"\\]|\\.)*)\."')


def read_game(path: str | Path) -> Task:
    """A task from a real game.

    ``path`` is a ``game.tw-pddl`` (JSON with problem and grammar, from which the instruction is read), an ``initial_state.pddl``
    (the instruction comes from the ``traj_data.json`` beside it), or a folder that holds one of them. ValueError or
    FileNotFoundError with one sentence where that fails.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in ("game.tw-pddl", "initial_state.pddl") if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds neither game.tw-pddl nor initial_state.pddl.")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"There is no game file {path}.")
    if path.suffix == ".pddl":
        facts = path.parent / "traj_data.json"
        if not facts.is_file():
            raise FileNotFoundError(f"{path} says nothing about the instruction; its traj_data.json must lie beside it.")
        return from_pddl(path.read_text(), instruction_in(_json(facts)))
    game = _json(path)
    try:
        return from_pddl(game["pddl_problem"], _instruction_in_grammar(game["grammar"]))
    except KeyError as error:
        raise ValueError(f"{path} is not a game of the ALFRED domain: it has no {error}.") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return value


def _instruction_in_grammar(grammar: str) -> str:
    found = _TASK_RULE.search(grammar)
    if found is None:
        raise ValueError('The grammar of the game has no sentence "Your task is to: ...".')
    return str(json.loads(f'"{found.group(1)}"'))


def instruction_in(trajectory: Mapping[str, Any]) -> str:
    """The instruction in ALFRED's trajectory data: its description, or the first annotator's, without the final full stop."""
    text = trajectory.get("task_desc")
    if text is None:
        annotations = trajectory.get("turk_annotations", {}).get("anns", [])
        text = annotations[0].get("task_desc") if annotations else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError("The trajectory data has no task_desc and no annotation, hence no instruction.")
    return text.strip().removesuffix(".")
