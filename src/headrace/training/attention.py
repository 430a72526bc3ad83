"""Exact attention for rows laid end to end.

Transformers calls the attention function that ``config._attn_implementation`` names and hands it whatever keyword
arguments the model was called with. ``headrace_packed`` is such a function: given a ``RowLayout`` it cuts the packed axis
into blocks of rows, runs causal attention within each row, and puts the results back in order. No row sees another, and
there is no N x N mask. Without a layout it is transformers' own ``sdpa``, so the model stays an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PACKED_ATTENTION = "headrace_packed"


@dataclass(frozen=True)
class Block:
    """Neighbouring rows that one attention call handles: ``rows`` of them, padded on the right to ``length`` where they differ.

    ``gather`` is None where all rows have the same length; else it maps the padded rectangle onto the block's tokens
    (entry ``tokens`` stands for padding) and ``scatter`` maps the tokens back into the flattened rectangle.
    """

    rows: int
    length: int
    tokens: int
    gather: Tensor | None = None
    scatter: Tensor | None = None


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of a packed axis begin and end, as blocks in order."""

    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)


def row_layout(lengths: Sequence[int], *, slack: float = 0.0, device: torch.device | str = "cpu") -> RowLayout:
    """Blocks over neighbouring rows of ``lengths``.

    ``slack`` is the padding that a block may hold beside its real tokens, as a fraction of its rectangle: 0 batches only
    rows of equal length (best where a call costs little, as on a CPU), larger values trade padding for fewer calls.
    Padding stands to the right of a row, where causal attention never looks.
    """
    blocks: list[Block] = []
    start = 0
    while start < len(lengths):
        stop, longest, tokens = start + 1, lengths[start], lengths[start]
        while stop < len(lengths):
            wider, more = max(longest, lengths[stop]), tokens + lengths[stop]
            if wider * (stop + 1 - start) * (1.0 - slack) > more:
                break
            stop, longest, tokens = stop + 1, wider, more
        blocks.append(_block(lengths[start:stop], longest, device))
        start = stop
    return RowLayout(tuple(blocks))


def _block(lengths: Sequence[int], longest: int, device: torch.device | str) -> Block:
    tokens = sum(lengths)
    if tokens == longest * len(lengths):
        return Block(len(lengths), longest, tokens)
    row_lengths = torch.tensor(lengths)
    real = torch.arange(longest)[None, :] < row_lengths[:, None]
    gather = torch.full((len(lengths), longest), tokens)
    gather[real] = torch.arange(tokens)
    scatter = real.flatten().nonzero().flatten()
    return Block(len(lengths), longest, tokens, gather.flatten().to(device), scatter.to(device))


@lru_cache(maxsize=8)
def _banded_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a query may look: itself and the ``window - 1`` tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    row_layout: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within rows: query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D].

    Raises NotImplementedError for what it does not compute (logit soft caps, attention sinks, position biases,
    non-causal attention): the policy's self-check then takes the slower path.
    """
    if row_layout is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
        return output, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"packed attention does not compute {name}")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotImplementedError("packed attention is causal")
    sizes = [block.tokens for block in row_layout.blocks]
    parts = zip(row_layout.blocks, torch.split(query, sizes, 2), torch.split(key, sizes, 2), torch.split(value, sizes, 2), strict=True)
    outputs = [
        _from_rows(_attend(_to_rows(q, block), _to_rows(k, block), _to_rows(v, block), dropout, scaling, sliding_window), block)
        for block, q, k, v in parts
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def _to_rows(states: Tensor, block: Block) -> Tensor:
    """[1, H, tokens, D] -> [rows, H, length, D]."""
    heads, _, width = states.shape[1:]
    if block.gather is not None:
        states = pad(states[0], (0, 0, 0, 1)).index_select(1, block.gather)
    return states.reshape(heads, block.rows, block.length, width).transpose(0, 1)


def _from_rows(output: Tensor, block: Block) -> Tensor:
    """[rows, H, length, D] -> [tokens, H, D]."""
    flat = output.transpose(1, 2).flatten(0, 1)
    return flat if block.scatter is None else flat.index_select(0, block.scatter)


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None) -> Tensor:
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    mask = _banded_mask(length, window, query.device) if window is not None and length > window else None
    native = groups > 1 and mask is None and key.shape[-1] == value.shape[-1] <= 256
    if groups > 1 and not native:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=native
    )


def register() -> None:
    """Make the function known to transformers under ``PACKED_ATTENTION``; masks are built as for ``sdpa``. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, sdpa_mask)


register()
