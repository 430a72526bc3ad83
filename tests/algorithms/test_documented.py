"""Every recipe and every public name is documented, and the pictures come from the code."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace.algorithms as algorithms
from headrace.algorithms import RECIPES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "algorithms.md").read_text()


def test_every_recipe_has_a_section_and_a_row_of_the_table() -> None:
    for name, row in RECIPES.items():
        assert re.search(rf"^### {re.escape(name)}$", PAGE, re.MULTILINE), f"docs/algorithms.md has no section on {name}"
        line = re.search(rf"^\| `{re.escape(name)}` \|(.*)\|$", PAGE, re.MULTILINE)
        assert line, f"the table of docs/algorithms.md has no row for {name}"
        cells = [cell.strip() for cell in line.group(1).split("|")]
        memory = {"event-time": "event time", "receipt": "receipt order", None: "none"}[row.memory]
        assert cells[0].startswith(memory)
        assert cells[1] == row.measure
        assert cells[3] == str(row.group_size)
        assert cells[4] == (row.paper or "Headrace")


@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_public_name_is_on_the_page_and_has_a_docstring(name: str) -> None:
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", PAGE), f"docs/algorithms.md does not mention {name}"
    thing = getattr(algorithms, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), f"{name} has no docstring of its own"
        for attribute, member in vars(thing).items():
            if not attribute.startswith("_") and inspect.isfunction(member) and inspect.isclass(thing):
                inherited = any(hasattr(base, attribute) for base in thing.__mro__[1:-1])
                assert member.__doc__ or inherited or thing is algorithms.PromptMemory, f"{name}.{attribute} has no docstring"


def test_every_objective_names_its_paper() -> None:
    for objective in (algorithms.Clip, algorithms.CISPO, algorithms.SAPO, algorithms.GSPO, algorithms.GMPO, algorithms.SSPO):
        assert re.search(r"\d{4}\.\d{5}", objective.__doc__ or ""), objective


def test_every_picture_of_the_page_exists_and_every_link_inside_it_leads_somewhere() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE)
    assert pictures
    assert all((DOCS / picture).is_file() for picture in pictures)
    anchors: dict[str, int] = {}
    slugs = set()
    for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors[slug] = anchors.get(slug, -1) + 1
        slugs.add(slug if not anchors[slug] else f"{slug}-{anchors[slug]}")
    for target in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert target in slugs, f"docs/algorithms.md links to #{target}, which is no heading"


@pytest.fixture(scope="module", name="draw_weights")
def load_draw_weights() -> Any:
    spec = importlib.util.spec_from_file_location("draw_weights", DOCS / "draw_weights.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_show_the_weights_of_the_code(draw_weights: Any) -> None:
    ratios = torch.tensor([0.5, 1.0, 1.2, 1.5, 3.0], dtype=torch.float64)
    clip, sapo = algorithms.Clip(dual=2.0), algorithms.SAPO()
    assert draw_weights.weights(clip, 1.0, ratios).tolist() == pytest.approx([0.5, 1.0, 1.2, 0.0, 0.0])
    assert draw_weights.weights(clip, -1.0, ratios).tolist() == pytest.approx([0.0, 1.0, 1.2, 1.5, 0.0])
    gate = torch.sigmoid(ratios - 1)
    assert draw_weights.weights(sapo, 1.0, ratios).tolist() == pytest.approx((4 * gate * (1 - gate) * ratios).tolist())
    shown = {f"images/{name}.svg" for name in draw_weights.PICTURES}
    assert shown == set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE))


def test_the_script_draws_every_picture(draw_weights: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the development extra installs it)")
    paths = draw_weights.draw(tmp_path)
    assert len(paths) == len(draw_weights.PICTURES)
    assert all(path.read_text().startswith("<?xml") for path in paths)
