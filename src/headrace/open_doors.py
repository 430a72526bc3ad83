"""Objects of the user's own by name: ``file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from headrace.errors import UserError


def is_reference(name: str) -> bool:
    return ":" in name


def absolute(reference: str) -> str:
    """``file.py:name`` with the whole path, so that a run finds its files again from wherever it is resumed or evaluated."""
    path, separator, name = reference.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{name}" if separator and path.endswith(".py") else reference


def load_object(reference: str, what: str) -> Any:
    """Import what ``reference`` names. ``what`` says in errors what it was for ("recipe", "environment")."""
    module_name, _, attribute = reference.rpartition(":")
    module = _load_file(Path(module_name), what) if module_name.endswith(".py") else _load_module(module_name, what)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"{what} {reference!r}: {module_name} has no {attribute!r}") from None


def _load_module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{what}: cannot import {name!r} ({error})") from None


def _load_file(path: Path, what: str) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{what}: no file {path}")
    name = f"headrace_own_{path.stem}_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{what}: {path} raised {type(error).__name__} when imported: {error}") from error
    return module
