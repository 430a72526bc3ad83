"""The policy: a Hugging Face causal LM with its tokenizer, and the log-probabilities that training needs of it.

The model stays an ordinary transformers module. How its rows may be packed and how its output head may be applied is
found by trying both against plain forward passes when it is loaded (``forward.py``), never by a list of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headrace.errors import UserError
from headrace.training import adapters, pretrained
from headrace.training.adapters import LoraSettings
from headrace.training.forward import Forward
from headrace.training.logprobs import TokenScores
from headrace.training.packing import PackedRows

Dtype = Literal["float32", "bfloat16"]
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PolicyFacts:
    """What a person should be told about a policy."""

    name: str
    architecture: str
    parameters: int
    trainable_parameters: int
    vocabulary: int
    dtype: str
    device: str
    layout: str
    head: str
    gradient_checkpointing: bool
    lora: LoraSettings | None

    def __str__(self) -> str:
        adapter = "" if self.lora is None else f" (LoRA rank {self.lora.rank}: {self.trainable_parameters:,} of them trained)"
        checkpointing = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return (
            f"{self.name}: {self.architecture}, {self.parameters:,} parameters{adapter}, vocabulary {self.vocabulary:,}, "
            f"{self.dtype} on {self.device}, {self.layout} rows, {self.head} head{checkpointing}"
        )


class Policy:
    """A causal LM that is trained. Make one with ``Policy.load``."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str = "model",
        lora: LoraSettings | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Takes ``model`` over: its dropout is set to 0 (an on-policy ratio is 1 only without it), LoRA is put in, and the
        self-check chooses how its rows are laid out."""
        self.name = name
        self.tokenizer = tokenizer
        self.lora = lora
        self.gradient_checkpointing = gradient_checkpointing
        self.model = model
        pretrained.silence_dropout(model)
        self._forward = Forward(model)
        self._adapter = None if lora is None else adapters.insert(model, lora)
        if gradient_checkpointing:
            self._checkpoint_gradients()
        self.model.train(False)

    @classmethod
    def load(
        cls,
        name_or_folder: str | Path,
        *,
        dtype: Dtype = "float32",
        device: str = "auto",
        lora: LoraSettings | None = None,
        gradient_checkpointing: bool = False,
    ) -> Policy:
        """Load a causal LM and its tokenizer by Hugging Face name or from a folder (one with a single GGUF file is dequantized).

        ``dtype``: of the parameters. ``device``: "auto" is the first CUDA device, else the CPU. Raises ``UserError`` with one
        sentence where nothing can be loaded.
        """
        if dtype not in DTYPES:
            raise UserError(f"policy dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        place = pretrained.resolve_device(device)
        model, tokenizer = pretrained.load(str(name_or_folder), DTYPES[dtype])
        return cls(
            pretrained.on_device(model, place),
            tokenizer,
            name=str(name_or_folder),
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
        )

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def has_dropout(self) -> bool:
        return self.lora is not None and self.lora.dropout > 0

    def score(self, rows: PackedRows, *, entropy: bool = False) -> TokenScores:
        """Log-probabilities (float32 or better, [m]) of the pack's scored tokens; differentiable where gradients are on."""
        return self._forward(rows.to(self.device), entropy=entropy)

    @torch.no_grad()
    def measure(self, rows: PackedRows, *, max_tokens: int) -> Tensor:
        """Log-probabilities of the scored tokens without gradient or dropout, in passes of at most ``max_tokens``."""
        self.training_mode(False)
        if not rows.scored:
            return self.score(rows).logprobs_m
        return torch.cat([self.score(piece).logprobs_m for piece in rows.split(max_tokens)])

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by their names in the module."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def training_mode(self, on: bool) -> None:
        """Training mode matters to gradient checkpointing and LoRA dropout only; without them the module stays in eval mode."""
        self.model.train(on and (self.gradient_checkpointing or self.has_dropout))

    def weights(self) -> Mapping[str, Tensor]:
        """Everything an engine needs, under the names of the base model's state dict (LoRA merged); not copies where nothing was merged."""
        return adapters.merged_state(self.model)

    def save(self, folder: str | Path, *, notes: Mapping[str, str] | None = None) -> Path:
        """Write an ordinary Hugging Face folder: model (LoRA merged) and tokenizer; with LoRA, the adapter alone in ``adapter/``.

        ``notes``: further small files by name. Written aside and renamed, so that ``folder`` holds the old policy or the new one,
        never half of one.
        """
        merged = None if self.lora is None else self.weights()
        return pretrained.save(self.model, self.tokenizer, Path(folder), merged=merged, adapter=self._adapter, notes=notes)

    def describe(self) -> PolicyFacts:
        return PolicyFacts(
            name=self.name,
            architecture=type(self.model).__name__,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            trainable_parameters=sum(parameter.numel() for parameter in self.trainable().values()),
            vocabulary=int(self.model.config.get_text_config().vocab_size),
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            layout=self._forward.layout,
            head=self._forward.head_kind,
            gradient_checkpointing=self.gradient_checkpointing,
            lora=self.lora,
        )

    def _checkpoint_gradients(self) -> None:
        if not self.model.supports_gradient_checkpointing:
            raise UserError(f"{self.name}: {type(self.model).__name__} does not support gradient checkpointing; turn it off")
        model: Any = self.model
        if hasattr(model, "activation_checkpointing_enable"):  # its newer name
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
