"""Folders as Qwen2.5 and Qwen3.5 are published, of tiny models that have learned to answer in form, and data sets as they are published."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.environments.base import ToolSpec
from headrace.rollout.chat import ChatCodec
from headrace.rollout.trajectory import Turn
from headrace.training.policy import Policy
from headrace.training.warmup import WarmupSettings, warm_start

CHATML = (
    "{%- if tools -%}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{%- endif -%}"
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n"
    "{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{%- else -%}{{ message['content'] }}<|im_end|>{%- endif -%}\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking -%}<think>\n\n</think>\n\n{%- endif -%}{%- endif -%}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}


@dataclass(frozen=True)
class Material:
    """The tokenizer is fitted to ``texts``; ``exchanges`` (what is seen, what is said), after the world's ``system``, are cloned."""

    texts: Sequence[str]
    exchanges: Sequence[tuple[str, str]]
    system: str | None = None
    tools: Sequence[ToolSpec] = ()


def write_model(family: str, material: Material, folder: Path, *, steps: int = 30) -> Path:
    """``family``: "Qwen2.5" or "Qwen3.5"."""
    tokenizer = _tokenizer(material.texts)
    tokenizer.save_pretrained(folder)
    sizes = SIZES | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = _published(family, sizes)
    model.save_pretrained(folder)
    policy = Policy.load(folder)
    codec = ChatCodec(policy.tokenizer, history="append")
    conversations = [
        codec.demonstrate([Turn(seen, said)], system=material.system, tools=material.tools) for seen, said in material.exchanges
    ]
    warm_start(policy, conversations, WarmupSettings(steps=steps, learning_rate=1e-2, held_out=0, observation_weight=0.0))
    _take_over(model, policy)
    model.save_pretrained(folder)
    return folder


def _tokenizer(texts: Sequence[str]) -> Any:
    """Byte-level BPE, which is what a folder of this model type is read as."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False))
    inner.add_special_tokens([AddedToken(one, special=True) for one in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    build: Any = transformers.PreTrainedTokenizerFast
    tokenizer = build(tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def _published(family: str, sizes: dict[str, Any]) -> Any:
    """Qwen3.5 is published with a vision tower around its language model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "Qwen2.5":
            return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
        config = transformers.Qwen3_5Config(text_config=sizes | HYBRID, vision_config=VISION, tie_word_embeddings=True)
        return transformers.Qwen3_5ForConditionalGeneration(config)


def _take_over(model: Any, policy: Policy) -> None:
    trained: Any = policy.model
    getattr(model.model, "language_model", model.model).load_state_dict(trained.model.state_dict())
    model.tie_weights()


def problems() -> list[tuple[str, str]]:
    """Differences with their answers, which are 1, 2 or 3: a guess is right now and then."""
    return [(f"What is {small + difference} minus {small}?", str(difference)) for small in range(1, 31) for difference in (1, 2, 3)]


def guesses(count: int = 256) -> list[tuple[str, str]]:
    """Problems and boxed guesses at their answers."""
    source = random.Random(0)
    return [(source.choice(problems())[0], rf"\boxed{{{source.randint(1, 3)}}}") for _ in range(count)]


def write_data(source: str, folder: Path) -> Path:
    """The problems as the data sets of that name are published: a folder with ``train.jsonl`` (GSM8K: and ``test.jsonl``)."""
    folder.mkdir(parents=True)
    rows = [_row(source, question, answer) for question, answer in problems()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if source == "gsm8k":
        (folder / "test.jsonl").write_text(json.dumps(_row(source, "What is 90 minus 88?", "2")) + "\n")
    return folder


def _row(source: str, question: str, answer: str) -> dict[str, Any]:
    if source == "gsm8k":
        return {"question": question, "answer": f"It is <<{answer}={answer}>>{answer}.\n#### {answer}"}
    if source == "deepmath":
        return {"question": question, "final_answer": answer, "difficulty": 5.0}
    return {"prompt": [{"content": question, "role": "user"}], "reward_model": {"ground_truth": answer}}
