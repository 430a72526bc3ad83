from __future__ import annotations

from headrace.errors import UserError


class RunError(UserError):
    """A run's folder cannot be used as asked; the message says what is wrong, where, and what to do."""
