"""Objectives with one term per sequence: GSPO, GMPO, SSPO.

Notation: ``r_t = exp(lp_t - old_t)``, mean_t over the action tokens of the sequence, A its advantage. J is the mean over
sequences; the loss is -J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .gates import check_gate, gate, gate_slope
from .objective_base import Objective, Rows, Terms
from .reductions import masked_row_mean
from .token_objectives import check_range, check_temperatures, clip_fractions, clipped_surrogate, signed_temperatures


class _SequenceObjective(Objective):
    """One term per sequence, averaged over sequences."""

    @property
    def reduction(self) -> str:
        return "sequence-mean"

    @property
    def per_sequence(self) -> bool:
        return True


@dataclass(frozen=True)
class GSPO(_SequenceObjective):
    """Clip the length-normalized ratio of the whole sequence (GSPO, 2507.18071, section 4.1).

    ``s = exp(mean_t ln r_t)``; ``min(s A, clip(s, 1 - low, 1 + high) A)``. A sequence is clipped as a whole, so the range is
    narrow. Equals TRL's ``importance_sampling_level="sequence"`` with a mean over sequences. Under rollout correction verl
    averages truncated token weights; here the mean log weight is truncated.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.low, self.high)

    def terms(self, rows: Rows) -> Terms:
        ratio_n = torch.exp(masked_row_mean(rows.log_ratio_nt, rows.mask_nt, rows.lengths_n))
        terms_n = clipped_surrogate(ratio_n, rows.advantages_n, self.low, self.high)
        return Terms(terms_n, ratio_n, clip_fractions(ratio_n, rows.advantages_n, 1 - self.low, 1 + self.high))


@dataclass(frozen=True)
class GMPO(_SequenceObjective):
    """The geometric mean of clipped token ratios (GMPO, 2507.20673).

    ``exp(mean_t q_t) A`` with ``q = min(ln r, clip(ln r, -e, e))`` where A > 0 and ``q = max(ln r, clip(ln r, -e, e))`` where A <
    0, e = ``clip``.

    Under rollout correction verl truncates token weights before averaging their logs; here the mean log weight is truncated.
    verl's ``geo_mean`` averages over the rows of each call, whatever the step's counts, so that it depends on the split into
    micro-batches; it and TRL's GMPO count fully masked rows.
    """

    clip: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clip > 0:
            raise ValueError(f"the clip range of the log-ratio must be positive, got {self.clip}")

    def terms(self, rows: Rows) -> Terms:
        log_ratio_nt, rising_n1 = rows.log_ratio_nt, rows.advantages_n1 > 0
        clipped_nt = log_ratio_nt.clamp(-self.clip, self.clip)
        chosen_nt = torch.where(rising_n1, torch.minimum(log_ratio_nt, clipped_nt), torch.maximum(log_ratio_nt, clipped_nt))
        ratio_n = torch.exp(masked_row_mean(chosen_nt, rows.mask_nt, rows.lengths_n))
        fractions = clip_fractions(log_ratio_nt, rows.advantages_n1, -self.clip, self.clip)
        return Terms(ratio_n * rows.advantages_n, ratio_n, fractions)


@dataclass(frozen=True)
class SSPO(_SequenceObjective):
    """The geometric mean of softly gated token ratios (SSPO, 2602.19327; gates: 2602.19345 and :mod:`.gates`).

    ``exp(mean_t ln f(r_t; tau)) A``, tau = ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere, so that negative advantages are
    damped sooner. In the log domain a token's gradient weight is ``(sequence weight) h'(tau ln r) / L``. On-policy the gradient
    is ``A / L sum_t grad lp_t``, the ungated length-normalized one.

    The kernel (arctangent, on the log-ratio) follows the paper; the scaling of its argument and the temperatures are Headrace's
    own (see :mod:`.gates`). No public trainer has this objective.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kernel: str = "arctan"
    domain: str = "log"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperatures(self.tau_pos, self.tau_neg)
        check_gate(self.kernel, self.domain)

    def terms(self, rows: Rows) -> Terms:
        tau_n1 = signed_temperatures(rows, self.tau_pos, self.tau_neg)
        gated_nt = gate(rows.log_ratio_nt, tau_n1, self.kernel, self.domain)
        ratio_n = torch.exp(masked_row_mean(gated_nt, rows.mask_nt, rows.lengths_n))
        slope_nt = gate_slope(rows.log_ratio_nt, tau_n1, self.kernel, self.domain)
        return Terms(ratio_n * rows.advantages_n, ratio_n, {"gate_slope_mean": slope_nt})
