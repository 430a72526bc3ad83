"""Names that an agent sees, from the ids of an ALFRED problem.

``mug_bar__plus_00_dot_50`` is one of the mugs: it becomes ``mug 2``. Numbers are those of the real engine's demangler without
shuffling: among ids of one name in alphabetical order, the first gets the highest number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_MARKS = (("_bar_", "|"), ("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ","))


def numbered_names(ids: Iterable[str]) -> dict[str, str]:
    """Id to display name. Ids without a position keep their text, with the trailing space the real engine gives them."""
    ordered = sorted(set(ids))
    left = Counter(_base(entity) for entity in ordered if "_bar_" in entity)
    names: dict[str, str] = {}
    for entity in ordered:
        base = _base(entity)
        if "_bar_" in entity:
            names[entity] = f"{base} {left[base]}"
            left[base] -= 1
        else:
            names[entity] = f"{base} "
    return names


def _base(entity: str) -> str:
    """The name before the number; a basin is told from the sink or bathtub that it is part of."""
    if "_bar_" not in entity:
        text = entity
        for mark, character in _MARKS:
            text = text.replace(mark, character)
        return text
    return entity.split("_bar_", 1)[0] + ("basin" if "basin" in entity else "")
