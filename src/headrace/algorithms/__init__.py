"""The mathematics of Headrace on tensors: prompt values, advantage measures, objectives, sampling, recipes.

Imports torch and the standard library only, so that any of it can be used inside another trainer.
"""

from __future__ import annotations

from .advantages import GROUP_MEASURES, MEASURES, Normalized, actor_residual, length_covariance, normalize, normalize_with_counts
from .gates import DOMAINS, KERNELS, gate, gate_slope
from .memory import EventTimeMemory, PromptMemory, PromptValue, ReceiptOrderMemory, prior_from_rollouts
from .objectives import (
    CISPO,
    GMPO,
    GSPO,
    SAPO,
    SSPO,
    Clip,
    Objective,
    ObjectiveFunction,
    ObjectiveResult,
    Rows,
    Terms,
    combine_metrics,
    reference_kl,
)
from .recipes import RECIPES, Recipe, aligned_measure, recipe
from .reductions import REDUCTIONS, BatchTotals, reduce_sequences, reduce_tokens
from .sampling import UncertaintySampler, uncertainty_weight

__all__ = [
    "CISPO",
    "DOMAINS",
    "GMPO",
    "GROUP_MEASURES",
    "GSPO",
    "KERNELS",
    "MEASURES",
    "RECIPES",
    "REDUCTIONS",
    "SAPO",
    "SSPO",
    "BatchTotals",
    "Clip",
    "EventTimeMemory",
    "Normalized",
    "Objective",
    "ObjectiveFunction",
    "ObjectiveResult",
    "PromptMemory",
    "PromptValue",
    "ReceiptOrderMemory",
    "Recipe",
    "Rows",
    "Terms",
    "UncertaintySampler",
    "actor_residual",
    "aligned_measure",
    "combine_metrics",
    "gate",
    "gate_slope",
    "length_covariance",
    "normalize",
    "normalize_with_counts",
    "prior_from_rollouts",
    "recipe",
    "reduce_sequences",
    "reduce_tokens",
    "reference_kl",
    "uncertainty_weight",
]
