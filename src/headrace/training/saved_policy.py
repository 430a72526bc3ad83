"""The policy in a run's directory: an ordinary Hugging Face folder that says how many updates are behind it."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.training.policy import Policy

FOLDER = "policy"
_NOTE = "headrace.json"


def save_policy(policy: Policy, run: Path, updates: int) -> None:
    """Replace the run's policy; whoever reads it meanwhile finds the old one or the new one, whole."""
    policy.save(run / FOLDER, notes={_NOTE: json.dumps({"updates": updates}) + "\n"})


def saved_updates(run: Path) -> int | None:
    """How many updates the run's policy has behind it; None where there is no policy, or none that says so."""
    try:
        return int(json.loads((run / FOLDER / _NOTE).read_text(encoding="utf-8"))["updates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
