"""The Python entry: ``headrace.train``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headrace.config import Config
from headrace.errors import RunFailed
from headrace.studies.report import write_report
from headrace.training.observer import Observer
from headrace.training.run import RunResult
from headrace.training.run import train as _train


def train(
    config: Config | str | Path, *, out: str | Path | None = None, resume: bool = False, observer: Observer | None = None
) -> RunResult:
    """Train as ``config`` (a ``Config`` or a TOML file) says, write the report, and say where everything lies.

    ``out``: the run's directory, by default a new one below ``runs/``. ``resume``: go on with the run in ``out``.
    Raises ``headrace.errors.UserError`` for what the caller can mend, ``RunFailed`` where the run could not go on.
    """
    result = _train(config, out=out, resume=resume, observer=observer)
    try:
        report = write_report([result.folder], result.folder / "report.html")
    except OSError as error:
        raise RunFailed(f"the run is whole, but not its report ({error}); try again: headrace report {result.folder}") from error
    return dataclasses.replace(result, report=report)
