"""The command ``headrace``. Everything heavy is imported by the command that needs it, so that ``--help`` is quick.

Exit status: 0 done, 1 the run failed, 2 the command or the configuration is wrong, 130 interrupted with a resumable run left behind.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from headrace import __version__
from headrace.errors import RunFailed, UserError

if TYPE_CHECKING:
    from headrace.config import Config

app = typer.Typer(
    name="headrace",
    help="Train language-model agents online from a stream of single attempts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="A configuration; see configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Replace one value of the configuration; may be repeated.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live display.")]


def _version(show: bool) -> None:
    if show:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigFile,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The run's directory (default: a new one below runs/).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    plain: Plain = False,
) -> None:
    """Train a policy; leaves a run directory with log, checkpoints, policy and report."""
    from headrace.api import train as run
    from headrace.display import watching
    from headrace.training.run import how_to_go_on

    configuration = _load(config, set_)
    with watching(plain) as observer:
        result = run(configuration, out=out, resume=resume, observer=observer)
    for line in result.summary():
        print(line)
    if result.interrupted:
        print(f"interrupted after {result.updates} updates; {how_to_go_on(result.folder)}")
        raise typer.Exit(130)


@app.command()
def warmup(config: ConfigFile, set_: Overrides = None, plain: Plain = False) -> None:
    """Make the warm-started policy of a configuration (or find it in the cache) and name its folder."""
    from headrace.display import watching
    from headrace.training.jobs import warm_start

    with watching(plain) as observer:
        folder = warm_start(_load(config, set_), observer)
    print(folder)


@app.command()
def values(config: ConfigFile, set_: Overrides = None, plain: Plain = False) -> None:
    """Measure the offline prompt values of a configuration (or find them in the cache)."""
    from headrace.display import values_table, watching
    from headrace.training.jobs import measure_values

    with watching(plain) as observer:
        found = measure_values(_load(config, set_), observer)
    values_table(found)


@app.command()
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="A run directory, a CONFIG.toml (its policy before training), or a Hugging Face name or folder."
        ),
    ],
    config: Annotated[Path | None, typer.Option("--config", metavar="CONFIG.toml", help="Needed for a model; a run has its own.")] = None,
    set_: Overrides = None,
    split: Annotated[str, typer.Option("--split", help="train, seen or unseen (whatever splits the world has).")] = "train",
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="How many tasks of the split (default: as configured).")] = None,
    attempts: Annotated[int | None, typer.Option("--attempts", min=1, help="Attempts at each task (default: as configured).")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Of mean@k, pass@k and maj@k (default: the attempts at each task).")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token instead of sampling.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the sampling (default: as configured).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plain: Plain = False,
) -> None:
    """Success of a policy on a split, in all and by kind of task, mean@k, pass@k and maj@k, with 95 % intervals."""
    from headrace.display import evaluation_table, watching
    from headrace.training.jobs import evaluate as run

    with watching(plain or as_json) as observer:
        evaluation = run(
            target,
            config,
            observer,
            overrides=set_ or [],
            split=split,
            tasks=tasks,
            attempts=attempts,
            k=k,
            greedy=greedy,
            seed=seed,
        )
    evaluation_table(evaluation, as_json=as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One run directory, or several side by side.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="Default: report.html in the (first) run.")] = None,
) -> None:
    """Write a self-contained HTML report."""
    from headrace.studies.report import write_report

    for folder in runs:
        _require_run(folder)
    file = out or runs[0] / "report.html"
    try:
        print(write_report(runs, file))
    except OSError as error:
        raise UserError(f"--out {file} cannot be written: {error.strerror or error}") from error


@app.command()
def replay(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Recompute every frozen value and every advantage of a run from its log and compare them with what was used."""
    from headrace.config import resolve_recipe
    from headrace.training.jobs import run_config
    from headrace.training.replay import replay as recompute

    _require_run(run)
    findings = recompute(run, resolve_recipe(run_config(run)))
    print(findings)
    if not findings.ok:
        raise typer.Exit(1)


@app.command()
def play(
    world: Annotated[str, typer.Argument(metavar="WORLD", help="household, math, alfworld, or file.py:name.")],
    task: Annotated[int, typer.Option("--task", min=0, help="The number of the task in its split.")] = 0,
    split: Annotated[str, typer.Option("--split", help="The split that the task is taken from.")] = "train",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="An option of the world, such as rooms=full.")
    ] = None,
) -> None:
    """Play a task yourself."""
    from headrace.play import play as run

    run(world, split=split, number=task, options=set_ or [])


@app.command()
def recipes() -> None:
    """The table of recipes: memory, measure, objective, group size, paper."""
    from headrace.display import recipes_table

    recipes_table()


def _load(path: Path, overrides: Sequence[str] | None) -> Config:
    from headrace.config import load

    return load(path, overrides or [])


def _require_run(folder: Path) -> None:
    from headrace.records.run_store import is_run

    if not is_run(folder):
        raise UserError(f"{folder} is not a run directory (it has no run.sqlite of Headrace)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit status; what ends badly says so in one clear sentence on stderr."""
    try:
        app(args=arguments)
    except UserError as error:
        print(f"headrace: {error}", file=sys.stderr)
        _leave(2)
    except RunFailed as error:
        print(f"headrace: {error}", file=sys.stderr)
        _leave(1)
    except SystemExit as leaving:
        _leave(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except Exception:
        traceback.print_exc()
        _leave(1)


def _leave(status: int) -> NoReturn:
    """``sys.exit``, but no thread in which a world has blocked keeps the process from ending."""
    deadline = time.monotonic() + 5.0
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread() and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in others if thread.is_alive()]
    if stuck:
        print(f"headrace: left without waiting for threads that do not end: {', '.join(stuck)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
