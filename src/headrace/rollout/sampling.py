"""Sampling from the full distribution, with randomness that depends on names and not on the batch.

A token's uniform number is a pure function of (seed, turn, position): m(m(m(seed) + turn) + position) with SplitMix64's
mixer m (Steele, Lea, Flood 2014), so neither the other sequences of a batch nor their order can change it. The token is then found by
inverting the cumulative distribution in float64. Its log-probability is that of the same distribution: no temperature,
no top-p, no top-k exist here, so the trainer's ratio starts at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_BLOCK = 256


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's increment and finalizer, elementwise over uint64 with wrap-around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def _as_uint64(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def uniforms(seeds: Sequence[int], turns: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, turn, position); position is the token's index in its context."""
    state = _mix(_as_uint64(seeds))
    # chained sums, not exclusive ors of mixed parts: those would be the same for (a, b) and (b, a)
    state = _mix(state + _as_uint64(turns))
    state = _mix(state + _as_uint64(positions))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def sample(logits_nv: Tensor, uniforms_n: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, one for each row, from softmax(logits).

    ``logits_nv`` is float32 [n, vocabulary]; the token of row i is the first whose cumulative probability exceeds
    ``uniforms_n[i]``. Two levels (blocks of 256 entries, then entries) keep large vocabularies cheap. A row that is not
    finite gives the log-probability NaN and token 0; the caller must look.
    """
    vocabulary = logits_nv.shape[-1]
    top_n1 = logits_nv.amax(dim=-1, keepdim=True)
    weights_nv = (logits_nv - top_n1).exp_()
    uniform_n1 = torch.from_numpy(uniforms_n).to(logits_nv.device)[:, None]
    if vocabulary <= 4 * _BLOCK:
        cumulative_nv = weights_nv.cumsum(dim=-1, dtype=torch.float64)
        total_n1 = cumulative_nv[:, -1:]
        token_n1 = torch.searchsorted(cumulative_nv, uniform_n1 * total_n1, right=True)
    else:
        total_n1, token_n1 = _two_levels(weights_nv, uniform_n1)
    token_n1.clamp_(max=vocabulary - 1)
    logprob_n1 = logits_nv.gather(1, token_n1) - top_n1 - total_n1.log().to(torch.float32)
    return _guarded(token_n1[:, 0], logprob_n1[:, 0])


def _two_levels(weights_nv: Tensor, uniform_n1: Tensor) -> tuple[Tensor, Tensor]:
    """The total weight of each row, and the token at the given part of it: first the block, then the entry."""
    rows, vocabulary = weights_nv.shape
    blocks = -(-vocabulary // _BLOCK)
    if vocabulary % _BLOCK:
        weights_nv = torch.nn.functional.pad(weights_nv, (0, blocks * _BLOCK - vocabulary))
    weights_nbe = weights_nv.view(rows, blocks, _BLOCK)
    cumulative_nb = weights_nbe.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total_n1 = cumulative_nb[:, -1:]
    target_n1 = uniform_n1 * total_n1
    block_n1 = torch.searchsorted(cumulative_nb, target_n1, right=True).clamp_(max=blocks - 1)
    before_n1 = torch.where(block_n1 > 0, cumulative_nb.gather(1, (block_n1 - 1).clamp_(min=0)), 0.0)
    inner_ne = weights_nbe[torch.arange(rows, device=weights_nv.device), block_n1[:, 0]].to(torch.float64).cumsum(dim=-1)
    # the block's own sum rounds differently from its last cumulative entry: stay on the last entry with weight
    ceiling_n1 = torch.nextafter(inner_ne[:, -1:], torch.zeros_like(total_n1))
    inner_n1 = torch.searchsorted(inner_ne, torch.minimum(target_n1 - before_n1, ceiling_n1), right=True)
    return total_n1, block_n1 * _BLOCK + inner_n1


def greedy(logits_nv: Tensor) -> tuple[list[int], list[float]]:
    """The most probable token of each row and its log-probability under the full distribution, for evaluation."""
    token_n = logits_nv.argmax(dim=-1)
    logprob_n = logits_nv.gather(1, token_n[:, None])[:, 0] - torch.logsumexp(logits_nv, dim=-1)
    return _guarded(token_n, logprob_n)


def _guarded(token_n: Tensor, logprob_n: Tensor) -> tuple[list[int], list[float]]:
    tokens, logprobs = token_n.tolist(), logprob_n.tolist()
    for row, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            tokens[row], logprobs[row] = 0, math.nan
    return tokens, logprobs
