"""Does the log account for everything that was trained on?

Replay walks a run's log with nothing but its recipe: it folds the events that count, reads every frozen value from a memory
of its own, gives every batch its advantages by the function that the loop used, and compares bit for bit. What it cannot
recompute is named in ``ReplayReport``: outcomes (the world made them) and SPO's drift (it takes the weights).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.algorithms import Recipe
from headrace.records.ledger import Ledger, LedgerError, effective
from headrace.records.run_store import RunError, RunReader
from headrace.rollout.trajectory import Consumption, Dispatch, Event, Publication, Receipt, Trajectory
from headrace.training.credit import credit
from headrace.training.folds import RunState


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something in the log that does not follow from what lies before it. ``dispatch`` is None where no attempt is concerned."""

    position: int
    dispatch: int | None
    sentence: str

    def __str__(self) -> str:
        return f"position {self.position}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """``values``, ``advantages`` and ``batches`` were recomputed and compared exactly (tolerance 0); ``drifts`` were taken from the
    log as they stand. ``unfinished`` consumptions belong to a last batch that a killed process did not log to its end."""

    folder: Path
    events: int
    restored: int
    values: int
    advantages: int
    batches: int
    drifts: int
    unfinished: int
    mismatches: tuple[Mismatch, ...]

    @property
    def ok(self) -> bool:
        return not self.mismatches

    def _verdict(self) -> str:
        if self.mismatches:
            return f"{len(self.mismatches)} do not match"
        return "all match bit for bit" if self.values else "nothing to compare"

    def __str__(self) -> str:
        text = (
            f"{self.folder}: {self.events} events ({self.restored} taken back by restores); "
            f"recomputed {self.values} frozen values and {self.advantages} advantages in {self.batches} batches: {self._verdict()}"
        )
        if self.unfinished:
            text += f"; the last {self.unfinished} consumptions are of a batch that was not logged to its end, and were not compared"
        if self.drifts:
            text += f"; {self.drifts} drifts were taken from the log (recomputing them takes the weights)"
        return "\n  ".join([text, *map(str, self.mismatches)])


def replay(folder: str | Path, recipe: Recipe) -> ReplayReport:
    """Recompute what the run in ``folder`` used under ``recipe``, the one that it was trained with. ``RunError`` for an unreadable log."""
    with RunReader(folder) as reader:
        log = list(reader.events())
        try:
            counted = list(effective(log))
        except LedgerError as error:
            raise RunError(f"{reader.folder} holds a damaged log: {error}") from error
        walk = _Walk(reader, recipe)
        for position, event in counted:
            walk.step(position, event)
        walk.finish(ended_by_consumption=bool(counted) and isinstance(counted[-1][1], Consumption))
    return ReplayReport(
        folder=Path(folder),
        events=len(log),
        restored=len(log) - len(counted),
        values=walk.values,
        advantages=walk.advantages,
        batches=len(walk.batch_sizes),
        drifts=walk.drifts,
        unfinished=walk.unfinished,
        mismatches=tuple(sorted(walk.mismatches, key=lambda mismatch: mismatch.position)),
    )


@dataclass
class _Walk:
    """One pass over the events that count."""

    reader: RunReader
    recipe: Recipe
    values: int = 0
    advantages: int = 0
    drifts: int = 0
    unfinished: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.state = RunState(self.recipe.new_memory())
        self.batch: list[tuple[int, Consumption, Receipt]] = []

    def step(self, position: int, event: Event) -> None:
        try:
            self.ledger.admit(event)
        except LedgerError as error:
            self._complain(position, getattr(event, "dispatch", getattr(event, "number", None)), str(error))
            return
        match event:
            case Dispatch():
                self._check_value(position, event)
            case Consumption():
                self._take(position, event)
            case Publication():
                self._check_batch()
            case _:
                pass
        self.state.apply(event, position)

    def finish(self, *, ended_by_consumption: bool) -> None:
        """A process killed while it logs a batch leaves a log that ends in the middle of it."""
        if ended_by_consumption and self.batch_sizes and len(self.batch) < self.batch_sizes[-1]:
            self.unfinished = len(self.batch)
        else:
            self._check_batch()

    def _check_value(self, position: int, dispatch: Dispatch) -> None:
        recorded = (dispatch.alpha, dispatch.beta)
        self.values += 1
        try:
            expected = self._expected_value(dispatch)
        except ValueError as error:
            self._complain(position, dispatch.number, f"the value of dispatch {dispatch.number} cannot be recomputed: {error}")
            return
        if recorded != expected:
            self._complain(
                position,
                dispatch.number,
                f"dispatch {dispatch.number} ({dispatch.task}) was frozen at alpha, beta = {recorded}, recomputed {expected}",
            )

    def _expected_value(self, dispatch: Dispatch) -> tuple[float | None, float | None]:
        if self.state.memory is None:
            return None, None
        value = self.state.memory.read(dispatch.task, dispatch.version)
        return value.alpha, value.beta

    def _take(self, position: int, consumption: Consumption) -> None:
        if self.batch and self.batch[-1][1].batch != consumption.batch:
            self._check_batch()
        if consumption.batch != len(self.batch_sizes):
            self._complain(
                position,
                consumption.dispatch,
                f"dispatch {consumption.dispatch} was consumed by batch {consumption.batch}, but batch {len(self.batch_sizes)} was due",
            )
        self.drifts += consumption.drift is not None
        self.batch.append((position, consumption, self.state.waiting[consumption.dispatch].receipt))

    def _check_batch(self) -> None:
        if not self.batch:
            return
        batch, self.batch = self.batch, []
        self.batch_sizes.append(len(batch))
        try:
            attempts = [self._attempt(position, receipt) for position, _, receipt in batch]
            expected = credit(attempts, self.recipe).advantages
        except (ValueError, RunError) as error:
            self._complain(batch[0][0], None, f"the advantages of batch {batch[0][1].batch} cannot be recomputed: {error}")
            return
        self.advantages += len(batch)
        for (position, consumption, _), advantage in zip(batch, expected, strict=True):
            if consumption.advantage != advantage:
                number, used = consumption.dispatch, consumption.advantage
                self._complain(
                    position,
                    number,
                    f"dispatch {number} was trained on with advantage {used!r} in batch {consumption.batch}, recomputed {advantage!r}",
                )

    def _attempt(self, position: int, receipt: Receipt) -> Trajectory:
        """The stored attempt, checked against its receipt: the loss mask is what counts."""
        attempt = self.reader.trajectory(receipt.dispatch)
        logged = (receipt.outcome, receipt.action_tokens, receipt.success)
        stored = (attempt.outcome, attempt.action_tokens, attempt.success)
        if logged != stored:
            number = receipt.dispatch
            self._complain(
                position,
                number,
                f"dispatch {number} was received with outcome, action tokens, success = {logged}, but its attempt holds {stored}",
            )
        return attempt

    def _complain(self, position: int, dispatch: int | None, sentence: str) -> None:
        self.mismatches.append(Mismatch(position, dispatch, sentence))
