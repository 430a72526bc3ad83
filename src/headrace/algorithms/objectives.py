"""All objectives in one place; the formulas are in ``token_objectives`` and ``sequence_objectives``."""

from __future__ import annotations

from .objective_base import LOG_RATIO_LIMIT, Objective, ObjectiveFunction, ObjectiveResult, Rows, Terms
from .reductions import combine_metrics
from .reference_kl import reference_kl
from .sequence_objectives import GMPO, GSPO, SSPO
from .token_objectives import CISPO, SAPO, Clip

__all__ = [
    "CISPO",
    "GMPO",
    "GSPO",
    "LOG_RATIO_LIMIT",
    "SAPO",
    "SSPO",
    "Clip",
    "Objective",
    "ObjectiveFunction",
    "ObjectiveResult",
    "Rows",
    "Terms",
    "combine_metrics",
    "reference_kl",
]
