"""What the pages say can be followed: links lead somewhere, and README's Python runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, timeout=120, cwd=ROOT)


def test_every_configuration_that_a_page_names_exists():
    for page in PAGES:
        for name in re.findall(r"configs/[\w./-]+\.toml", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"
