"""A tokenizer's chat template, rendered around holes.

Everything that others wrote (the world's text, the system text, what the model said) enters the template as a *hole*, a
short private-use marker, and is put in afterwards. So a rendering shows which parts are the template's own words, the
template cannot react to the world's text, and renderings of long conversations stay short.

What the model said is cut into holes between *markers*, the strings that the template's source mentions (``</think>``):
these stay visible, because a template may cut an earlier reply at them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from headrace.environments.base import ToolSpec

_OPEN, _CLOSE = "\ue000", "\ue001"
_HOLE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_FROZEN_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%Y', '2025') | replace('%m', '01') | replace('%d', '01')"
    " | replace('%b', 'Jan') | replace('%B', 'January') }}{%- endmacro -%}"
)


@dataclass(frozen=True, slots=True)
class Message:
    """``content`` has holes in the place of text."""

    role: str
    content: str

    def plain(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class RoleTraits:
    """What a template does to the text of a role before it writes it."""

    strips_left: bool
    strips_right: bool
    json_escaped: bool

    def apply(self, text: str) -> str:
        if self.strips_left:
            text = text.lstrip()
        if self.strips_right:
            text = text.rstrip()
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.json_escaped else text


def hole(index: int) -> str:
    return f"{_OPEN}{index}{_CLOSE}"


def has_hole(text: str) -> bool:
    return _OPEN in text


def split_holes(rendered: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The template's own words around the holes (one more than holes), and the holes' numbers."""
    parts = _HOLE.split(rendered)
    return tuple(parts[::2]), tuple(int(number) for number in parts[1::2])


class ChatTemplate:
    """Renders conversations and knows what the template does with roles, tools and text.

    ``arguments`` go to the template as they are (``enable_thinking=False``). Where a template writes today's date, it gets
    1 January 2025, so that a run reads the same on every day.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"the tokenizer {_name_of(tokenizer)} has no chat template; set tokenizer.chat_template")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)
        self._sources: dict[bool, str] = {}
        self._traits: dict[tuple[str, tuple[ToolSpec, ...]], RoleTraits | None] = {}
        self.source = _source_of(tokenizer.chat_template)
        self.marks_thinking = "</think>" in self.source
        self.needed_traits("user")

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, reply: bool) -> str:
        """``reply``: end with what the template writes before a reply. ``ValueError`` where the template refuses."""
        try:
            rendered = self._tokenizer.apply_chat_template(
                [message.plain() for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._source_for(bool(tools)),
                add_generation_prompt=reply,
                tokenize=False,
                **self._arguments,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(f"the chat template of {_name_of(self._tokenizer)} refuses a conversation of {roles}: {error}") from error
        return str(rendered)

    def traits(self, role: str, tools: tuple[ToolSpec, ...] = ()) -> RoleTraits | None:
        """None where the template has no place for ``role``, or changes its text in a way that cannot be undone."""
        key = (role, tools)
        if key not in self._traits:
            self._traits[key] = self._probe(role, tools)
        return self._traits[key]

    def needed_traits(self, role: str, tools: tuple[ToolSpec, ...] = ()) -> RoleTraits:
        traits = self.traits(role, tools)
        if traits is None:
            self.render([Message(role, hole(0))], reply=True)  # names the cause where the template refuses
            name = _name_of(self._tokenizer)
            raise ValueError(f"the chat template of {name} does not show the text of a message of role {role} as it is")
        return traits

    def shows_tools(self, tools: tuple[ToolSpec, ...]) -> bool:
        """Whether the template writes the tools' descriptions into the opening."""
        opening = [Message("user", hole(0))]
        try:
            rendered = self.render(opening, [tool_json(tool) for tool in tools], reply=True)
        except ValueError:
            return False
        return rendered != self.render(opening, reply=True) and all(tool.name in rendered for tool in tools)

    def markers(self, exclude: Callable[[str], bool]) -> re.Pattern[str] | None:
        """What to keep visible in replies: the template's string constants that are more than words and punctuation."""
        found = {constant.strip() for constant in _constants(self.source)}
        kept = [text for text in found if 2 <= len(text) <= 40 and re.search(r"[^\w\s]", text) and not exclude(text)]
        return re.compile("|".join(re.escape(text) for text in sorted(kept, key=len, reverse=True))) if kept else None

    def _source_for(self, with_tools: bool) -> str:
        """The template's source; some tokenizers have one of their own for conversations with tools."""
        if with_tools not in self._sources:
            source = str(self._tokenizer.get_chat_template(None, [{}] if with_tools else None))
            self._sources[with_tools] = (_FROZEN_DATE if "strftime_now" in source else "") + source
        return self._sources[with_tools]

    def _probe(self, role: str, tools: tuple[ToolSpec, ...]) -> RoleTraits | None:
        probe = Message(role, f' \n{hole(0)}"\n{hole(1)}\n ')
        before = {"tool": [Message("user", hole(2)), Message("assistant", hole(3))]}.get(role, [])
        after = [Message("user", hole(2))] if role == "system" else []
        try:
            rendered = self.render([*before, probe, *after], [tool_json(tool) for tool in tools], reply=True)
        except ValueError:
            return None
        for json_escaped, quote, line in ((False, '"', "\n"), (True, '\\"', "\\n")):
            body = f"{hole(0)}{quote}{line}{hole(1)}"
            if rendered.count(body) == 1:
                return RoleTraits(f" {line}{body}" not in rendered, f"{body}{line} " not in rendered, json_escaped)
        return None


class Shape:
    """What conversations with the same tools, with or without a system text, have in common.

    Holes are numbered in the order in which texts come: the tools' dangerous strings (``tool_texts``), the system text, the
    first message, then the replies and their answers.
    """

    def __init__(self, template: ChatTemplate, has_system: bool, tools: tuple[ToolSpec, ...], dangerous: Callable[[str], bool]) -> None:
        shown = tools if tools and template.shows_tools(tools) else ()
        self._template = template
        self.tool_texts: list[str] = []
        self._tools = [with_holes(tool_json(tool), dangerous, self.tool_texts) for tool in shown]
        self.user = template.needed_traits("user", shown)
        self.tool = template.traits("tool", shown) if shown else None
        self.system = template.traits("system", shown) if has_system else None
        first = len(self.tool_texts)
        if not has_system:
            self._opening = [Message("user", hole(first))]
        elif self.system is not None:
            self._opening = [Message("system", hole(first)), Message("user", hole(first + 1))]
        else:
            self._opening = [Message("user", f"{hole(first)}\n\n{hole(first + 1)}")]
        self._holes = first + 1 + has_system
        opening = self.render(self._opening)
        self.opening = split_holes(opening)
        self.reply_prefix = self._find_reply_prefix(opening)
        self._renderings = [opening]
        self._tails: list[tuple[str, ...] | None] = []
        self._suffixes: dict[str, tuple[str, ...]] = {}

    @property
    def lead(self) -> str:
        """The template's words between the first message and the reply."""
        return self.opening[0][-1]

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        return self._template.render(messages, self._tools, reply=reply)

    def plain_messages(self, turns: int) -> list[Message]:
        """The opening, and ``turns`` replies that are one hole each, each with its answer in the user's role."""
        messages = list(self._opening)
        for turn in range(turns):
            reply = self._holes + 2 * turn
            messages += [Message("assistant", self.reply_prefix + hole(reply)), Message("user", hole(reply + 1))]
        return messages

    def rendering(self, turns: int) -> str:
        while len(self._renderings) <= turns:
            self._renderings.append(self.render(self.plain_messages(len(self._renderings))))
        return self._renderings[turns]

    def tail(self, turn: int) -> tuple[str, ...] | None:
        """What follows the reply of ``turn``: two literals around the answer. None where the template rewrites what went before."""
        while len(self._tails) <= turn:
            done = len(self._tails)
            after = self.rendering(done + 1)
            end = end_of_prefix(after, self.rendering(done) + hole(self._holes + 2 * done))
            literals = split_holes(after[end:])[0] if end is not None else ()
            tail = literals if len(literals) == 2 else None
            self._tails.append(self._tails[-1] if self._tails and self._tails[-1] == tail else tail)
        return self._tails[turn]

    def suffix(self, role: str) -> tuple[str, ...]:
        """What the template writes after a reply and around the answer to it, whatever it does to the reply itself."""
        if role not in self._suffixes:
            reply, answer = hole(self._holes), hole(self._holes + 1)
            rendered = self.render([*self._opening, Message("assistant", self.reply_prefix + reply), Message(role, answer)])
            _, found, after = rendered.rpartition(reply)
            literals = split_holes(after)[0]
            if not found or len(literals) != 2:
                raise ValueError(f"the chat template shows no reply followed by a message of role {role}")
            self._suffixes[role] = literals
        return self._suffixes[role]

    def _find_reply_prefix(self, opening: str) -> str:
        """What the template has begun the reply with (``<think>``) and does not write by itself when it shows the reply later."""
        reply = hole(self._holes)
        shown, found, _ = self.render([*self._opening, Message("assistant", reply)], reply=False).partition(reply)
        return opening[len(shown) :] if found and opening.startswith(shown) else ""


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def with_holes(value: Any, dangerous: Callable[[str], bool], texts: list[str]) -> Any:
    """``value`` with holes for those of its strings that are ``dangerous``; their JSON forms are appended to ``texts``."""
    if isinstance(value, str):
        if not (dangerous(value) or has_hole(value)):
            return value
        texts.append(json.dumps(value, ensure_ascii=False)[1:-1])
        return hole(len(texts) - 1)
    if isinstance(value, Mapping):
        for key in value:
            if dangerous(str(key)):
                raise ValueError(f"a tool's parameters use the control token {key!r} as a name; rename it")
        return {key: with_holes(item, dangerous, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_holes(item, dangerous, texts) for item in value]
    return value


def end_of_prefix(rendered: str, prefix: str) -> int | None:
    """Where ``prefix`` ends in ``rendered``, white space apart; None where ``rendered`` begins otherwise.

    A template that trims or re-spaces a reply does not count as rewriting it: the model keeps its words as it wrote them.
    """
    if rendered.startswith(prefix):
        return len(prefix)
    wanted = re.sub(r"\s+", "", prefix)
    used = 0
    for word in re.finditer(r"\S+", rendered):
        if used == len(wanted):
            return word.start()
        size = min(word.end() - word.start(), len(wanted) - used)
        if rendered[word.start() : word.start() + size] != wanted[used : used + size]:
            return None
        used += size
        if used == len(wanted):
            return word.start() + size
    return len(rendered) if used == len(wanted) else None


def _source_of(template: Any) -> str:
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)


def _constants(source: str) -> list[str]:
    try:
        tokens = list(jinja2.Environment().lex(source))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error
    # Jinja's own rule: a constant may hold line breaks, and escapes are read as Python's.
    return [text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape") for _, kind, text in tokens if kind == "string"]


def _name_of(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
