"""Charts as HTML and inline SVG, drawn here so that a report needs neither network nor script to show its curves.

The drawing is stretched to whatever width it gets, while lines keep their width (``non-scaling-stroke``) and labels are
HTML on top of it, so the same chart is sharp and readable on a phone and on a desk. Colours are CSS variables of the page.
A script adds the values under the pointer, from the data that each chart carries.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

from headrace.studies.markup import Child, Html, el

Style = Literal["line", "faint", "dashed", "dotted", "marks"]
PALETTE = 8  # colours in the page's style; a ninth run starts over
MOST_POINTS = 400  # of one line; beyond that neighbours are averaged


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or marks with whiskers. ``colour`` counts the page's palette; points with a None or NaN break the line."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    style: Style = "line"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    legend: bool = True


@dataclass(frozen=True, slots=True)
class Axes:
    """``reference`` draws a thin line at a value that means something (a ratio of 1); ``zero`` lets the axis start there."""

    x: str
    y: str
    zero: bool = False
    reference: float | None = None
    low: float | None = None
    high: float | None = None
    height: int = 168
    format: Callable[[float], str] | None = None


def line_chart(series: Sequence[Series], axes: Axes) -> Html:
    """A chart with labelled axes, a legend where there is more than one thing to tell apart, and values on hover."""
    drawn = [thinned(_without_residue(replace(one, colour=one.colour % PALETTE))) for one in series]
    x_low, x_high = _extent([value for one in drawn for value in one.x])
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    ticks = _y_ticks(drawn, axes)
    y_low, y_high = ticks[0], ticks[-1]
    write = axes.format or tick_format(ticks)

    def across(value: float) -> float:
        return 100 * (value - x_low) / (x_high - x_low)

    def down(value: float) -> float:
        return 100 * (y_high - value) / (y_high - y_low)

    grid = [el("path", d=f"M0 {down(tick):.2f}H100", class_="grid") for tick in ticks]
    if axes.reference is not None and y_low <= axes.reference <= y_high:
        grid.append(el("path", d=f"M0 {down(axes.reference):.2f}H100", class_="reference"))
    shapes = [shape for one in drawn for shape in _shapes(one, across, down)]
    plot = el("svg", grid, shapes, viewBox="0 0 100 100", preserveAspectRatio="none", aria_hidden="true")
    y_labels = [el("span", write(tick), style=f"top:{down(tick):.2f}%") for tick in ticks]
    x_labels = [el("span", f"{tick:g}", style=f"left:{across(tick):.2f}%") for tick in _x_ticks(x_low, x_high)]
    payload = {
        "x": [x_low, x_high],
        "xLabel": axes.x,
        "series": [_payload(one, write, [round(down(y), 1) if _real(y) else None for y in one.y]) for one in drawn],
    }
    return el(
        "div",
        el("div", axes.y, class_="y-title"),
        el("div", y_labels, class_="y-labels"),
        el("div", plot, class_="plot", data_chart=json.dumps(payload, separators=(",", ":"))),
        el("div", x_labels, class_="x-labels"),
        el("div", axes.x, class_="x-title"),
        _legend(drawn),
        class_="chart",
        style=f"--height:{axes.height}px",
        role="img",
        aria_label=f"{axes.y} by {axes.x}: {', '.join(dict.fromkeys(one.label for one in drawn))}",
    )


def stacked_bar(parts: Sequence[tuple[str, float]], write: Callable[[float], str]) -> Html:
    """One bar split by shares, its legend below. Parts of nothing vanish."""
    total = sum(value for _, value in parts)
    shown = [(i, label, value) for i, (label, value) in enumerate(parts) if value > 0]
    bars = [
        el("span", class_=f"c{i % PALETTE}", style=f"width:{100 * value / total:.3f}%", title=f"{label}: {write(value)}")
        for i, label, value in shown
    ]
    keys = [el("li", swatch(i), f"{label} ", el("b", _rounded_percent(value / total)), f" ({write(value)})") for i, label, value in shown]
    return el("div", el("div", bars, class_="bar"), el("ul", keys, class_="legend"), class_="stacked")


def interval_row(label: Child, value: float, low: float, high: float, colour: int) -> Html:
    """A share in [0, 1] with its interval, on a line from 0 to 100 %."""
    return el(
        "div",
        el("span", label, class_="interval-label"),
        el(
            "span",
            el("span", class_=f"whisker c{colour % PALETTE}", style=f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"),
            el("span", class_=f"dot c{colour % PALETTE}", style=f"left:{100 * value:.2f}%"),
            class_="interval-line",
        ),
        el("span", el("b", percent(value)), f" [{100 * low:.1f}, {100 * high:.1f}]", class_="interval-value"),
        class_="interval",
    )


def swatch(colour: int) -> Html:
    return el("i", class_=f"swatch c{colour % PALETTE}")


def interval_scale() -> Html:
    """The line under interval rows that says what their ends are."""
    marks = [el("span", f"{mark} %", style=f"left:{mark}%") for mark in (0, 25, 50, 75, 100)]
    return el("div", el("span", marks, class_="interval-scale"), class_="interval", aria_hidden="true")


def _rounded_percent(share: float) -> str:
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """A line of at most ``most`` points: neighbours averaged in blocks of equal size, missing values left out of the averages."""
    if len(series.x) <= most or series.style == "marks":
        return series
    size = math.ceil(len(series.x) / most)
    blocks = [slice(start, start + size) for start in range(0, len(series.x), size)]
    x = [sum(series.x[block]) / len(series.x[block]) for block in blocks]
    y: list[float | None] = []
    for block in blocks:
        known = [value for value in series.y[block] if _real(value)]
        y.append(sum(known) / len(known) if known else None)
    return replace(series, x=x, y=y)


def _without_residue(series: Series) -> Series:
    """Zeros that carry a rounding residue are zeros: an axis in units of 1e-17 shows nothing but the residue."""
    return replace(series, y=[0.0 if _real(value) and abs(value) < 1e-12 else value for value in series.y])


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that enclose [low, high] in about so many steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        spare = abs(low) * 0.1 or 1.0
        low, high = low - spare, high + spare
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_format(ticks: Sequence[float]) -> Callable[[float], str]:
    """A way to write values of this scale: thousands as "12k", tiny ones as "2.5e-5", values between ticks with one more digit."""
    largest = max(abs(tick) for tick in ticks)
    step = ticks[1] - ticks[0]
    digits = next((d for d in range(7) if abs(step * 10**d - round(step * 10**d)) < 1e-6), 7)

    def write(value: float) -> str:
        if value == 0:
            return "0"
        if largest >= 10_000:
            text = f"{value / 1000:.4g}k"
        elif largest < 1e-3:
            text = re.sub(r"\.?0*e([+-])0*", r"e\1", f"{value:.2e}")
        else:
            between = abs(value / step - round(value / step)) > 1e-6
            text = f"{value:.{digits + between}f}"
            text = text.rstrip("0").rstrip(".") if "." in text else text
        return text.replace("-", "−", 1) if value < 0 else text

    return write


def _y_ticks(drawn: Sequence[Series], axes: Axes) -> list[float]:
    values = [value for one in drawn for value in (*one.y, *one.low, *one.high) if _real(value)]
    low, high = _extent(values)
    if axes.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if axes.reference is not None:
        low, high = min(low, axes.reference), max(high, axes.reference)
    low = low if axes.low is None else axes.low
    high = high if axes.high is None else axes.high
    return nice_ticks(low, high)


def _x_ticks(low: float, high: float) -> list[float]:
    return [tick for tick in nice_ticks(low, high, about=5) if low <= tick <= high and tick == int(tick)]


def _shapes(series: Series, across: Callable[[float], float], down: Callable[[float], float]) -> Iterator[Html]:
    if series.style == "marks":
        for x, low, high in zip(series.x, series.low, series.high, strict=False):
            yield el("path", d=f"M{across(x):.2f} {down(low):.2f}V{down(high):.2f}", class_=f"whisker s{series.colour}")
        for x, y in zip(series.x, series.y, strict=True):
            if _real(y):
                yield el("path", d=f"M{across(x):.2f} {down(y):.2f}h0", class_=f"mark s{series.colour}")
        return
    segments = list(_segments(series))
    path = "".join("M" + "L".join(f"{across(x):.2f} {down(y):.2f}" for x, y in segment) for segment in segments if len(segment) > 1)
    if path:
        yield el("path", d=path, class_=f"{series.style} s{series.colour}")
    for segment in segments:
        if len(segment) == 1:  # a lone point would be a line of no length
            ((x, y),) = segment
            yield el("path", d=f"M{across(x):.2f} {down(y):.2f}h0", class_=f"mark small s{series.colour}")


def _segments(series: Series) -> Iterator[list[tuple[float, float]]]:
    segment: list[tuple[float, float]] = []
    for x, y in zip(series.x, series.y, strict=True):
        if _real(y):
            segment.append((x, y))
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


def _legend(drawn: Sequence[Series]) -> Html | None:
    entries = [one for one in drawn if one.legend]
    if len(entries) < 2:
        return None
    return el("ul", [el("li", el("i", class_=f"key {one.style} c{one.colour}"), one.label) for one in entries], class_="legend")


def _payload(series: Series, write: Callable[[float], str], tops: Sequence[float | None]) -> dict[str, object]:
    texts = [write(y) if _real(y) else None for y in series.y]
    if series.low:
        texts = [f"{text} [{write(low)}, {write(high)}]" for text, low, high in zip(texts, series.low, series.high, strict=True)]
    x = [round(value, 2) for value in series.x]
    return {"label": series.label, "colour": series.colour, "style": series.style, "x": x, "text": texts, "top": tops}


def _extent(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _real(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
