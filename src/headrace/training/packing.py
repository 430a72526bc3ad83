"""Ragged rows -> packed micro-batches without padding waste, and their scores -> [n, t].

A micro-batch lays its rows end to end ([N] tokens, positions restarting per row) and remembers where the scored tokens
are. Scores come back compactly: row i of an [n, t] array holds the scored tokens of trajectory i, all its rows after one
another, from the left; ``mask_nt`` says where they are. Objectives do not care about padding, so this is all they need.

Whole trajectories stay together, because per-sequence objectives need all their tokens at once; a trajectory longer
than the budget is a micro-batch of its own, and its rows can still be run in several passes (``PackedRows.split``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.rollout.trajectory import TokenRow

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """Rows laid end to end, longest first.

    token_ids, position_ids: int64 [N]. ``lengths`` of the rows in order. ``predict_m`` [m]: index into N of the hidden state
    that predicts scored token m; ``target_m`` [m]: that token.
    """

    token_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    predict_m: Tensor
    target_m: Tensor

    @property
    def tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def scored(self) -> int:
        return int(self.predict_m.shape[0])

    def split(self, max_tokens: int) -> list[PackedRows]:
        """The same rows in packs of at most ``max_tokens`` (a longer row alone); their scored tokens follow one another as here."""
        pieces: list[PackedRows] = []
        row = start = scored = 0
        while row < len(self.lengths):
            stop, tokens = row + 1, self.lengths[row]
            while stop < len(self.lengths) and tokens + self.lengths[stop] <= max_tokens:
                stop, tokens = stop + 1, tokens + self.lengths[stop]
            end = scored + int((self.predict_m[scored:] < start + tokens).sum())
            fed, of_them = slice(start, start + tokens), slice(scored, end)
            places_m = self.predict_m[of_them] - start
            pieces.append(PackedRows(self.token_ids[fed], self.position_ids[fed], self.lengths[row:stop], places_m, self.target_m[of_them]))
            row, start, scored = stop, start + tokens, end
        return pieces

    def to(self, device: torch.device | str) -> PackedRows:
        return PackedRows(
            self.token_ids.to(device), self.position_ids.to(device), self.lengths, self.predict_m.to(device), self.target_m.to(device)
        )


@dataclass(frozen=True)
class MicroBatch:
    """Some trajectories of an update, ready to be scored.

    ``members``: their positions in the sequence that was packed, one per row of the [n, t] arrays. ``cell_m``: where scored
    token m goes in the flattened [n, t]. ``mask_nt``: bool, True on scored tokens. ``rollout_nt``: float32, what the
    generation engine reported, 0 off the mask.
    """

    rows: PackedRows
    members: tuple[int, ...]
    cell_m: Tensor
    mask_nt: Tensor
    rollout_nt: Tensor

    def spread(self, values_m: Tensor) -> Tensor:
        """[m] values of the scored tokens -> [n, t], 0 elsewhere; differentiable."""
        flat = values_m.new_zeros(self.mask_nt.numel()).index_copy(0, self.cell_m, values_m)
        return flat.view(self.mask_nt.shape)

    def to(self, device: torch.device | str) -> MicroBatch:
        return MicroBatch(self.rows.to(device), self.members, self.cell_m.to(device), self.mask_nt.to(device), self.rollout_nt.to(device))


def plan(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of ``lengths`` in groups of at most ``max_tokens``, longest first, ties in order, neighbours in length together
    (so that attention meets rows of like length). One longer than the budget stands alone.

    The groups are as even as whole items allow, so no last small group wastes a pass.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    remaining = sum(lengths)
    groups: list[list[int]] = []
    group: list[int] = []
    held = 0
    target = _even_share(remaining, max_tokens)
    for i in order:
        if group and (held + lengths[i] > max_tokens or held + lengths[i] / 2 > target):
            groups.append(group)
            remaining -= held
            target = _even_share(remaining, max_tokens)
            group, held = [], 0
        group.append(i)
        held += lengths[i]
    if group:
        groups.append(group)
    return groups


def _even_share(tokens: int, max_tokens: int) -> float:
    return tokens / max(1, -(-tokens // max_tokens))


@dataclass(frozen=True)
class _Piece:
    """One row of a pack: its fed tokens, the positions of its scored tokens, and the cell of the first of them."""

    tokens: IntArray
    scored: IntArray
    cell: int

    @property
    def length(self) -> int:
        """The last scored token itself need not be fed, nor what follows it."""
        return int(self.scored[-1])


def action_mask(row: TokenRow) -> Sequence[bool]:
    return row.action_mask


def pack(
    attempts: Sequence[Sequence[TokenRow]],
    *,
    members: Sequence[int] | None = None,
    scored: Callable[[TokenRow], Sequence[bool]] = action_mask,
) -> MicroBatch:
    """Pack the rows of ``attempts`` (one sequence of rows per trajectory) for scoring the tokens that ``scored`` picks.

    What follows a row's last scored token cannot change a score and is left out; a row with nothing scored vanishes.
    A scored token at position 0 has nothing that predicts it: ValueError.
    """
    places = [[np.flatnonzero(np.asarray(scored(row), dtype=bool)) for row in rows] for rows in attempts]
    counts = np.array([sum(place.size for place in row_places) for row_places in places], dtype=np.int64)
    width = int(counts.max(initial=0))
    mask = np.arange(width)[None, :] < counts[:, None]
    rollout = np.zeros(mask.shape, dtype=np.float32)
    pieces: list[_Piece] = []
    for i, rows in enumerate(attempts):
        slot = 0
        for row, place in zip(rows, places[i], strict=True):
            if not place.size:
                continue
            if place[0] == 0:
                raise ValueError(f"trajectory {i}: the token at position 0 is to be scored, but nothing precedes it")
            rollout[i, slot : slot + place.size] = np.asarray(row.logprobs, dtype=np.float32)[place]
            pieces.append(_Piece(np.asarray(row.token_ids, dtype=np.int64), place, i * width + slot))
            slot += place.size
    rows_packed, cells = _lay_end_to_end(sorted(pieces, key=lambda piece: (-piece.length, piece.cell)))
    return MicroBatch(
        rows=rows_packed,
        members=tuple(range(len(attempts)) if members is None else members),
        cell_m=cells,
        mask_nt=torch.from_numpy(mask),
        rollout_nt=torch.from_numpy(rollout),
    )


def _lay_end_to_end(pieces: Sequence[_Piece]) -> tuple[PackedRows, Tensor]:
    starts = np.cumsum([0, *(piece.length for piece in pieces)])
    rows = PackedRows(
        token_ids=_join(piece.tokens[: piece.length] for piece in pieces),
        position_ids=_join(np.arange(piece.length) for piece in pieces),
        lengths=tuple(piece.length for piece in pieces),
        predict_m=_join(piece.scored - 1 + start for piece, start in zip(pieces, starts[:-1], strict=True)),
        target_m=_join(piece.tokens[piece.scored] for piece in pieces),
    )
    return rows, _join(piece.cell + np.arange(piece.scored.size) for piece in pieces)


def _join(parts: Iterable[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64, copy=False))


def micro_batches(attempts: Sequence[Sequence[TokenRow]], max_tokens: int, *, members: Sequence[int] | None = None) -> list[MicroBatch]:
    """``attempts`` as micro-batches of at most ``max_tokens`` context tokens each; ``members`` name them (default: their positions)."""
    names = range(len(attempts)) if members is None else members
    lengths = [sum(len(row.token_ids) for row in rows) for rows in attempts]
    return [pack([attempts[i] for i in group], members=[names[i] for i in group]) for group in plan(lengths, max_tokens)]
