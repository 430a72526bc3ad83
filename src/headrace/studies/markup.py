"""HTML that cannot be injected into: text is escaped wherever it enters, and only what this module built is not."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


Child = Html | str | int | float | None | Iterable["Child"]

_VOID = {"br", "hr", "img", "input", "meta", "link"}  # of HTML; what stands in SVG needs its end tag


def el(tag: str, *children: Child, **attributes: Any) -> Html:
    """``<tag ...>children</tag>``. Plain strings are escaped; None and empty iterables vanish.

    Attribute names: a trailing underscore is dropped and inner ones become hyphens (``class_``, ``data_chart``). False and
    None leave an attribute out, True leaves it bare, other values are escaped.
    """
    written = "".join(_attribute(name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    inner = join(children)
    return Html(f"<{tag}{written}>") if tag in _VOID and not inner else Html(f"<{tag}{written}>{inner}</{tag}>")


def join(children: Iterable[Child]) -> Html:
    """The children one after another, escaped where they are plain text."""
    return Html("".join(_child(child) for child in children))


def json_script(identity: str, data: Any) -> Html:
    """Data for the page's script. Nothing in it can end the element: ``<``, ``>`` and ``&`` are written as JSON escapes."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{html.escape(identity)}">{text}</script>')


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return html.escape(str(child), quote=False)
    return join(child)


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(str(value))}"'
