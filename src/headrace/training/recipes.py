"""The recipe that a configuration asks for: a named default, or the user's own, with fields replaced."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.algorithms import Recipe, recipe
from headrace.config import Config
from headrace.open_doors import is_reference, load_object


def configured_recipe(config: Config) -> Recipe:
    """Raises ``ValueError`` for an unknown name, an unknown option or a combination that the recipe refuses."""
    base = load_object(config.recipe, "recipe") if is_reference(config.recipe) else recipe(config.recipe)
    if not isinstance(base, Recipe):
        raise ValueError(f"{config.recipe!r} is a {type(base).__name__}, not a headrace.algorithms.Recipe")
    options = dict(config.recipe_options)
    chosen = options.pop("objective", {})
    objective = load_object(chosen, "objective") if isinstance(chosen, str) else base.objective
    fields = _objective_options(objective, {} if isinstance(chosen, str) else chosen, config)
    configured = _replace(base, {**options, "objective": _replace(objective, fields, "recipe_options.objective")}, "recipe_options")
    assert isinstance(configured, Recipe)
    return configured


def _objective_options(objective: Any, options: Any, config: Config) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise ValueError("recipe_options.objective must be a table of the objective's fields, or file.py:name of an objective of your own")
    fixed = getattr(objective, "reduction", None) == "fixed" or options.get("reduction") == "fixed"
    if not fixed:
        return options
    max_len = options.get("max_len", config.learner.max_len)
    if max_len is None:
        raise ValueError(f"{config.recipe} divides by a fixed length: set learner.max_len")
    return {**options, "max_len": max_len}


def _replace(instance: Any, options: dict[str, Any], where: str) -> Any:
    if not options:
        return instance
    if not dataclasses.is_dataclass(instance) or isinstance(instance, type):
        raise ValueError(f"{where}: {type(instance).__name__} has no fields to replace")
    names = {field.name for field in dataclasses.fields(instance)}
    for key in options:
        if key not in names:
            raise ValueError(f"{where}: {type(instance).__name__} has no field `{key}` (it has {', '.join(sorted(names))})")
    return dataclasses.replace(instance, **options)
