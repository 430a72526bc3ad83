"""Prompt values: what a task is expected to yield, remembered across the run.

Two rules, with the same methods:

* :class:`ReceiptOrderMemory` (SPO, arXiv 2509.13232): each outcome shrinks everything before it, in the order of recording.
* :class:`EventTimeMemory` (SPO++, arXiv 2608.24870): an outcome counts by the age of the policy that *generated* it, so that neither
  the order nor the delay of receipts changes a value.

Outcomes lie in [0, 1]. A value is read before the outcome that it is the baseline of is known.
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NEGLIGIBLE_WEIGHT = 1e-12
"""Evidence that weighs less than this, relative to the newest of its task, is forgotten for good."""


@dataclass(frozen=True, slots=True)
class PromptValue:
    """Discounted evidence about one task: ``alpha`` for success, ``beta`` against it.

    Raises ValueError unless both are finite, neither is negative and their sum is positive.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        total = self.alpha + self.beta
        if not (self.alpha >= 0 and self.beta >= 0 and 0 < total < math.inf):
            evidence = f"alpha={self.alpha}, beta={self.beta}"
            raise ValueError(f"a prompt value needs finite alpha >= 0 and beta >= 0 with a positive sum, got {evidence}")

    @property
    def value(self) -> float:
        """``v = alpha / (alpha + beta)``, in [0, 1]."""
        return self.alpha / (self.alpha + self.beta)


DEFAULT_PRIOR = PromptValue(0.5, 0.5)


def prior_from_rollouts(successes: float, rollouts: int, mass: float = 8.0) -> PromptValue:
    """Jeffreys estimate of a task's value from offline rollouts (SPO, arXiv 2509.13232).

    ``p = (successes + 1/2) / (rollouts + 1)``, with total mass ``M = min(rollouts, mass)``: ``alpha = M p``, ``beta = M (1 -
    p)``. Without rollouts it is ``alpha = beta = 1/2``. (The public SPO recipe uses mass 8 for any number of rollouts above 0.)

    ``successes`` is the sum of the outcomes, so it need not be whole. Raises ValueError unless ``0 <= successes <= rollouts`` and
    ``mass > 0``.
    """
    if not (rollouts >= 0 and 0 <= successes <= rollouts):
        raise ValueError(f"successes must lie between 0 and rollouts, got {successes} of {rollouts}")
    if not 0 < mass < math.inf:
        raise ValueError(f"the mass of a prior must be positive and finite, got {mass}")
    if rollouts == 0:
        return DEFAULT_PRIOR
    p = (successes + 0.5) / (rollouts + 1)
    total = min(float(rollouts), mass)
    return PromptValue(total * p, total * (1.0 - p))


class PromptMemory(Protocol):
    """What both memories can do; ``drift`` is read by the receipt-order memory only."""

    def seed(self, task: str, prior: PromptValue, *, version: int = 0) -> None: ...

    def read(self, task: str, version: int) -> PromptValue: ...

    def record(self, task: str, outcome: float, *, version: int, event: int, drift: float | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Evidence:
    """One task's retained outcomes as three parallel columns in the canonical order (version, event)."""

    __slots__ = ("events", "outcomes", "prior", "prior_version", "versions")

    def __init__(self, prior: PromptValue | None, prior_version: int) -> None:
        self.prior = prior  # None: the memory's default prior
        self.prior_version = prior_version
        self.versions = array("q")
        self.events = array("q")
        self.outcomes = array("d")

    def insert(self, version: int, event: int, outcome: float) -> None:
        start = bisect_left(self.versions, version)
        stop = bisect_right(self.versions, version, lo=start)
        place = bisect_left(self.events, event, lo=start, hi=stop)
        self.versions.insert(place, version)
        self.events.insert(place, event)
        self.outcomes.insert(place, outcome)

    def forget_before(self, version: int) -> None:
        keep = bisect_left(self.versions, version)
        if keep:
            del self.versions[:keep], self.events[:keep], self.outcomes[:keep]


class EventTimeMemory:
    """Prompt values in event time (SPO++, arXiv 2608.24870).

    The snapshot of version k has the coordinate ``z_k = -k ln(rho)``: each publication advances it by ``-ln(rho)``. For a
    dispatch at version q,

        alpha_q = rho^(q - k_0) alpha_0 + sum_i rho^(q - k_i) R_i
        beta_q  = rho^(q - k_0) beta_0  + sum_i rho^(q - k_i) (1 - R_i)

    over the recorded outcomes i of the task, each at the version ``k_i`` that generated it; the prior stands at version ``k_0``
    (0 unless seeded elsewhere). The same set of outcomes gives the same value to the last bit, whatever the order in which they
    were recorded: sums run in the order (version, event). Where every weight would underflow, weights are measured from the
    newest evidence instead, which is the same ratio.

    Outcomes whose weight is below 1e-12 relative to the task's newest outcome are pruned, so a read costs O(retained outcomes). A
    prior is never pruned.

    ``rho`` is the weight kept per publication, in (0, 1]; ``prior`` serves every task that is not seeded.
    """

    def __init__(self, rho: float = 0.875, prior: PromptValue = DEFAULT_PRIOR) -> None:
        self.rho = _checked_rho(rho)
        self.prior = prior
        self._horizon = _horizon(self.rho)
        self._tasks: dict[str, _Evidence] = {}

    def __len__(self) -> int:
        """Number of tasks with a prior of their own or a retained outcome."""
        return len(self._tasks)

    def __contains__(self, task: str) -> bool:
        return task in self._tasks

    def seed(self, task: str, prior: PromptValue, *, version: int = 0) -> None:
        """Give ``task`` offline evidence that stands at ``version``. It replaces an earlier prior; recorded outcomes stay."""
        evidence = self._tasks.setdefault(task, _Evidence(None, 0))
        evidence.prior, evidence.prior_version = prior, _checked_number("version", version)

    def read(self, task: str, version: int) -> PromptValue:
        """The value for a dispatch of ``task`` at the snapshot ``version``.

        Raises ValueError where ``version`` is older than some evidence of the task: such a read would look into the future.
        """
        evidence = self._tasks.get(task)
        if evidence is None:
            prior, newest, versions, outcomes = self.prior, 0, array("q"), array("d")
            prior_version = 0
        else:
            prior, prior_version = evidence.prior or self.prior, evidence.prior_version
            versions, outcomes = evidence.versions, evidence.outcomes
            newest = max(versions[-1], prior_version) if versions else prior_version
        if version < newest:
            raise ValueError(f"task {task!r} cannot be read at version {version}: it has evidence of version {newest}")
        rho = self.rho
        weight = rho ** (newest - prior_version)
        alpha, beta = weight * prior.alpha, weight * prior.beta
        for outcome_version, outcome in zip(versions, outcomes, strict=True):
            weight = rho ** (newest - outcome_version)
            alpha += weight * outcome
            beta += weight * (1.0 - outcome)
        return _aged(alpha, beta, rho ** (version - newest))

    def record(self, task: str, outcome: float, *, version: int, event: int, drift: float | None = None) -> None:
        """Add the ``outcome`` of dispatch number ``event``, generated by the snapshot ``version``. ``drift`` plays no part.

        Raises ValueError for an outcome outside [0, 1] and for an event number that the task still retains.
        """
        outcome = _checked_outcome(task, outcome)
        version, event = _checked_number("version", version), _checked_number("event", event)
        evidence = self._tasks.get(task)
        if evidence is None:
            evidence = self._tasks[task] = _Evidence(None, 0)
        elif event in evidence.events:
            raise ValueError(f"event {event} of task {task!r} is already recorded")
        # An outcome that arrives too late to count is dropped here, just as it would have been pruned had it come in time.
        if self._horizon is not None and evidence.versions and version < evidence.versions[-1] - self._horizon:
            return
        evidence.insert(version, event, outcome)
        if self._horizon is not None:
            evidence.forget_before(evidence.versions[-1] - self._horizon)

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain JSON-able data; a memory that loads it reads the same values to the last bit."""
        tasks = {}
        for task, evidence in self._tasks.items():
            prior = None if evidence.prior is None else [evidence.prior.alpha, evidence.prior.beta, evidence.prior_version]
            tasks[task] = [prior, evidence.versions.tolist(), evidence.events.tolist(), evidence.outcomes.tolist()]
        return {"memory": "event-time", "rho": self.rho, "prior": [self.prior.alpha, self.prior.beta], "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything, ``rho`` and the default prior included, by what :meth:`state_dict` returned."""
        _check_kind(state, "event-time")
        rho, prior = _checked_rho(state["rho"]), PromptValue(*state["prior"])
        tasks = {}
        for task, (own, versions, events, outcomes) in state["tasks"].items():
            evidence = _Evidence(None, 0) if own is None else _Evidence(PromptValue(own[0], own[1]), int(own[2]))
            evidence.versions, evidence.events, evidence.outcomes = array("q", versions), array("q", events), array("d", outcomes)
            if not len(versions) == len(events) == len(outcomes):
                raise ValueError(f"the saved evidence of task {task!r} is damaged: its columns have different lengths")
            tasks[task] = evidence
        self.rho, self.prior, self._horizon, self._tasks = rho, prior, _horizon(rho), tasks


class _Running:
    """One task's value in receipt order, with the latest event numbers, so that a repeat is noticed."""

    __slots__ = ("events", "value")

    def __init__(self, value: PromptValue, events: Sequence[int] = ()) -> None:
        self.value = value
        self.events = array("q", events)


class ReceiptOrderMemory:
    """Prompt values in receipt order (SPO, arXiv 2509.13232).

    Each recorded outcome R of a task does ``alpha <- rho alpha + R``, ``beta <- rho beta + (1 - R)``, where

        rho = clip(2^(-D / half_life), rho_min, rho_max)

    and D is the drift: the mean over action tokens of |change in log-probability| of the task's previously consumed response,
    measured by the learner. Without a drift (the first visit) D = 0, so that rho = rho_max. A constant ``rho`` in (0, 1] ignores
    the drift.
    """

    def __init__(
        self,
        rho_min: float = 0.875,
        rho_max: float = 0.96,
        half_life: float = 0.06,
        rho: float | None = None,
        prior: PromptValue = DEFAULT_PRIOR,
    ) -> None:
        self._configure(rho_min, rho_max, half_life, rho, prior)
        self._tasks: dict[str, _Running] = {}

    def _configure(self, rho_min: float, rho_max: float, half_life: float, rho: float | None, prior: PromptValue) -> None:
        if not 0 < half_life < math.inf:
            raise ValueError(f"half_life must be positive and finite, got {half_life}")
        self.rho_min, self.rho_max = _checked_rho(rho_min), _checked_rho(rho_max)
        if rho_min > rho_max:
            raise ValueError(f"rho_min must not exceed rho_max, got {rho_min} > {rho_max}")
        self.half_life = half_life
        self.rho = None if rho is None else _checked_rho(rho)
        self.prior = prior
        self._horizon = _horizon(self.rho_max if self.rho is None else self.rho)

    def __len__(self) -> int:
        """Number of tasks with a prior of their own or an outcome."""
        return len(self._tasks)

    def __contains__(self, task: str) -> bool:
        return task in self._tasks

    def seed(self, task: str, prior: PromptValue, *, version: int = 0) -> None:
        """Start ``task`` from ``prior``, replacing what was there. ``version`` plays no part in receipt order."""
        _checked_number("version", version)
        self._tasks[task] = _Running(prior)

    def read(self, task: str, version: int) -> PromptValue:
        """The value after every outcome recorded so far. ``version`` plays no part in receipt order."""
        running = self._tasks.get(task)
        return self.prior if running is None else running.value

    def record(self, task: str, outcome: float, *, version: int, event: int, drift: float | None = None) -> None:
        """Fold in the ``outcome`` of dispatch number ``event``. ``version`` plays no part in receipt order.

        Raises ValueError for an outcome outside [0, 1], for a drift that counts and is negative or NaN, and for an event number
        among the task's outcomes that may still weigh 1e-12 or more.
        """
        outcome = _checked_outcome(task, outcome)
        version, event = _checked_number("version", version), _checked_number("event", event)
        rho = self.discount(drift)
        running = self._tasks.get(task)
        if running is None:
            running = self._tasks[task] = _Running(self.prior)
        elif event in running.events:
            raise ValueError(f"event {event} of task {task!r} is already recorded")
        running.value = PromptValue(rho * running.value.alpha + outcome, rho * running.value.beta + (1.0 - outcome))
        running.events.append(event)
        if self._horizon is not None and len(running.events) > self._horizon + 1:
            del running.events[0]

    def discount(self, drift: float | None) -> float:
        """``clip(2^(-drift / half_life), rho_min, rho_max)``, None counting as no drift; or the constant rho, whatever the drift."""
        if self.rho is not None:
            return self.rho
        if drift is not None and not drift >= 0:
            raise ValueError(f"drift must be a number >= 0, got {drift}")
        kept: float = 2.0 ** (-(drift or 0.0) / self.half_life)
        return min(max(kept, self.rho_min), self.rho_max)

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain JSON-able data; a memory that loads it reads the same values to the last bit."""
        return {
            "memory": "receipt",
            "rho_min": self.rho_min,
            "rho_max": self.rho_max,
            "half_life": self.half_life,
            "rho": self.rho,
            "prior": [self.prior.alpha, self.prior.beta],
            "tasks": {task: [run.value.alpha, run.value.beta, run.events.tolist()] for task, run in self._tasks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything, the discount's settings and the default prior included, by what :meth:`state_dict` returned."""
        _check_kind(state, "receipt")
        tasks = {task: _Running(PromptValue(alpha, beta), events) for task, (alpha, beta, events) in state["tasks"].items()}
        self._configure(state["rho_min"], state["rho_max"], state["half_life"], state["rho"], PromptValue(*state["prior"]))
        self._tasks = tasks


def _aged(alpha: float, beta: float, age_weight: float) -> PromptValue:
    """Scale sums that are measured from the newest evidence to the reader's version, unless that would lose them to underflow."""
    if (alpha + beta) * age_weight < sys.float_info.min / sys.float_info.epsilon:
        return PromptValue(alpha, beta)
    return PromptValue(alpha * age_weight, beta * age_weight)


def _horizon(rho: float) -> int | None:
    """The largest age, in publications, with ``rho^age >= 1e-12``; None where nothing is ever forgotten."""
    if rho == 1.0:
        return None
    age = math.floor(math.log(NEGLIGIBLE_WEIGHT) / math.log(rho))
    while rho ** (age + 1) >= NEGLIGIBLE_WEIGHT:
        age += 1
    while rho**age < NEGLIGIBLE_WEIGHT:
        age -= 1
    return age


def _checked_rho(rho: float) -> float:
    if not 0 < rho <= 1:
        raise ValueError(f"rho must lie in (0, 1], got {rho}")
    return float(rho)


def _checked_outcome(task: str, outcome: float) -> float:
    if not 0 <= outcome <= 1:
        raise ValueError(f"the outcome of task {task!r} must lie in [0, 1], got {outcome}; an unscored attempt is dropped, not recorded")
    return float(outcome)


def _checked_number(what: str, number: int) -> int:
    if number < 0 or number != int(number):
        raise ValueError(f"{what} must be a whole number >= 0, got {number}")
    return int(number)


def _check_kind(state: Mapping[str, Any], kind: str) -> None:
    if state.get("memory") != kind:
        raise ValueError(f"this is not the state of a {kind} memory: it names {state.get('memory')!r}")
