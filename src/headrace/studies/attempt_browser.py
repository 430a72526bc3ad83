"""A sample of attempts as data for the page's script: what was said, token by token, and what it counted for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.rollout.trajectory import TokenRow, Trajectory
from headrace.studies.markup import Html, el, json_script
from headrace.studies.run_data import RunData, Used, read_attempts, sample

MOST_ATTEMPTS = 96
MOST_BYTES = 3_000_000


def attempt_browser(runs: Sequence[RunData], *, most: int = MOST_ATTEMPTS, most_bytes: int = MOST_BYTES) -> Html:
    """The browser, holding at most ``most`` attempts and about ``most_bytes`` of data over all runs; it says how many of how many."""
    tables = [_TokenTable(run.folder) for run in runs]
    shown: list[dict[str, Any]] = []
    for number, (run, table) in enumerate(zip(runs, tables, strict=True)):
        budget = most_bytes // len(runs)
        for used, trajectory in read_attempts(run.folder, sample(run.facts.used, max(1, most // len(runs)))):
            attempt = _attempt(number, used, trajectory, table)
            budget -= len(json.dumps(attempt))
            if budget < 0:
                break
            shown.append(attempt)
    total = sum(len(run.facts.used) for run in runs)
    if not shown:
        return el("p", "No attempt has been trained on yet.", class_="empty")
    data = {"runs": [run.name for run in runs], "tokens": [table.entries for table in tables], "attempts": shown}
    which = "all" if len(shown) == total else f"a sample of {len(shown)}, spread over updates, task kinds, successes and failures, of"
    note = el("p", f"Here: {which} {total} attempts that were trained on.", class_="note")
    script_needed = el("noscript", el("p", "The browser of attempts needs a script to be allowed; everything above does not."))
    return el("div", note, script_needed, el("div", id="attempts"), json_script("attempt-data", data))


def _attempt(run: int, used: Used, trajectory: Trajectory, table: _TokenTable) -> dict[str, Any]:
    dispatch, receipt, consumption = used.dispatch, used.receipt, used.consumption
    return {
        "run": run,
        "dispatch": dispatch.number,
        "task": dispatch.task,
        "kind": dispatch.kind,
        "update": consumption.batch + 1,
        "version": dispatch.version,
        "staleness": used.version_at_use - dispatch.version,
        "group": dispatch.group,
        "success": receipt.success,
        "outcome": round(receipt.outcome, 4),
        "value": None if dispatch.alpha is None else round(dispatch.value, 4),
        "evidence": None if dispatch.alpha is None or dispatch.beta is None else round(dispatch.alpha + dispatch.beta, 2),
        "advantage": round(consumption.advantage, 4),
        "reason": receipt.reason,
        "unmatched": trajectory.unmatched_actions,
        "actionTokens": receipt.action_tokens,
        "turns": [[turn.observation, turn.action] for turn in trajectory.turns],
        "rows": [_row(row, table) for row in trajectory.rows],
    }


def _row(row: TokenRow, table: _TokenTable) -> dict[str, Any]:
    """``mask`` holds lengths of runs, the first of tokens that were not sampled; log-probabilities are those of sampled tokens."""
    lengths = [sum(1 for _ in run) for _, run in itertools.groupby(row.action_mask)]
    if row.action_mask and row.action_mask[0]:
        lengths.insert(0, 0)
    sampled = [i for i, mask in enumerate(row.action_mask) if mask]
    return {
        "ids": [table.place(token) for token in row.token_ids],
        "mask": lengths,
        "logprobs": [round(row.logprobs[i], 3) for i in sampled],
        "versions": sorted({row.versions[i] for i in sampled}),
    }


class _TokenTable:
    """The distinct tokens of a run's sample: [id, text or null, special]. Text needs the tokenizer that the run leaves in ``policy/``."""

    def __init__(self, folder: Path) -> None:
        self.entries: list[tuple[int, str | None, bool]] = []
        self._places: dict[int, int] = {}
        self._tokenizer = _tokenizer(folder / "policy" / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder() if self._tokenizer else {}
        self._special = {token for token, how in added.items() if how.special}

    def place(self, token: int) -> int:
        if token not in self._places:
            self._places[token] = len(self.entries)
            self.entries.append((token, self._text(token), token in self._special))
        return self._places[token]

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        piece = self._tokenizer.id_to_token(token) or ""
        if piece.startswith("▁") and not text.startswith(" "):  # such tokenizers drop the first space of a text
            text = f" {text}"
        return text


def _tokenizer(path: Path) -> Any:
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
