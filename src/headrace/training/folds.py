"""The state of a run as a fold over its event log.

The live run, a resumed run and a replay all build their state by ``RunState.apply``, so there is one truth: what a run
knows is what its log says. Nothing here draws random numbers or reads a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.algorithms.memory import EventTimeMemory, PromptMemory, PromptValue, ReceiptOrderMemory
from headrace.records.ledger import effective
from headrace.rollout.trajectory import Consumption, Dispatch, Drop, Event, Prior, Publication, Receipt, Restored

__all__ = ["RunState", "Waiting", "effective", "fold"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A received attempt that no update has used yet."""

    dispatch: Dispatch
    receipt: Receipt


@dataclass(slots=True)
class RunState:
    """What a run knows after its events so far.

    ``memory`` is empty at the start and None for a recipe without one. It learns an outcome when the recipe's clock says so:
    an ``EventTimeMemory`` at the receipt, under the version and number of the dispatch; a ``ReceiptOrderMemory`` at the
    consumption, with its drift. An attempt without action tokens never reaches it.

    ``waiting`` is in receipt order; ``in_flight`` in dispatch order. ``completed_groups`` are the groups with no member in
    flight and at least one waiting, in the order in which they got there (log a group's dispatches together).
    """

    memory: PromptMemory | None = None
    log_length: int = 0
    version: int = 0
    next_batch: int = 0
    next_dispatch: int = 0
    next_group: int = 0
    priors: dict[str, Prior] = field(default_factory=dict)
    in_flight: dict[int, Dispatch] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    completed_groups: list[int] = field(default_factory=list)
    drops_by_reason: Counter[str] = field(default_factory=Counter)
    drops_by_task: Counter[str] = field(default_factory=Counter)
    dispatches_by_task: Counter[str] = field(default_factory=Counter)

    def apply(self, event: Event, position: int) -> None:
        """Take in the event at ``position`` of the log: ``state.apply(event, store.append(event))``.

        Positions may skip what a restore took back. ``ValueError`` for a ``Restored`` that takes back events which this
        state holds: fold the log again.
        """
        if position < self.log_length:
            raise ValueError(f"position {position} is already part of this state, which holds {self.log_length} positions")
        match event:
            case Prior():
                self._take_prior(event)
            case Dispatch():
                self._take_dispatch(event)
            case Receipt():
                self._take_receipt(event)
            case Drop():
                self._take_drop(event)
            case Consumption():
                self._take_consumption(event)
            case Publication():
                self.version = event.version
                self.next_batch = max(self.next_batch, event.batch + 1)
            case Restored():
                if event.log_position < self.log_length:
                    raise ValueError(
                        f"the restore at position {position} takes back events from position {event.log_position} on, "
                        f"which this state holds up to {self.log_length}: fold the log again"
                    )
        self.log_length = position + 1

    def _take_prior(self, event: Prior) -> None:
        self.priors[event.task] = event
        if self.memory is not None:
            self.memory.seed(event.task, PromptValue(event.alpha, event.beta), version=event.version)

    def _take_dispatch(self, event: Dispatch) -> None:
        self.in_flight[event.number] = event
        self.next_dispatch = max(self.next_dispatch, event.number + 1)
        self.dispatches_by_task[event.task] += 1
        if event.group is not None:
            self.next_group = max(self.next_group, event.group + 1)

    def _take_receipt(self, event: Receipt) -> None:
        dispatch = self.in_flight.pop(event.dispatch)
        self.waiting[event.dispatch] = Waiting(dispatch, event)
        if isinstance(self.memory, EventTimeMemory) and event.action_tokens > 0:
            self.memory.record(dispatch.task, event.outcome, version=dispatch.version, event=dispatch.number)
        self._settle(dispatch.group)

    def _take_drop(self, event: Drop) -> None:
        received = self.waiting.pop(event.dispatch, None)
        dispatch = received.dispatch if received else self.in_flight.pop(event.dispatch)
        self.drops_by_reason[event.reason] += 1
        self.drops_by_task[dispatch.task] += 1
        self._settle(dispatch.group)

    def _take_consumption(self, event: Consumption) -> None:
        used = self.waiting.pop(event.dispatch)
        dispatch, receipt = used.dispatch, used.receipt
        self.next_batch = max(self.next_batch, event.batch + 1)
        if isinstance(self.memory, ReceiptOrderMemory) and receipt.action_tokens > 0:
            self.memory.record(dispatch.task, receipt.outcome, version=dispatch.version, event=dispatch.number, drift=event.drift)
        self._settle(dispatch.group)

    def _settle(self, group: int | None) -> None:
        if group is None:
            return
        complete = all(d.group != group for d in self.in_flight.values()) and any(w.dispatch.group == group for w in self.waiting.values())
        if complete and group not in self.completed_groups:
            self.completed_groups.append(group)
        elif not complete and group in self.completed_groups:
            self.completed_groups.remove(group)


def fold(events: Iterable[tuple[int, Event]], memory: PromptMemory | None = None) -> RunState:
    """The state after a whole log, ``events`` being (position, event) from position 0, what restores took back included.

    ``memory`` is a fresh memory of the run's recipe, or None for a recipe without one.
    """
    state = RunState(memory)
    for position, event in effective(events):
        state.apply(event, position)
    return state
