from __future__ import annotations


class RunError(RuntimeError):
    """A run's folder cannot be used as asked; the message says what is wrong, where, and what to do."""
