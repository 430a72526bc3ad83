"""Ragged rows as packed micro-batches."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.trajectory import TokenRow
from headrace.training.attention import row_layout
from headrace.training.packing import micro_batches, pack, plan


def row(tokens: str, actions: str) -> TokenRow:
    """``row("abcd", "..xx")``: letters are token ids, x marks action tokens; their log-probability is minus their position."""
    mask = tuple(mark == "x" for mark in actions)
    return TokenRow(
        tuple(ord(letter) for letter in tokens),
        mask,
        tuple(-float(position) if action else 0.0 for position, action in enumerate(mask)),
        tuple(0 if action else -1 for action in mask),
    )


def letters(values: torch.Tensor) -> str:
    return "".join(chr(int(value)) for value in values)


def test_rows_lie_end_to_end_with_restarting_positions_and_nothing_between() -> None:
    packed = pack([[row("abcd", "..xx")], [row("efghij", "..x..x")]]).rows
    # Longest first; the last action token of a row need not be fed.
    assert letters(packed.token_ids) == "efghi" + "abc"
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert packed.lengths == (5, 3)


def test_the_token_before_an_action_predicts_it() -> None:
    packed = pack([[row("abcd", "..xx")], [row("efghij", "..x..x")]]).rows
    assert letters(packed.token_ids[packed.predict_m]) == "fi" + "bc"
    assert letters(packed.target_m) == "gj" + "cd"


def test_scores_come_back_left_aligned_with_all_rows_of_a_trajectory_joined() -> None:
    batch = pack([[row("abc", ".x.")], [row("defg", "..xx"), row("hijkl", ".x.x.")]])
    spread = batch.spread(batch.rows.target_m)
    assert [letters(values[mask]) for values, mask in zip(spread, batch.mask_nt, strict=True)] == ["b", "fgik"]
    assert batch.mask_nt.tolist() == [[True, False, False, False], [True, True, True, True]]
    assert batch.rollout_nt.tolist() == [[-1.0, 0.0, 0.0, 0.0], [-2.0, -3.0, -1.0, -3.0]]


def test_spreading_is_differentiable() -> None:
    batch = pack([[row("abc", ".xx")], [row("defg", "...x")]])
    values = torch.arange(3.0, requires_grad=True)
    (batch.spread(values) * torch.tensor([[1.0, 2.0], [3.0, 100.0]])).sum().backward()
    assert sorted(values.grad.tolist()) == [1.0, 2.0, 3.0]


def test_tokens_after_the_last_action_are_not_fed() -> None:
    assert letters(pack([[row("abcdefgh", ".x......")]]).rows.token_ids) == "a"


def test_a_row_without_actions_costs_nothing_and_keeps_its_trajectory() -> None:
    batch = pack([[row("abc", "...")], [row("def", "..x")]])
    assert letters(batch.rows.token_ids) == "de"
    assert batch.mask_nt.tolist() == [[False], [True]]


def test_a_batch_without_any_action_is_empty_but_valid() -> None:
    batch = pack([[row("abc", "...")]])
    assert batch.rows.tokens == batch.rows.scored == 0
    assert batch.spread(torch.zeros(0)).shape == (1, 0)


def test_an_action_at_position_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="trajectory 1: the token at position 0"):
        pack([[row("ab", ".x")], [row("ab", "xx")]])


def test_other_tokens_can_be_scored_too() -> None:
    batch = pack([[row("abcd", "..x.")]], scored=lambda r: [position > 0 for position in range(len(r.token_ids))])
    assert letters(batch.rows.target_m) == "bcd"


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_micro_batches_hold_every_item_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = plan(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)
    assert all(group for group in groups)


def test_micro_batches_are_even() -> None:
    sizes = [sum([10] * len(group)) for group in plan([10] * 12, 90)]
    assert sizes == [60, 60]


def test_whole_trajectories_stay_together_and_keep_their_names() -> None:
    attempts = [[row("a" + "b" * n, "." + "x" * n) for n in (3, 4)] for _ in range(5)]
    batches = micro_batches(attempts, 20, members=[10, 11, 12, 13, 14])
    assert sorted(member for batch in batches for member in batch.members) == [10, 11, 12, 13, 14]
    assert all(batch.mask_nt.sum() == 7 * len(batch.members) for batch in batches)


def test_rows_split_into_packs_that_score_the_same_tokens_in_the_same_order() -> None:
    whole = pack([[row("abcd", "..xx"), row("efghij", "..x..x"), row("kl", ".x")]]).rows
    pieces = whole.split(6)
    assert [letters(piece.token_ids) for piece in pieces] == ["efghi", "abck"]
    assert "".join(letters(piece.target_m) for piece in pieces) == letters(whole.target_m)
    assert "".join(letters(piece.token_ids[piece.predict_m]) for piece in pieces) == letters(whole.token_ids[whole.predict_m])
    assert [piece.lengths for piece in pieces] == [(5,), (3, 1)]
    assert [piece.position_ids.tolist() for piece in pieces] == [[0, 1, 2, 3, 4], [0, 1, 2, 0]]
    assert [len(piece.lengths) for piece in whole.split(1)] == [1, 1, 1]
    assert len(whole.split(100)) == 1


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        plan([1], 0)


@given(st.lists(st.tuples(st.integers(2, 12), st.integers(1, 3)), min_size=1, max_size=8), st.integers(0, 1000))
def test_packing_equals_picking_tokens_one_by_one(shapes: list[tuple[int, int]], seed: int) -> None:
    generator = random.Random(seed)
    attempts = []
    for length, rows in shapes:
        masks = [[position > 0 and generator.random() < 0.5 for position in range(length)] for _ in range(rows)]
        attempts.append(
            [
                TokenRow(tuple(generator.randrange(99) for _ in m), tuple(m), (0.0,) * length, tuple(0 if a else -1 for a in m))
                for m in masks
            ]
        )
    batch = pack(attempts)
    targets, contexts = batch.spread(batch.rows.target_m), batch.spread(batch.rows.token_ids[batch.rows.predict_m])
    for i, rows_of in enumerate(attempts):
        places = [(r, position) for r in rows_of for position, action in enumerate(r.action_mask) if action]
        assert targets[i][batch.mask_nt[i]].tolist() == [r.token_ids[position] for r, position in places]
        assert contexts[i][batch.mask_nt[i]].tolist() == [r.token_ids[position - 1] for r, position in places]


def test_blocks_batch_equal_lengths_only_without_slack() -> None:
    layout = row_layout((5, 5, 3, 2, 2))
    assert [(block.rows, block.length, block.gather) for block in layout.blocks] == [(2, 5, None), (1, 3, None), (2, 2, None)]


def test_blocks_with_slack_hold_at_most_that_much_padding() -> None:
    layout = row_layout((10, 9, 9, 4, 4), slack=0.15)
    assert [(block.rows, block.length, block.tokens) for block in layout.blocks] == [(3, 10, 28), (2, 4, 8)]
    ragged = layout.blocks[0]
    assert ragged.gather is not None and ragged.scatter is not None
    assert ragged.gather.view(3, 10)[1].tolist() == [*range(10, 19), 28]  # 28 stands for padding
    assert ragged.gather[ragged.scatter].tolist() == list(range(28))
