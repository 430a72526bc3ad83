"""One self-contained HTML page about one run, or about several side by side.

``write_report`` is the whole of it for runs; whoever compares runs in another way (studies) puts sections of their own in
front by ``extra`` or builds a page from sections by ``render_page``. The page needs no network: style, script, charts and
data are in it. Curves are drawn here, so that they show without a script; the script adds values under the pointer, the
theme switch and the browser of attempts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import headrace
from headrace.studies.attempt_browser import MOST_ATTEMPTS, attempt_browser
from headrace.studies.diagnostics import COLLECTION, CREDIT, STEP, diagnostic_grid, unnamed_diagnostics
from headrace.studies.markup import Html, el
from headrace.studies.report_sections import headline, learning_curve, losses, run_facts, settings, success_by_kind, time_split
from headrace.studies.run_data import RunData, read_runs


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: ``anchor`` is its place in the address, ``title`` its heading and its entry at the top."""

    anchor: str
    title: str
    body: Html
    lead: str = ""


def write_report(
    run_folders: Sequence[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    extra: Sequence[Section] = (),
    attempts: int = MOST_ATTEMPTS,
) -> Path:
    """Write the page about these runs to ``out`` (aside first, then renamed) and return its path.

    ``extra`` sections stand between the learning curve and the rest. At most ``attempts`` attempts are shown in full, which
    bounds the size of the page. ``RunError`` where a run is missing or damaged.
    """
    if not run_folders:
        raise ValueError("a report is about at least one run")
    runs = read_runs(run_folders)
    title = title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs side by side")
    sections = run_sections(runs, attempts=attempts)
    page = render_page(title, run_facts(runs), [*sections[:2], *extra, *sections[2:]])
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    aside.write_text(page, encoding="utf-8")
    aside.replace(out)
    return out


def run_sections(runs: Sequence[RunData], *, attempts: int = MOST_ATTEMPTS) -> list[Section]:
    """The parts of a report about runs, in order; the first two are the result and the learning curve."""
    found = [
        Section("result", "Result", headline(runs)),
        Section("learning", "Learning curve", learning_curve(runs)),
        Section(
            "kinds",
            "Kinds of task",
            success_by_kind(runs),
            "Success in training, by kind: which are learned, and which hold the average down.",
        ),
        Section(
            "credit",
            "Credit",
            diagnostic_grid(CREDIT, runs),
            "What is learned from: the way from outcomes to the advantage that each token is trained with.",
        ),
        Section(
            "step",
            "Optimizer",
            diagnostic_grid((*STEP, *unnamed_diagnostics(runs)), runs),
            "How far each update moves the policy.",
        ),
        Section("collection", "Collection", diagnostic_grid(COLLECTION, runs), "How fresh and how fast the stream of attempts is."),
        Section("time", "Time", time_split(runs)),
        Section("losses", "Dropped attempts", losses(runs), "Sent out, but not trained on."),
        Section("attempts", "Attempts", attempt_browser(runs, most=attempts), "Read what the policy did, and what it was credited with."),
        Section("settings", "Settings", settings(runs)),
    ]
    return [section for section in found if section.body]


def render_page(title: str, facts: Html, sections: Sequence[Section]) -> str:
    """A whole HTML document."""
    page = resources.files("headrace.studies") / "report_page"
    style, script = (Html((page / name).read_text(encoding="utf-8")) for name in ("style.css", "script.js"))
    # Where a browser honours it, nothing in this page can load or send anything.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · Headrace"),
        el("style", style),
    )
    contents = el("nav", [el("a", section.title, href=f"#{section.anchor}") for section in sections])
    top = el(
        "header", el("div", el("p", "Headrace report", class_="brand"), _theme_switch(), class_="top"), el("h1", title), facts, contents
    )
    foot = el("footer", f"Written by Headrace {headrace.__version__}. Updates count from 1.")
    body = el("body", top, el("main", [_section(section) for section in sections]), foot, el("script", script))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _section(section: Section) -> Html:
    lead = el("p", section.lead, class_="lead") if section.lead else None
    return el("section", el("h2", section.title), lead, section.body, id=section.anchor)


def _theme_switch() -> Html:
    return el("button", "Theme", type="button", id="theme", title="Switch between light and dark")
