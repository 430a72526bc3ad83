"""Imports point one way (docs/design.md): the rooms, and who may know of whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "headrace"

# Each room and what it may import of the project besides itself; the top-level leaves are open to everyone named.
ALLOWED = {
    "algorithms": set(),
    "environments": set(),
    "rollout": {"environments"},
    "records": {"rollout.trajectory", "errors", "files"},
    "training": {
        "algorithms",
        "environments",
        "rollout",
        "records",
        "config",
        "errors",
        "open_doors",
        "evaluation_statistics",
        "curves",
        "files",
    },
    "studies": {"algorithms", "environments", "rollout", "records", "training", "config", "errors", "evaluation_statistics", "curves"},
    "distributed": {"algorithms", "environments", "rollout", "records", "training", "config", "errors"},
    "integrations": {"algorithms"},
    "config": {"errors", "open_doors", "training.recipes", "environments.worlds", "rollout.scheduler"},
    "errors": set(),
    "open_doors": {"errors"},
    "evaluation_statistics": set(),
    "curves": set(),
    "files": set(),
}


# What a room may import from outside, lazily or not; None: anything but torch.
FOREIGN = {"algorithms": {"torch"}, "environments": None}


def imports(path, root=ROOT):
    """(imported module, line) of every import of the project, lazy ones included."""
    package = ["headrace", *path.relative_to(root).with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [module] if module != "headrace" else [f"headrace.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "headrace":
                yield name.removeprefix("headrace").removeprefix("."), node.lineno


def foreign_imports(path):
    """(package, line) of every absolute import from outside the standard library and the project."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            package = name.split(".")[0]
            if package != "headrace" and package not in sys.stdlib_module_names:
                yield package, node.lineno


def room_of(path, root=ROOT):
    return path.relative_to(root).with_suffix("").parts[0]


def wrong_arrows(root=ROOT):
    for path in sorted(root.rglob("*.py")):
        room = room_of(path, root)
        if room not in ALLOWED:
            continue
        for module, line in imports(path, root):
            allowed = any(module == name or module.startswith(name + ".") for name in ALLOWED[room] | {room})
            if module and not allowed:
                yield f"{path.relative_to(root)}:{line} imports headrace.{module}"
        for package, line in foreign_imports(path) if room in FOREIGN else ():
            if package == "torch" if FOREIGN[room] is None else package not in FOREIGN[room]:
                yield f"{path.relative_to(root)}:{line} imports {package}"


def test_every_arrow_points_the_right_way():
    assert list(wrong_arrows()) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("algorithms/memory.py", "from headrace.training.loop import Loop", "imports headrace.training.loop"),
        ("algorithms/memory.py", "from ..training import loop", "imports headrace.training"),
        ("algorithms/memory.py", "import numpy as np", "imports numpy"),
        ("rollout/scheduler.py", "def f():\n    import headrace.algorithms", "imports headrace.algorithms"),
        ("environments/base.py", "def f():\n    import torch.nn", "imports torch"),
        ("records/metrics.py", "from headrace.rollout.engine import Engine", "imports headrace.rollout.engine"),
    ],
)
def test_the_check_sees_a_wrong_arrow(file, line, complaint, tmp_path):
    path = tmp_path / file
    path.parent.mkdir()
    path.write_text(f"import os\n{line}\n")
    (found,) = wrong_arrows(tmp_path)
    assert found.startswith(f"{file}:") and found.endswith(complaint)


def test_every_room_has_a_rule():
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= set(ALLOWED)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("headrace.algorithms", ("transformers", "numpy.testing", "pydantic", "headrace.rollout", "headrace.training")),
        ("headrace.environments.household", ("torch", "transformers")),
        ("headrace.environments.worlds", ("torch", "transformers")),
        ("headrace.config", ("torch", "transformers", "typer", "rich")),
        ("headrace.cli", ("torch", "transformers", "pydantic", "numpy")),
        ("headrace", ("torch", "transformers", "pydantic", "numpy")),
    ],
)
def test_heavy_or_foreign_modules_are_not_loaded(module, forbidden):
    code = f"import sys, {module}; print(*[name for name in {forbidden!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert loaded == []
