"""Text to tokens where some of the text is the template's and some is not.

The template's control strings become control tokens. The same strings inside a content stay text: they are encoded
without the tokenizer's added tokens. Everything else is encoded exactly as the tokenizer encodes the whole string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_LONG_TEXT, _LONG_REPLY = 1000, 64
"""Characters and tokens from which on nothing is cached: long texts seldom come twice, and would fill the memory."""


class TokenWriter:
    """Encodes and decodes with caches of ``cache_size`` entries each for short texts.

    Control tokens are the special tokens and those added tokens that the template's source mentions (``<tool_response>``);
    a token for unknown words is none. A tokenizer that cannot keep a control string plain is refused here.
    """

    def __init__(self, tokenizer: Any, template_source: str, cache_size: int) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.control = _control_tokens(tokenizer, template_source)
        flagged = {int(number) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(self.control) & (flagged | frozenset(tokenizer.all_special_ids))
        added = {str(t.content): int(n) for n, t in tokenizer.added_tokens_decoder.items() if not t.content.isspace()}
        self._ids = added | {text: number for number, text in self.control.items()}
        self._in_template = _any_of(self._ids)
        self._pattern = _any_of(self.control.values())
        self._unspecial = _any_of(text for text, number in self._ids.items() if number not in self.special)
        self._encode_short = lru_cache(maxsize=cache_size)(self._encode)
        self._decode_short = lru_cache(maxsize=cache_size)(self._decode)
        self._expected = lru_cache(maxsize=512)(self._controls_of_literals)
        self._anchors = {number: text for number, text in self.control.items() if self._raw(text) == [number]}
        self._check()

    def encode(self, literals: tuple[str, ...], contents: tuple[str, ...], anchor: int | None) -> tuple[int, ...]:
        """Template text around contents: literal, content, literal, ...

        ``anchor`` is the control token that stands before; it is not part of the result. With it, a tokenizer that treats
        the start of a text specially sees no start here.
        """
        long = sum(map(len, contents)) > _LONG_TEXT
        return self._encode(literals, contents, anchor) if long else self._encode_short(literals, contents, anchor)

    def decode(self, ids: tuple[int, ...]) -> str:
        """The text of ``ids``, control tokens visible."""
        return self._decode(ids) if len(ids) > _LONG_REPLY else self._decode_short(ids)

    def has_control(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def control_tokens_in(self, text: str) -> list[int]:
        """The control tokens of a text of the template's."""
        return [number for number in self._raw(text) if number in self.control]

    def plain(self, text: str) -> list[int]:
        """``text`` without any control token. A tokenizer whose vocabulary holds the control string as a word gets it in two halves."""
        ids = self._without_added_tokens(text)
        if not any(number in self.control for number in ids):
            return ids
        found = self._pattern.search(text) if self._pattern is not None else None
        if found is None or found.end() - found.start() < 2:
            culprit = next(self.control[number] for number in ids if number in self.control)
            raise ValueError(f"the tokenizer turns plain text into the control token {culprit!r}: {text[:80]!r}")
        middle = (found.start() + found.end()) // 2
        return self.plain(text[:middle]) + self.plain(text[middle:])

    def reply(self, before: str, text: str, end: str) -> tuple[int, ...]:
        """``text`` as a model would write it after the template's ``before``, ended by ``end``.

        Special tokens stay plain; the tokenizer's other added tokens (``<tool_call>``) become the tokens that a model uses.
        """
        parts = self._unspecial.split(text) if self._unspecial is not None else [text]
        marks = self._unspecial.findall(text) if self._unspecial is not None else []
        literals = ("", *marks, end)
        head = self.encode((before,), (), None)
        whole = self.encode((before, *literals[1:]), tuple(parts), None)
        if whole[: len(head)] == head:
            return whole[len(head) :]
        return self.encode(literals, tuple(parts), None)

    # --- encoding ---

    def _encode(self, literals: tuple[str, ...], contents: tuple[str, ...], anchor: int | None) -> tuple[int, ...]:
        before = self._anchors.get(anchor, "") if anchor is not None else ""
        ids = self._raw(before + _interleave(literals, contents))
        if tuple(number for number in ids if number in self.control) != self._expected(literals, before):
            return self._encode_in_runs(literals, contents)
        if before and ids[0] != anchor:
            return self._encode(literals, contents, None)
        return tuple(ids[1:] if before else ids)

    def _controls_of_literals(self, literals: tuple[str, ...], before: str) -> tuple[int, ...]:
        return tuple(self.control_tokens_in(before + "x".join(literals)))

    def _encode_in_runs(self, literals: tuple[str, ...], contents: tuple[str, ...]) -> tuple[int, ...]:
        """Control tokens from the literals only; the text between them, literal and content together, without added tokens."""
        ids: list[int] = []
        run = ""
        for index, literal in enumerate(literals):
            start = 0
            for found in self._in_template.finditer(literal) if self._in_template is not None else ():
                ids += self.plain(run + literal[start : found.start()])
                ids.append(self._ids[found.group()])
                run, start = "", found.end()
            run += literal[start:] + (contents[index] if index < len(contents) else "")
        return tuple(ids + self.plain(run))

    def _raw(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _without_added_tokens(self, text: str) -> list[int]:
        if not text:
            return []
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        # ``encode_special_tokens`` of the backend spares special tokens only; the steps by hand know no added token at all.
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        pieces = [text]
        if self._backend.pre_tokenizer is not None:
            pieces = [piece for piece, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in self._backend.model.tokenize(piece)]

    def _decode(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _check(self) -> None:
        for text in self.control.values():
            for probe in (text, f"a {text} b", f"{text}\n{text}"):
                self._encode(("", ""), (probe,), None)


def _control_tokens(tokenizer: Any, template_source: str) -> dict[int, str]:
    found = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special or (token.content in template_source and not token.content.isspace()):
            found[int(number)] = str(token.content)
    for number, text in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=False):
        found.setdefault(int(number), str(text))
    unknown = tokenizer.unk_token_id
    if unknown not in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        found.pop(unknown, None)
    return found


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first)) if longest_first else None


def _interleave(literals: tuple[str, ...], contents: tuple[str, ...]) -> str:
    text = literals[0]
    for literal, content in zip(literals[1:], contents, strict=True):
        text += content + literal
    return text
