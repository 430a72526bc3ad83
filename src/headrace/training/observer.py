"""What a run tells whoever watches it; a display implements it, tests count with it, nobody has to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.records.metrics import UpdateMetrics


class Observer(Protocol):
    def phase(self, name: str, total: int | None = None) -> None:
        """A new part of the work begins; ``total`` steps, if that is known."""
        ...

    def progress(self, done: int, text: str = "") -> None:
        """``done`` steps of the current phase are behind us."""
        ...

    def update(self, metrics: UpdateMetrics) -> None: ...

    def note(self, text: str) -> None:
        """One sentence that a person should read."""
        ...


@dataclass
class Silent:
    """An observer that looks away."""

    def phase(self, name: str, total: int | None = None) -> None: ...

    def progress(self, done: int, text: str = "") -> None: ...

    def update(self, metrics: UpdateMetrics) -> None: ...

    def note(self, text: str) -> None: ...
