"""One table: a recipe is a memory, a measure, an objective and a group size.

Nothing else distinguishes the methods: a variant is ``dataclasses.replace`` of a row, and a new method is a new row or a
:class:`Recipe` of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from .advantages import GROUP_MEASURES, MEASURES
from .memory import DEFAULT_PRIOR, EventTimeMemory, PromptMemory, PromptValue, ReceiptOrderMemory
from .objective_base import ObjectiveFunction
from .sequence_objectives import GMPO, GSPO, SSPO
from .token_objectives import CISPO, SAPO, Clip

MemoryKind = Literal["event-time", "receipt"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What one method consists of.

    ``memory``: "event-time" (SPO++), "receipt" (SPO) or None; with a memory the raw advantage is outcome minus frozen value,
    without one the outcome. ``rho``: the memory's discount; None with "receipt" follows the drift. ``measure``: a measure of
    :func:`normalize`, or "aligned" for the one that the objective averages under (see :attr:`resolved_measure`). ``objective``:
    any callable of the objectives' signature. ``group_size``: siblings per dispatch, 1 without groups. ``paper``: arXiv number.

    Raises ValueError for a combination that has no meaning: a group measure without groups, a discount without a memory, an
    event-time memory without a discount.
    """

    name: str
    title: str = ""
    memory: MemoryKind | None = None
    rho: float | None = None
    measure: str = "none"
    objective: ObjectiveFunction
    group_size: int = 1
    paper: str | None = None

    def __post_init__(self) -> None:
        if self.memory not in ("event-time", "receipt", None):
            raise ValueError(f"recipe {self.name!r}: unknown memory {self.memory!r}; known: 'event-time', 'receipt', None")
        if self.group_size < 1:
            raise ValueError(f"recipe {self.name!r}: group_size must be at least 1, got {self.group_size}")
        measure = self.resolved_measure
        if measure not in MEASURES:
            raise ValueError(f"recipe {self.name!r}: unknown measure {measure!r}; known: {', '.join(MEASURES)}, aligned")
        if measure in GROUP_MEASURES and self.group_size == 1:
            raise ValueError(f"recipe {self.name!r}: measure {measure!r} compares siblings, so group_size must be at least 2; it is 1")
        if self.memory is None and self.rho is not None:
            raise ValueError(f"recipe {self.name!r}: rho={self.rho} discounts a memory, but the recipe has none")
        if self.memory == "event-time" and self.rho is None:
            raise ValueError(f"recipe {self.name!r}: an event-time memory needs a discount rho in (0, 1]")
        if self.rho is not None and not 0 < self.rho <= 1:
            raise ValueError(f"recipe {self.name!r}: rho must lie in (0, 1], got {self.rho}")

    @property
    def resolved_measure(self) -> str:
        """``measure``, with "aligned" replaced by the measure that the objective averages under."""
        return aligned_measure(self.objective) if self.measure == "aligned" else self.measure

    @property
    def paper_url(self) -> str | None:
        """Where to read about the method."""
        return None if self.paper is None else f"https://arxiv.org/abs/{self.paper}"

    def with_max_len(self, max_len: int) -> Recipe:
        """The recipe with the constant of a ``fixed`` reduction set from the configuration; unchanged for every other objective."""
        if isinstance(self.objective, Clip) and self.objective.reduction == "fixed":
            return replace(self, objective=replace(self.objective, max_len=max_len))
        return self

    def new_memory(self, prior: PromptValue = DEFAULT_PRIOR) -> PromptMemory | None:
        """An empty memory of the recipe's kind, or None."""
        if self.memory == "event-time":
            assert self.rho is not None  # checked above
            return EventTimeMemory(self.rho, prior)
        return ReceiptOrderMemory(rho=self.rho, prior=prior) if self.memory == "receipt" else None


def aligned_measure(objective: ObjectiveFunction) -> str:
    """The measure under which an objective averages.

    "trajectory" for a sequence-mean, "action-token" where every token weighs the same (token-mean and fixed).

    Reads the objective's ``reduction``; raises ValueError where it has none.
    """
    reduction = getattr(objective, "reduction", None)
    measures = {"token-mean": "action-token", "fixed": "action-token", "sequence-mean": "trajectory"}
    if reduction not in measures:
        known = ", ".join(measures)
        raise ValueError(f"measure 'aligned' needs an objective whose reduction is one of {known}; {objective!r} has {reduction!r}")
    return measures[reduction]


_TABLE = (
    Recipe(
        name="spo++",
        title="Single-stream, values in event time, action-token measure",
        memory="event-time",
        rho=0.875,
        measure="action-token",
        objective=Clip(dual=2.0),
        paper="2608.24870",
    ),
    Recipe(
        name="spo",
        title="Single-stream, values in receipt order, trajectory measure",
        memory="receipt",
        measure="trajectory",
        objective=Clip(dual=10.0),
        paper="2509.13232",
    ),
    Recipe(
        name="spo++/trajectory",
        title="SPO++ with SPO's measure",
        memory="event-time",
        rho=0.875,
        measure="trajectory",
        objective=Clip(dual=2.0),
        paper="2608.24870",
    ),
    Recipe(
        name="spo++/receipt",
        title="SPO++ with values in receipt order",
        memory="receipt",
        rho=0.875,
        measure="action-token",
        objective=Clip(dual=2.0),
        paper="2608.24870",
    ),
    Recipe(name="sspo", title="Soft sequence gate", measure="group", group_size=8, objective=SSPO(), paper="2602.19327"),
    Recipe(
        name="spo++sspo",
        title="Single-stream, values in event time, soft sequence gate",
        memory="event-time",
        rho=0.875,
        measure="trajectory",
        objective=SSPO(),
    ),
    Recipe(
        name="grpo",
        title="Group-relative policy optimization",
        measure="group",
        group_size=8,
        objective=Clip(high=0.2, reduction="sequence-mean"),
        paper="2402.03300",
    ),
    Recipe(
        name="rloo",
        title="REINFORCE with a leave-one-out baseline",
        measure="leave-one-out",
        group_size=8,
        objective=Clip(high=0.2, reduction="fixed"),
        paper="2402.14740",
    ),
    Recipe(
        name="dr_grpo",
        title="GRPO without its two normalizations",
        measure="group-mean",
        group_size=8,
        objective=Clip(high=0.2, reduction="fixed"),
        paper="2503.20783",
    ),
    Recipe(name="dapo", title="Decoupled clip, token mean", measure="group", group_size=8, objective=Clip(), paper="2503.14476"),
    Recipe(name="gspo", title="Clipped sequence ratio", measure="group", group_size=8, objective=GSPO(), paper="2507.18071"),
    Recipe(name="gmpo", title="Geometric mean of clipped ratios", measure="group", group_size=8, objective=GMPO(), paper="2507.20673"),
    Recipe(name="sapo", title="Soft token gate", measure="group", group_size=8, objective=SAPO(), paper="2511.20347"),
    Recipe(name="cispo", title="Clipped importance weights", measure="group", group_size=8, objective=CISPO(), paper="2506.13585"),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({row.name: row for row in _TABLE})


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError, naming the nearest valid names, where there is none."""
    if name in RECIPES:
        return RECIPES[name]
    near = get_close_matches(name, RECIPES, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    raise ValueError(f"unknown recipe {name!r}{hint} Known recipes: {', '.join(RECIPES)}")
