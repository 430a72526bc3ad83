"""Reading the tool calls out of a reply.

Worlds get the reply's text as it is and read its calls here, in the three ways in which models write them:

- JSON between tags (Hermes, Qwen2.5, Qwen3): ``<tool_call>{"name": "python", "arguments": {"code": "1 + 1"}}</tool_call>``
- tagged parameters (Qwen3-Coder, Qwen3.5): ``<tool_call><function=python><parameter=code>1 + 1</parameter></function></tool_call>``
- a reply that is one JSON object (Llama 3): ``{"name": "python", "parameters": {"code": "1 + 1"}}``
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. Tagged parameters are always strings; JSON arguments keep their JSON types."""

    name: str
    arguments: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class MalformedToolCall:
    """Something that was meant as a call and cannot be read; ``problem`` is a sentence that a model can act on."""

    text: str
    problem: str


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The well-formed calls of a reply, in order."""
    return [call for call in read_tool_calls(text) if isinstance(call, ToolCall)]


def read_tool_calls(text: str) -> list[ToolCall | MalformedToolCall]:
    """Every attempt at a call in a reply, in order; an empty list where the reply makes none."""
    tagged = _TAGGED.findall(text)
    if tagged:
        return [call for body in tagged for call in _read_body(body)]
    if "<function=" in text:
        return _read_functions(text)
    whole = text.strip()
    if whole.startswith("{") and whole.endswith("}"):
        call = _read_json(whole)
        return [call] if isinstance(call, ToolCall) else []
    return []


def _read_body(body: str) -> list[ToolCall | MalformedToolCall]:
    return _read_functions(body) if "<function=" in body else [_read_json(body.strip())]


def _read_functions(body: str) -> list[ToolCall | MalformedToolCall]:
    calls: list[ToolCall | MalformedToolCall] = []
    for name, inside in _FUNCTION.findall(body):
        calls.append(ToolCall(name, {key: _without_frame(value) for key, value in _PARAMETER.findall(inside)}))
    return calls or [MalformedToolCall(body, "the function's name is missing: write <function=name>")]


def _without_frame(value: str) -> str:
    """The value without the one line break after the opening and before the closing tag, which belong to the format."""
    return value.removeprefix("\n").removesuffix("\n")


def _read_json(body: str) -> ToolCall | MalformedToolCall:
    try:
        call = json.loads(body, strict=False)  # models leave line breaks inside strings
    except ValueError as error:
        return MalformedToolCall(body, f"the call is not valid JSON ({error})")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return MalformedToolCall(body, 'the call must be a JSON object with "name" and "arguments"')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except ValueError:
            return MalformedToolCall(body, '"arguments" must be a JSON object')
    if not isinstance(arguments, dict):
        return MalformedToolCall(body, '"arguments" must be a JSON object')
    return ToolCall(call["name"], arguments)
