"""From packed rows to scores through one transformers model.

Two layouts and two heads, the faster of each where a self-check shows that it gives what plain forward passes give:

| layout | rows go through the model as | for |
| --- | --- | --- |
| packed | one [1, N] sequence, attention within rows | every model whose layers mix positions by attention alone |
| padded | [rows, longest] rectangles of neighbours in length, padding on the right | the rest: causal layers never look right |

| head | logits |
| --- | --- |
| chunked | rectangle by rectangle, never whole (``logprobs.py``) |
| whole | the model's own, at the scored positions only: for heads that are no plain matrix |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.errors import UserError
from headrace.rollout.trajectory import TokenRow
from headrace.training import attention
from headrace.training.logprobs import OutputHead, TokenScores, scores_from_logits, token_scores
from headrace.training.packing import PackedRows, pack

Layout = Literal["packed", "padded"]
HeadKind = Literal["chunked", "whole"]

log = logging.getLogger(__name__)

_PROBE_LENGTHS = (37, 33, 19, 5)
_ACCELERATOR_SLACK = 0.125
_PADDED_SLACK = 0.15
_TOLERANCE, _TOLERANCE_HALF = 3e-4, 0.05
_LEAK, _LEAK_HALF = 1e-5, 1e-3
_SCALES = (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1))
"""Settings by which known architectures multiply or divide their logits; the self-check catches the unknown ones."""


class Forward:
    """Scores of packed rows under ``model``. The constructor runs the self-check and sets the model's attention function."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layout: Layout = "padded"
        self.head_kind: HeadKind = "whole"
        self._check()

    def __call__(self, rows: PackedRows, *, entropy: bool = False) -> TokenScores:
        return self._score(rows, self.layout, self.head_kind, entropy)

    def _score(self, rows: PackedRows, layout: Layout, head_kind: HeadKind, entropy: bool = False) -> TokenScores:
        if not rows.scored:
            nothing = torch.zeros(0, device=rows.token_ids.device)
            return TokenScores(nothing, nothing if entropy else None)
        collect = self._packed if layout == "packed" else self._padded
        if head_kind == "whole":
            return scores_from_logits(collect(rows, self._logits), rows.target_m, entropy=entropy)
        return token_scores(collect(rows, self._hidden), output_head(self.model), rows.target_m, entropy=entropy)

    def _hidden(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _logits(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def _packed(self, rows: PackedRows, run: Callable[..., Tensor]) -> Tensor:
        """[m, width] outputs at the scored positions from one [1, N] pass."""
        slack = 0.0 if rows.token_ids.device.type == "cpu" else _ACCELERATOR_SLACK
        output = run(
            input_ids=rows.token_ids[None],
            position_ids=rows.position_ids[None],
            # A mask that is already four-dimensional is handed on as it is; without it transformers would build an N x N one.
            attention_mask=rows.token_ids.new_zeros((1, 1, 1, 1), dtype=torch.bool),
            row_layout=attention.row_layout(rows.lengths, slack=slack, device=rows.token_ids.device),
        )
        return output[0].index_select(0, rows.predict_m)

    def _padded(self, rows: PackedRows, run: Callable[..., Tensor]) -> Tensor:
        """[m, width] outputs at the scored positions from one pass per rectangle of rows."""
        layout = attention.row_layout(rows.lengths, slack=_PADDED_SLACK, device=rows.token_ids.device)
        outputs = []
        bounds = [0, *torch.tensor([block.tokens for block in layout.blocks]).cumsum(0).tolist()]
        cuts = torch.searchsorted(rows.predict_m, torch.tensor(bounds, device=rows.predict_m.device)).tolist()
        for block, start, first, last in zip(layout.blocks, bounds[:-1], cuts[:-1], cuts[1:], strict=True):
            ids, place_m = rows.token_ids[start : start + block.tokens], rows.predict_m[first:last] - start
            if block.gather is not None and block.scatter is not None:
                ids, place_m = nn.functional.pad(ids, (0, 1)).index_select(0, block.gather), block.scatter.index_select(0, place_m)
            outputs.append(run(input_ids=ids.view(block.rows, block.length)).flatten(0, 1).index_select(0, place_m))
        return torch.cat(outputs)

    @torch.no_grad()
    def _check(self) -> None:
        """Choose the head, then the layout, by comparing with a plain forward of each row alone."""
        self.model.train(False)
        probe, reference = self._probe()
        if self._agrees(probe, reference, "padded", "chunked"):
            self.head_kind = "chunked"
        elif not self._agrees(probe, reference, "padded", "whole"):
            raise UserError(
                f"{type(self.model).__name__}: log-probabilities of padded rows differ from those of each row alone, "
                "so this model cannot be trained here"
            )
        usual = self.model.config._attn_implementation
        if (
            self._take_attention(attention.PACKED_ATTENTION)
            and self._agrees(probe, reference, "packed", self.head_kind)
            and self._is_separate(probe, reference)
        ):
            self.layout = "packed"
        else:
            self._take_attention(usual)

    def _take_attention(self, name: str) -> bool:
        try:
            self.model.set_attn_implementation(name)
        except (ValueError, ImportError, NotImplementedError) as error:
            log.info("attention %s does not fit %s: %s", name, type(self.model).__name__, error)
            return False
        return bool(self.model.config.get_text_config()._attn_implementation == name)

    def _probe(self) -> tuple[PackedRows, Tensor]:
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or max(_PROBE_LENGTHS)
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(config.vocab_size, (min(length, limit) + 1,), generator=generator) for length in _PROBE_LENGTHS]
        attempts = [[_all_scored(text.tolist())] for text in texts]
        rows = pack(attempts).rows.to(self.model.device)
        logits = [self.model(input_ids=text[None, :-1].to(self.model.device), use_cache=False).logits[0] for text in texts]
        scores = [scores_from_logits(part, text[1:].to(self.model.device)).logprobs_m for part, text in zip(logits, texts, strict=True)]
        return rows, torch.cat(scores)

    def _agrees(self, probe: PackedRows, reference_m: Tensor, layout: Layout, head_kind: HeadKind) -> bool:
        """Whether scores equal the reference to rounding, measured against how much the reference varies from token to token."""
        try:
            scores_m = self._score(probe, layout, head_kind).logprobs_m
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            log.info("%s rows with the %s head do not fit %s: %s", layout, head_kind, type(self.model).__name__, error)
            return False
        return self._distance(scores_m, reference_m) <= self._tolerance(_TOLERANCE, _TOLERANCE_HALF) * float(reference_m.std())

    def _is_separate(self, probe: PackedRows, reference_m: Tensor) -> bool:
        """Whether other tokens in the first row leave the rest as it was: finer than agreement, since the same shapes round alike."""
        first = probe.lengths[0]
        changed = replace(probe, token_ids=torch.cat([probe.token_ids[:first].flip(0), probe.token_ids[first:]]))
        before_m, after_m = (self._score(rows, "packed", self.head_kind).logprobs_m[first:] for rows in (probe, changed))
        return self._distance(before_m, after_m) <= self._tolerance(_LEAK, _LEAK_HALF) * float(reference_m.std())

    def _tolerance(self, full: float, half: float) -> float:
        return full if self.model.dtype in (torch.float32, torch.float64) else half

    @staticmethod
    def _distance(left_m: Tensor, right_m: Tensor) -> float:
        return float((left_m - right_m).square().mean().sqrt())


def output_head(model: PreTrainedModel) -> OutputHead:
    """The head as a matrix, with the scaling and soft cap that its configuration states; TypeError where it is no plain linear layer."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear:
        raise TypeError(f"the output head is a {type(head).__name__}")
    config = model.config.get_text_config()
    scale = 1.0
    for name, power in _SCALES:
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            scale *= float(value) ** power
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(head.weight, head.bias, scale, None if softcap is None else float(softcap))


def _all_scored(token_ids: list[int]) -> TokenRow:
    length = len(token_ids)
    return TokenRow(tuple(token_ids), (False, *(True,) * (length - 1)), (0.0,) * length, (-1,) * length)
