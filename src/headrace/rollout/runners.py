"""Ways to run a causal language model on new tokens of many sequences, from the fastest to the one that is always right.

``choose_runner`` takes the first whose log-probabilities equal those of a plain forward on random tokens:

- ``fused``: all new tokens in one flattened forward over a paged cache, few and compiled steps (``fused_decoder``). Llama-like
  decoders on a CPU with a C compiler.
- ``native``: the module's own forward with paged attention by the compiled kernel (``native_pages``). Any decoder whose
  layers only mix tokens through the attention interface, on such a CPU.
- ``paged``: the same with PyTorch's operations (``torch_pages``), on any device.
- ``hybrid``: sequences that feed equally many tokens share a forward; attention layers over a paged cache, linear and
  convolution layers by their states (``hybrid_states``). Qwen3.5, Qwen3-Next, LFM2 and their like.
- ``episode``: one transformers cache and one forward per sequence. Sinks, soft caps and whatever else.
- ``recompute``: no cache; the whole context again for each token.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headrace.rollout.cpu_linear import accelerate_linears, padded_rows
from headrace.rollout.fused_decoder import FusedDecoder
from headrace.rollout.hybrid_states import SlotStates
from headrace.rollout.kernels import NativeUnavailable
from headrace.rollout.native_pages import NativePagedCache
from headrace.rollout.paged_attention import NAME, PagedCache
from headrace.rollout.pages import PAGE, Span
from headrace.rollout.torch_pages import TorchPagedCache

# What rounding explains. In float32 the largest difference of a log-probability. In half precision single ones differ by
# tenths between any two orders of summation, so there the largest mean over the vocabulary: about 0.1 for SmolLM2 in
# bfloat16, and above 1 as soon as one layer attends to wrong tokens.
LARGEST = 1e-4
MEAN = {torch.bfloat16: 0.4, torch.float16: 0.1}
_LINEAR_LAYERS = ("linear_attention", "conv", "mamba", "recurrent")


class Runner(Protocol):
    path: str
    packs: tuple[tuple[str, ...], ...]  # parameters that are best held side by side in memory

    def forward(self, spans: Sequence[Span], *, version: int = 0) -> Tensor:
        """Feed the spans; float32 logits after the last token of each span that samples, in order: [samples, vocabulary].
        ``version`` only helps to lay sequences of one version side by side."""
        ...

    def truncate(self, slot: int, length: int) -> int:
        """Forget what ``slot`` holds beyond ``length`` tokens; the number of tokens that could be kept (at most ``length``)."""
        ...


class _FlatRunner(ABC):
    """All new tokens of all sequences in one flat row, padded to a length from a short list (``cpu_linear.padded_rows``);
    padding belongs to no sequence, and attention leaves it out."""

    path: str
    packs: tuple[tuple[str, ...], ...] = ()

    def __init__(self, cache: PagedCache[Any], device: torch.device) -> None:
        self._cache = cache
        self._device = device

    @abstractmethod
    def _logits(self, plan: Any, token_ids: list[int], positions: list[int], rows: Tensor) -> Tensor:
        """Logits after the tokens at ``rows``."""

    def forward(self, spans: Sequence[Span], *, version: int = 0) -> Tensor:
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for span in spans:
            token_ids.extend(span.token_ids)
            positions.extend(range(span.start, span.start + len(span.token_ids)))
            if span.sample:
                rows.append(len(token_ids) - 1)
        samples = len(rows)
        if self._device.type == "cpu":
            padding = [0] * (padded_rows(len(token_ids)) - len(token_ids))
            token_ids += padding
            positions += padding
            rows += [0] * (padded_rows(samples) - samples)
        # some models reject an empty choice of rows: keep one and drop it afterwards
        kept = torch.tensor(rows or [0], device=self._device)
        with torch.inference_mode(), self._cache.attending(spans, high=version % 2 == 1) as plan:
            return self._logits(plan, token_ids, positions, kept)[:samples].float()

    def truncate(self, slot: int, length: int) -> int:
        self._cache.pages.truncate(slot, length)
        return length


class ModuleRunner(_FlatRunner):
    """The transformers module itself, with the paged attention function."""

    def __init__(self, path: str, model: PreTrainedModel, cache: PagedCache[Any]) -> None:
        super().__init__(cache, model.device)
        self.path = path
        self._model = model
        model.set_attn_implementation(NAME)
        if self._device.type == "cpu":
            accelerate_linears(model)

    def _logits(self, plan: Any, token_ids: list[int], positions: list[int], rows: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            logits_to_keep=rows,
        ).logits
        return logits[0]


class FusedRunner(_FlatRunner):
    path = "fused"

    def __init__(self, model: PreTrainedModel, slots: int, context_limit: int) -> None:
        self._decoder = FusedDecoder(model, context_limit)
        self._native = NativePagedCache(slots, context_limit, model.dtype)
        super().__init__(self._native, model.device)
        self.packs = self._decoder.packs

    def _logits(self, plan: Any, token_ids: list[int], positions: list[int], rows: Tensor) -> Tensor:
        return self._decoder(self._native, plan, token_ids, positions, rows)


class HybridRunner:
    """Attention layers over a paged cache, linear and convolution layers by their states: sequences that feed equally many
    tokens share a forward [sequences, tokens]. A state that sums up the past cannot go back, so truncation forgets all."""

    path = "hybrid"
    packs: tuple[tuple[str, ...], ...] = ()

    def __init__(self, model: PreTrainedModel, cache: PagedCache[Any], slots: int) -> None:
        self._model = model
        self._cache = cache
        self._states = SlotStates(model, slots)
        self._argument = _cache_argument(model)
        model.set_attn_implementation(NAME)

    def forward(self, spans: Sequence[Span], *, version: int = 0) -> Tensor:
        groups: dict[tuple[int, bool], list[int]] = {}
        for index, span in enumerate(spans):
            groups.setdefault((len(span.token_ids), span.start == 0), []).append(index)
        rows: dict[int, Tensor] = {}
        for (_, fresh), members in groups.items():
            logits = self._feed([spans[index] for index in members], fresh, version)
            rows |= {index: logits[row] for row, index in enumerate(members) if spans[index].sample}
        ordered = [rows[index] for index in sorted(rows)]
        return torch.stack(ordered) if ordered else torch.empty(0, self._model.config.get_text_config().vocab_size)

    def _feed(self, spans: Sequence[Span], fresh: bool, version: int) -> Tensor:
        device, slots = self._model.device, [span.slot for span in spans]
        positions = torch.tensor([[span.start] for span in spans], device=device) + torch.arange(len(spans[0].token_ids), device=device)
        with torch.inference_mode(), self._cache.attending(spans, high=version % 2 == 1):
            states = self._states.load(slots, fresh=fresh)
            output = self._model(
                input_ids=torch.tensor([list(span.token_ids) for span in spans], device=device),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._argument: states},
            )
            self._states.save(slots, states)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def truncate(self, slot: int, length: int) -> int:
        self._cache.pages.truncate(slot, 0)
        return 0


class EpisodeRunner:
    path = "episode"
    packs: tuple[tuple[str, ...], ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._argument = _cache_argument(model)
        self._caches: dict[int, DynamicCache] = {}

    def forward(self, spans: Sequence[Span], *, version: int = 0) -> Tensor:
        rows = [logits for span in spans if (logits := self._feed(span)) is not None]
        return torch.stack(rows) if rows else torch.empty(0, self._model.config.get_text_config().vocab_size)

    def _feed(self, span: Span) -> Tensor | None:
        if span.start == 0:
            self._caches[span.slot] = DynamicCache(config=self._model.config.get_text_config())
        device = self._model.device
        positions = torch.arange(span.start, span.start + len(span.token_ids), device=device)[None]
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(span.token_ids)], device=device),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._argument: self._caches[span.slot]},
            )
        return output.logits[0, -1].float() if span.sample else None

    def truncate(self, slot: int, length: int) -> int:
        cache = self._caches.get(slot)
        if cache is None:
            return 0
        held = int(cache.get_seq_length())
        if length >= held:
            return held
        # a state that sums up the past cannot go back
        if length == 0 or not getattr(cache, "is_croppable", False) or any(cache.is_sliding):
            del self._caches[slot]
            return 0
        cache.crop(held - length)
        return length


class RecomputeRunner:
    path = "recompute"
    packs: tuple[tuple[str, ...], ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tokens: dict[int, list[int]] = {}

    def forward(self, spans: Sequence[Span], *, version: int = 0) -> Tensor:
        rows: list[Tensor] = []
        for span in spans:
            context = self._tokens.setdefault(span.slot, [])
            del context[span.start :]
            context.extend(span.token_ids)
            if span.sample:
                rows.append(plain_logits(self._model, context)[-1])
        return torch.stack(rows) if rows else torch.empty(0, self._model.config.get_text_config().vocab_size)

    def truncate(self, slot: int, length: int) -> int:
        del self._tokens.setdefault(slot, [])[length:]
        return min(length, len(self._tokens[slot]))


def _cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _paged_cache(model: PreTrainedModel, slots: int, context_limit: int) -> PagedCache[Any]:
    """Compiled where that is possible."""
    try:
        if model.device.type == "cpu":
            return NativePagedCache(slots, context_limit, model.dtype)
    except NativeUnavailable:
        pass
    return TorchPagedCache(slots, context_limit, model.device, gather=True)


def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Float32 logits [t, vocabulary] of one forward over the whole sequence, without any cache."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)], device=model.device), use_cache=False).logits[0]
    return logits.float()


PATHS = ("fused", "native", "paged", "hybrid", "episode", "recompute")


def choose_runner(
    model: PreTrainedModel, slots: int, context_limit: int, *, exact: bool = False, paths: Sequence[str] = PATHS
) -> tuple[Runner, dict[str, str]]:
    """The first runner of ``paths`` that passes the self-check, and for each that did not, why. ``model`` must be the caller's own."""
    native = model.config._attn_implementation
    refused: dict[str, str] = {}
    makers: dict[str, Callable[[], Runner]] = {
        "fused": lambda: FusedRunner(model, slots, context_limit),
        "native": lambda: ModuleRunner("native", model, NativePagedCache(slots, context_limit, model.dtype)),
        "paged": lambda: ModuleRunner("paged", model, TorchPagedCache(slots, context_limit, model.device, gather=exact)),
        "hybrid": lambda: HybridRunner(model, _paged_cache(model, slots, context_limit), slots),
        "episode": lambda: EpisodeRunner(model),
        "recompute": lambda: RecomputeRunner(model),
    }
    conversations = _conversations(model, context_limit, min(slots, 2))
    expected = [plain_logits(model, tokens).log_softmax(-1) for tokens in conversations]
    for path in paths:
        elsewhere = _mixes_elsewhere(model)
        reason = elsewhere if path in ("fused", "native", "paged") else None
        if path == "hybrid" and elsewhere is None:
            reason = "the model has attention layers only"
        if reason is None:
            try:
                runner = makers[path]()
                reason = _differs(runner, conversations, expected, MEAN.get(model.dtype))
            except Exception as error:  # whatever a foreign architecture raises, a slower path is tried
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                return runner, refused
        refused[path] = reason
        model.set_attn_implementation(native)
    raise RuntimeError(f"no way of generating agrees with a plain forward of {type(model).__name__}: {refused}")


def _mixes_elsewhere(model: PreTrainedModel) -> str | None:
    """Layers that carry state from token to token outside the attention interface would leak between sequences."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for kind in kinds:
        if any(word in kind for word in _LINEAR_LAYERS):
            return f"the model has {kind} layers"
    return None


def _conversations(model: PreTrainedModel, context_limit: int, count: int) -> list[list[int]]:
    config: Any = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    longest = max(PAGE, window if window <= 512 else 0) + 9
    generator = torch.Generator().manual_seed(0)
    lengths = [min(context_limit, longest - 20 * index) for index in range(count)]
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _differs(runner: Runner, conversations: list[list[int]], expected: list[Tensor], mean: float | None) -> str | None:
    """Feed the conversations side by side in uneven pieces (prompts, single tokens, a mixture) and compare."""
    worst = 0.0
    # lengths after each step, from the end: a prompt, one token, a chunk, the rest; the second one token by token
    pieces = [(8, 7, 3, 0), (3, 2, 1, 0)]
    cuts = [[0, *sorted({max(1, len(tokens) - left) for left in piece})] for tokens, piece in zip(conversations, pieces, strict=False)]
    for step in range(max(map(len, cuts)) - 1):
        fed = [slot for slot in range(len(cuts)) if step + 1 < len(cuts[slot])]
        spans = [Span(slot, cuts[slot][step], conversations[slot][cuts[slot][step] : cuts[slot][step + 1]]) for slot in fed]
        logprobs = runner.forward(spans).log_softmax(-1)
        for row, slot in enumerate(fed):
            difference = (logprobs[row] - expected[slot][cuts[slot][step + 1] - 1]).abs()
            found = float(difference.max() if mean is None else difference.mean())
            worst = max(worst, found) if math.isfinite(found) else math.inf
    for slot in range(len(conversations)):
        runner.truncate(slot, 0)
    allowed = LARGEST if mean is None else mean
    return None if worst <= allowed else f"log-probabilities differ from a plain forward by {worst:.2g} (allowed: {allowed:g})"
