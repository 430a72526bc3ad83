"""The forward of Llama-like decoders in few steps, for small models on a CPU, where dispatch costs as much as arithmetic.

It computes what the transformers modules compute, from the same parameters: matrix products through oneDNN with the
projections of one input taken together, attention and the elementwise steps by the compiled kernels. Which models it
takes is decided by their class and their parts; whether it is right, by the engine's self-check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.rollout.cpu_linear import linear
from headrace.rollout.native_pages import NativePagedCache, NativePlan

_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
# rotary embeddings that are a function of the position alone
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")


class NotFusable(RuntimeError):
    """The model is not one of those that this decoder can compute; the message says why."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of one layer: (weight, bias) for the products."""

    norm_in: Tensor
    qkv: tuple[Tensor, Tensor | None]
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: tuple[Tensor, Tensor | None]
    norm_mlp: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    scaling: float
    window: int


class FusedDecoder:
    """``packs`` names the parameters that are best held side by side in memory: then nothing is copied when weights change."""

    def __init__(self, model: PreTrainedModel, context_limit: int) -> None:
        _check(model)
        config: Any = model.config
        self._model: Any = model
        self._heads, self._shared = config.num_attention_heads, config.num_key_value_heads
        self._size: int = model.model.layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self.packs = tuple(_packs(model))
        with torch.inference_mode():
            positions = torch.arange(context_limit)[None]
            cosine, sine = model.model.rotary_emb(torch.empty(1, 1, 1), positions)
        half = self._size // 2
        if cosine.shape[-1] != self._size or not torch.equal(cosine[..., :half], cosine[..., half:]):
            raise NotFusable("its rotary embedding does not turn the two halves of a head")
        self._cosine, self._sine = cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()
        self._bound: Tensor | None = None
        self._layers: list[_Layer] = []

    def __call__(
        self, cache: NativePagedCache, plan: NativePlan, token_ids: Sequence[int], positions: Sequence[int], rows: Tensor
    ) -> Tensor:
        """Logits [len(rows), vocabulary] after the tokens at ``rows`` of the flat row."""
        model, kernels = self._model, cache.kernels
        self._bind()
        where = torch.tensor(positions)
        cosine, sine = self._cosine.index_select(0, where), self._sine.index_select(0, where)
        x = nn.functional.embedding(torch.tensor(token_ids), model.model.embed_tokens.weight)
        normed, turned = torch.empty_like(x), self._heads + self._shared
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = linear(kernels.norm(x, delta, layer.norm_in, self._eps, normed), *layer.qkv)
            if layer.query_norm is not None and layer.key_norm is not None:
                kernels.norm_heads(qkv, 0, self._heads, self._size, layer.query_norm, self._eps)
                kernels.norm_heads(qkv, self._heads, self._shared, self._size, layer.key_norm, self._eps)
            kernels.rotate(qkv, turned, self._size, cosine, sine)
            query, key, value = torch.split(qkv.view(len(x), -1, self._size), [self._heads, self._shared, self._shared], dim=1)
            attended = cache.attend(plan, index, query, key, value, layer.scaling, layer.window)
            delta = linear(attended.view(len(x), -1), *layer.out)
            both = linear(kernels.norm(x, delta, layer.norm_mlp, self._eps, normed), *layer.gate_up)
            delta = linear(kernels.gate(both, both.new_empty(len(x), both.shape[1] // 2)), *layer.down)
        assert delta is not None
        x, delta = x.index_select(0, rows), delta.index_select(0, rows)
        last = kernels.norm(x, delta, model.model.norm.weight, self._eps, torch.empty_like(x))
        return linear(last, model.lm_head.weight, model.lm_head.bias)

    def _bind(self) -> None:
        """Look the tensors up again when the module has been pointed at others."""
        first: Tensor = self._model.model.layers[0].self_attn.q_proj.weight
        if self._bound is not None and self._bound.data_ptr() == first.data_ptr():
            return
        # holding it keeps its address from being used again
        self._bound = first.detach()
        self._layers = [self._lookup(layer) for layer in self._model.model.layers]

    def _lookup(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        per_head = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        window = getattr(attention, "sliding_window", None)
        if type(self._model).__name__ == "MistralForCausalLM":
            window = self._model.config.sliding_window
        query, mlp = (_together([layer.get_submodule(name) for name in names]) for names in _PROJECTIONS)
        return _Layer(
            norm_in=layer.input_layernorm.weight.detach(),
            qkv=query,
            query_norm=None if per_head[0] is None else per_head[0].weight.detach(),
            key_norm=None if per_head[1] is None else per_head[1].weight.detach(),
            out=_together([attention.o_proj]),
            norm_mlp=layer.post_attention_layernorm.weight.detach(),
            gate_up=mlp,
            down=_together([layer.mlp.down_proj]),
            scaling=attention.scaling,
            window=window or 0,
        )


def _check(model: PreTrainedModel) -> None:
    kind = type(model)
    if kind.__name__ not in _CLASSES or not kind.__module__.startswith("transformers.models."):
        raise NotFusable(f"{kind.__name__} is none of {', '.join(_CLASSES)}")
    config: Any = model.config
    if config.hidden_act != "silu":
        raise NotFusable(f"its activation is {config.hidden_act!r}")
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in _STATIC_ROTARY:
        raise NotFusable(f"its rotary embedding is {rotary!r}")
    if model.device.type != "cpu":
        raise NotFusable(f"it is on {model.device}")
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(module) is not nn.Linear:
            raise NotFusable(f"{name} is a {type(module).__name__}")
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotFusable(f"{name or 'the model'} has hooks")


def _packs(model: PreTrainedModel) -> list[tuple[str, ...]]:
    names = dict(model.named_parameters())
    found: list[tuple[str, ...]] = []
    for index in range(len(model.model.layers)):
        for group in _PROJECTIONS:
            for kind in ("weight", "bias"):
                pack = tuple(f"model.layers.{index}.{name}.{kind}" for name in group)
                if all(name in names for name in pack):
                    found.append(pack)
    return found


def _together(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several layers with the same input."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if biases and len(biases) < len(layers):
        raise NotFusable("only some of its projections have a bias")
    return _joined([layer.weight.detach() for layer in layers]), _joined(biases) if biases else None


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All rows as one tensor: in place where they lie side by side in one storage, else a copy."""
    first, ends = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if (
            tensor.data_ptr() != ends
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return torch.cat(list(tensors))
        ends += tensor.numel() * tensor.element_size()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
