"""Packages that only some worlds need."""

from __future__ import annotations


class MissingPackage(ModuleNotFoundError, ValueError):
    """A package that the chosen options need is not installed; the message says how to install it.

    It is a ``ValueError`` too: to whoever reads a configuration, options that cannot be met here are wrong options.
    """
