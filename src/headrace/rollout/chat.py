"""Conversations as exact tokens: token in, token out.

What the model sampled is carried as ids and never encoded again; its text is decoded for the world and for readers only.
What the template writes between two replies, and the world's text in it, is appended as masked tokens, encoded so that no
text of the world's can become a control token. Masks say who wrote a token, because they are made while it is written.

Most templates only ever append. Their turn suffix is found once per number of turns, and a turn costs one cached encoding.
Templates that rewrite what was said before (earlier thinking is cut) are noticed by comparing renderings; then the
conversation goes on in a new row that begins with the rewritten prefix, masked: every sampled token is trained exactly once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from headrace.environments.base import ToolSpec
from headrace.environments.tool_calls import read_tool_calls
from headrace.rollout.chat_template import ChatTemplate, Message, Shape, end_of_prefix, hole, split_holes
from headrace.rollout.chat_tokens import TokenWriter
from headrace.rollout.engine import Completion, EngineError
from headrace.rollout.trajectory import TokenRow, Turn

History = Literal["template", "append"]
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class _Said:
    """A hole's content: characters ``start`` to ``end`` of the reply of turn ``turn``."""

    turn: int
    start: int
    end: int


_Content = str | _Said


class ChatCodec:
    """Turns conversations into tokens by a Hugging Face tokenizer's chat template.

    ``history``: "template" gives the model at every turn what the template would render, in a new row where that rewrites
    earlier turns; "append" keeps every earlier turn as it was sampled, whatever the template would do with it (one row per
    episode; the way of most agent loops). ``template_arguments`` go to the template (``{"enable_thinking": False}``).
    ``stop_token_ids`` end a reply: the token with which the template ends a reply, and the tokenizer's end-of-text token,
    after which no model goes on.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: History = "template",
        template_arguments: Mapping[str, Any] | None = None,
        cache_size: int = 4096,
    ) -> None:
        self.history = history
        self.template = ChatTemplate(tokenizer, template_arguments or {})
        self.writer = TokenWriter(tokenizer, self.template.source, cache_size)
        self.turn_end = self._find_turn_end()
        eos = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (self.turn_end, eos) if i is not None))
        if not self.stop_token_ids:
            raise ValueError("nothing ends a reply: the chat template writes no control token after it and the tokenizer has no eos token")
        special = [text for number, text in self.writer.control.items() if number in self.writer.special]
        self.markers = self.template.markers(exclude=lambda text: any(token in text for token in special))
        self.after_stop = lru_cache(maxsize=256)(self._after_stop)
        self._shapes: dict[tuple[bool, tuple[ToolSpec, ...]], Shape] = {}

    def open(self, system: str | None, tools: Sequence[ToolSpec], observation: str) -> Conversation:
        """Begin a conversation. Where the template has no system role, ``system`` leads the first message; tools are shown
        where the template shows tools."""
        return Conversation(self, self._shape(system is not None, tuple(tools)), system, observation)

    def demonstrate(self, turns: Sequence[Turn], *, system: str | None = None, tools: Sequence[ToolSpec] = ()) -> tuple[TokenRow, ...]:
        """The rows of a conversation whose replies were written by someone else, as if the model had sampled them.

        Log-probabilities are 0.0 and versions -1 throughout; ``action_mask`` is that of sampled replies.
        """
        lead = self._shape(system is not None, tuple(tools)).lead
        conversation: Conversation | None = None
        for turn in turns:
            if conversation is None:
                conversation = self.open(system, tools, turn.observation)
            else:
                conversation.add_observation(turn.observation)
            ids = self.reply_ids(turn.action, lead)
            conversation.add_action(Completion(ids, (0.0,) * len(ids), (-1,) * len(ids), "stop"))
        return conversation.rows() if conversation is not None else ()

    def reply_ids(self, text: str, before: str = "") -> tuple[int, ...]:
        """``text`` and the turn's end as a model would write them after the template's words ``before``."""
        end = self.turn_end if self.turn_end is not None else self.stop_token_ids[0]
        return self.writer.reply(before, text, self.writer.control[end])

    def visible(self, text: str, lead: str = "") -> str:
        """A reply without its thinking, where the template marks thinking; ``lead`` is what the template wrote before the reply."""
        if not self.template.marks_thinking:
            return text
        _, closed, rest = text.rpartition(END_THINK)
        if closed:
            return rest.lstrip()
        before, opened, _ = text.rpartition(THINK)
        if opened:
            return before.rstrip()
        return "" if lead.rstrip().endswith(THINK) else text

    def _shape(self, has_system: bool, tools: tuple[ToolSpec, ...]) -> Shape:
        key = (has_system, tools)
        if key not in self._shapes:
            self._shapes[key] = Shape(self.template, has_system, tools, self.writer.has_control)
        return self._shapes[key]

    def _find_turn_end(self) -> int | None:
        rendered = self.template.render([Message("user", hole(0)), Message("assistant", hole(1))], reply=False)
        literals, holes = split_holes(rendered)
        if not holes or holes[-1] != 1:
            raise ValueError("the chat template does not show an assistant's message")
        controls = self.writer.control_tokens_in(literals[-1])
        return controls[0] if controls else None

    def _after_stop(self, literals: tuple[str, ...], stop: int | None) -> tuple[str, ...]:
        """A turn's suffix without the stop token that the model has written itself (cached as ``after_stop``)."""
        text = "" if stop is None else self.writer.control[stop]
        head = literals[0].lstrip()
        return (head.removeprefix(text), *literals[1:]) if text and head.startswith(text) else literals


class Conversation:
    """One attempt's exchange, as the rows of tokens that it becomes. Made by ``ChatCodec.open``.

    ``context()`` is what the engine continues; ``add_action`` takes its completion and gives back the text for the world;
    ``add_observation`` takes the world's answer.
    """

    def __init__(self, codec: ChatCodec, shape: Shape, system: str | None, observation: str) -> None:
        self._codec = codec
        self._shape = shape
        self._finished: list[TokenRow] = []
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sent: tuple[int, ...] = ()
        self._observations = [observation]
        self._texts: list[str] = []
        self._reply_ids: list[tuple[int, ...]] = []
        self._stop: int | None = None
        self._acted = False
        self._plain = True
        self._messages: list[Message] = []
        self._rendering = ""
        self._contents: list[_Content] = list(shape.tool_texts)
        if system is not None:
            self._contents.append(shape.system.apply(system) if shape.system is not None else system)
        self._contents.append(shape.user.apply(observation))
        literals, holes = shape.opening
        self._append_masked(self._encode(literals, holes, None))

    def __len__(self) -> int:
        """Tokens of the context."""
        return len(self._ids)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(Turn(seen, said) for seen, said in zip(self._observations, self._texts, strict=False))

    def context(self) -> tuple[int, ...]:
        """The tokens to continue; within a row they extend those of the turn before."""
        context = tuple(self._ids)
        if context[: len(self._sent)] != self._sent:
            raise AssertionError(f"the context of turn {len(self._texts)} does not extend that of the turn before")
        self._sent = context
        return context

    def add_action(self, completion: Completion) -> str:
        """Take what was sampled, up to its first stop token; returns the text for the world (without thinking)."""
        if self._acted:
            raise RuntimeError("two actions in a row: add the world's answer to the first")
        ids = self._take(completion)
        stopped = bool(ids) and ids[-1] in self._codec.stop_token_ids
        self._stop = ids[-1] if stopped else None
        text = self._codec.writer.decode(ids[:-1] if stopped else ids)
        self._texts.append(text)
        self._reply_ids.append(ids)
        self._acted = True
        return self._codec.visible(text, self._shape.lead)

    def add_observation(self, text: str) -> None:
        """Take the world's answer to the action before it."""
        if not self._acted:
            raise RuntimeError("an observation without an action before it")
        self._acted = False
        self._observations.append(text)
        reply, turn = self._texts[-1], len(self._texts) - 1
        role = self._role_of_answer(reply)
        traits = self._shape.tool if role == "tool" and self._shape.tool is not None else self._shape.user
        answer = traits.apply(text)
        if self._codec.history == "append":
            self._append_answer(self._shape.suffix(role), answer)
            return
        if self._plain and role == "user" and reply.strip() and not self._has_markers(reply):
            tail = self._shape.tail(turn)
            if tail is not None:
                self._contents += [_Said(turn, 0, len(reply)), answer]
                self._append_answer(tail, answer)
                return
        self._advance(role, reply, turn, answer)

    def rows(self) -> tuple[TokenRow, ...]:
        """The training rows so far; what comes after a row's last sampled token is left out."""
        row = self._row()
        return (*self._finished, row) if row is not None else tuple(self._finished)

    # --- rendering ---

    def _role_of_answer(self, reply: str) -> str:
        if self._shape.tool is None:
            return "user"
        return "tool" if read_tool_calls(self._codec.visible(reply, self._shape.lead)) else "user"

    def _has_markers(self, text: str) -> bool:
        return self._codec.markers is not None and self._codec.markers.search(text) is not None

    def _advance(self, role: str, reply: str, turn: int, answer: str) -> None:
        """The careful way: render the whole conversation and see whether it goes on from what was sent."""
        if self._plain:
            self._plain = False
            self._messages = self._shape.plain_messages(turn)
            self._rendering = self._shape.rendering(turn)
        said = self._with_holes(reply, turn)
        self._contents.append(answer)
        self._messages += [Message("assistant", self._shape.reply_prefix + said), Message(role, hole(len(self._contents) - 1))]
        rendering = self._shape.render(self._messages)
        end = end_of_prefix(rendering, self._rendering + said)
        self._rendering = rendering
        if end is None:
            self._start_row(rendering)
            return
        literals, holes = split_holes(rendering[end:])
        self._append_masked(self._encode(self._codec.after_stop(literals, self._stop), holes, self._stop))

    def _with_holes(self, reply: str, turn: int) -> str:
        """``reply`` with holes between its markers and its white space; the holes' contents are recorded."""
        said, start = "", 0
        marks = list(self._codec.markers.finditer(reply)) if self._codec.markers is not None else []
        for begin, end in [*((mark.start(), mark.end()) for mark in marks), (len(reply), len(reply))]:
            piece = reply[start:begin]
            core = piece.strip()
            if core:
                at = start + piece.index(core)
                self._contents.append(_Said(turn, at, at + len(core)))
                said += reply[start:at] + hole(len(self._contents) - 1) + reply[at + len(core) : begin]
            else:
                said += piece
            said += reply[begin:end]
            start = end
        return said

    def _start_row(self, rendering: str) -> None:
        """Close the row and begin the next with the whole rewritten rendering, masked."""
        row = self._row()
        if row is not None:
            self._finished.append(row)
        self._ids, self._mask, self._logprobs, self._versions, self._sent = [], [], [], [], ()
        self._append_masked(self._encode_rewritten(*split_holes(rendering)))

    def _encode_rewritten(self, literals: tuple[str, ...], holes: tuple[int, ...]) -> list[int]:
        """Replies as the ids that were sampled, everything else encoded."""
        ids: list[int] = []
        run, run_holes = [literals[0]], list[int]()
        index = 0
        while index < len(holes):
            content = self._contents[holes[index]]
            if isinstance(content, str):
                run_holes.append(holes[index])
                run.append(literals[index + 1])
                index += 1
                continue
            last = index
            while last + 1 < len(holes) and holes[last + 1] == holes[last] + 1 and self._same_reply(holes[last + 1], content):
                last += 1
            final = self._contents[holes[last]]
            assert isinstance(final, _Said)
            start, end, before, after = _widened(self._texts[content.turn], content.start, final.end, run[-1], literals[last + 1])
            ids += self._encode((*run[:-1], before), tuple(run_holes), None)
            ids += self._said_ids(content.turn, start, end)
            run, run_holes = [after], []
            index = last + 1
        return ids + list(self._encode(tuple(run), tuple(run_holes), None))

    def _same_reply(self, index: int, content: _Said) -> bool:
        other = self._contents[index]
        return isinstance(other, _Said) and other.turn == content.turn

    def _said_ids(self, turn: int, start: int, end: int) -> list[int]:
        """The sampled ids of characters ``start`` to ``end`` of a reply; white space may come along at the edges.
        Where tokens straddle the edges, the text is encoded, without control tokens."""
        text, ids = self._texts[turn], self._reply_ids[turn]
        decode = self._codec.writer.decode
        first = _count_until(len(ids), lambda count: len(decode(ids[:count])) > start) - 1
        last = _count_until(len(ids), lambda count: len(decode(ids[:count])) >= end)
        if decode(ids[first:last]).strip() == text[start:end].strip():
            return list(ids[first:last])
        return self._codec.writer.plain(text[start:end])

    # --- tokens ---

    def _append_answer(self, literals: tuple[str, ...], answer: str) -> None:
        self._append_masked(self._codec.writer.encode(self._codec.after_stop(literals, self._stop), (answer,), self._stop))

    def _encode(self, literals: tuple[str, ...], holes: tuple[int, ...], anchor: int | None) -> tuple[int, ...]:
        contents = []
        for index in holes:
            content = self._contents[index]
            contents.append(content if isinstance(content, str) else self._texts[content.turn][content.start : content.end])
        return self._codec.writer.encode(literals, tuple(contents), anchor)

    def _append_masked(self, ids: Sequence[int]) -> None:
        count = len(ids)
        self._ids += ids
        self._mask += [False] * count
        self._logprobs += [0.0] * count
        self._versions += [-1] * count

    def _take(self, completion: Completion) -> tuple[int, ...]:
        ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
        if not len(ids) == len(logprobs) == len(versions):
            raise EngineError(
                f"the engine's completion is uneven: {len(ids)} tokens, {len(logprobs)} log-probabilities, {len(versions)} versions"
            )
        stops = [index for index, number in enumerate(ids) if number in self._codec.stop_token_ids]
        if completion.stop_reason == "stop" and not stops:
            raise EngineError("the engine says that a stop token ended the completion, and there is none in it")
        count = stops[0] + 1 if stops else len(ids)
        self._ids += ids[:count]
        self._mask += [True] * count
        self._logprobs += logprobs[:count]
        self._versions += versions[:count]
        return tuple(ids[:count])

    def _row(self) -> TokenRow | None:
        count = len(self._mask)
        while count and not self._mask[count - 1]:
            count -= 1
        if not count:
            return None
        return TokenRow(tuple(self._ids[:count]), tuple(self._mask[:count]), tuple(self._logprobs[:count]), tuple(self._versions[:count]))


def _widened(text: str, start: int, end: int, before: str, after: str) -> tuple[int, int, str, str]:
    """Take into a shown stretch of a reply what the template shows of the rest of it: markers at the reply's very start or end.
    Returns the stretch and the template's words around it without them."""
    for head in (text[:start], text[:start].lstrip()):
        if head and before.endswith(head):
            start, before = start - len(head), before.removesuffix(head)
            break
    for rest in (text[end:], text[end:].rstrip()):
        if rest and after.startswith(rest):
            end, after = end + len(rest), after.removeprefix(rest)
            break
    return start, end, before, after


def _count_until(most: int, reached: Callable[[int], bool]) -> int:
    """The smallest count in [0, most] that has ``reached``, which stays true once true; ``most`` where none has."""
    return bisect_left(range(most), True, key=reached)
