"""Objectives with one term per action token: clip, CISPO, SAPO.

Notation: ``r = exp(lp - old)`` per token, A the trajectory's advantage, sg[.] no gradient. J is maximized; the loss is -J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gates import check_gate, gate, gate_slope
from .objective_base import Objective, Rows, Terms
from .reductions import check_reduction


@dataclass(frozen=True)
class Clip(Objective):
    """The clipped surrogate of PPO, as SPO, SPO++, GRPO, DAPO, Dr. GRPO and RLOO use it.

    ``min(r A, clip(r, 1 - low, 1 + high) A)``; with ``dual`` c > 1, where A < 0, not below ``c A``: ``max(min(...), c A)``.

    Papers: PPO 1707.06347, section 3; dual clip 1912.09729; asymmetric range and token-mean: DAPO 2503.14476, sections 3.1 and 3.3;
    sequence-mean, low = high = 0.2: GRPO 2402.03300, section 4.1; ``fixed``: Dr. GRPO 2503.20783, section 3.2 (and RLOO 2402.14740
    here). SPO (2509.13232) sets dual = 10, SPO++ (2608.24870) dual = 2.

    ``reduction``: "token-mean" | "sequence-mean" | "fixed"; ``max_len``: the constant of "fixed" (ValueError at the call while it
    is None).

    Public trainers: TRL's ``delta`` caps r itself, which equals the dual clip only where it exceeds 1 + high. verl always applies
    a dual clip (3 by default) and clamps ln r to +-20; its ``seq-mean-token-sum-norm`` is this ``fixed`` as of 0.9.1 (earlier
    releases did not divide by n). TRL's RLOO uses the unnormalized ratio of whole sequences. TRL counts fully masked rows in its
    means, verl and Headrace do not.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    reduction: str = "token-mean"
    max_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.low, self.high)
        check_reduction(self.reduction)
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"the dual clip must exceed 1, got {self.dual}")

    def terms(self, rows: Rows) -> Terms:
        ratio_nt, advantages_n1 = torch.exp(rows.log_ratio_nt), rows.advantages_n1
        terms_nt = clipped_surrogate(ratio_nt, advantages_n1, self.low, self.high)
        fractions = clip_fractions(ratio_nt, advantages_n1, 1 - self.low, 1 + self.high)
        if self.dual is not None:
            floor_n1 = self.dual * advantages_n1
            terms_nt = torch.where(advantages_n1 < 0, torch.maximum(terms_nt, floor_n1), terms_nt)
            fractions["dual_clip_fraction"] = (ratio_nt > self.dual) & (advantages_n1 < 0)
        return Terms(terms_nt, ratio_nt, fractions)


@dataclass(frozen=True)
class CISPO(Objective):
    """Clipped importance weights instead of clipped terms: ``sg[min(r, high)] A lp``, token-mean (MiniMax-M1, 2506.13585, section 3.1).

    Every token keeps a gradient; only its weight is capped. ``high`` is an absolute cap, as in TRL; verl's cap is 1 + high, with a
    floor at 1 - low besides. The value depends on ``lp`` itself, so it is no estimate of the return; its gradient is what matters.
    """

    high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high > 0:
            raise ValueError(f"the cap of the importance weight must be positive, got {self.high}")

    def terms(self, rows: Rows) -> Terms:
        ratio_nt = torch.exp(rows.log_ratio_nt.detach())
        terms_nt = ratio_nt.clamp(max=self.high) * rows.advantages_n1 * rows.logprobs_nt
        return Terms(terms_nt, ratio_nt, {"clip_high_fraction": ratio_nt > self.high})


@dataclass(frozen=True)
class SAPO(Objective):
    """A soft gate on each token's ratio: ``(4 / tau) sigmoid(tau (r - 1)) A``, sequence-mean (SAPO, 2511.20347).

    tau is ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere. This is the sigmoid gate of the ratio domain plus the constant ``2 /
    tau - 1``, which has no gradient; with another ``kernel`` (see :mod:`.gates`) the term is ``f(r) A`` in the ratio domain.
    Agrees with TRL and verl.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kernel: str = "sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperatures(self.tau_pos, self.tau_neg)
        check_gate(self.kernel, "ratio")

    @property
    def reduction(self) -> str:
        return "sequence-mean"

    def terms(self, rows: Rows) -> Terms:
        ratio_nt = torch.exp(rows.log_ratio_nt)
        tau_n1 = signed_temperatures(rows, self.tau_pos, self.tau_neg)
        if self.kernel == "sigmoid":
            gated_nt = torch.sigmoid(tau_n1 * (ratio_nt - 1)) * (4 / tau_n1)
        else:
            gated_nt = torch.exp(gate(rows.log_ratio_nt, tau_n1, self.kernel, "ratio"))
        slope_nt = gate_slope(rows.log_ratio_nt, tau_n1, self.kernel, "ratio")
        return Terms(gated_nt * rows.advantages_n1, ratio_nt, {"gate_slope_mean": slope_nt})


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """``min(r A, clip(r, 1 - low, 1 + high) A)`` per token or per sequence (PPO, 1707.06347, section 3)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clip_fractions(weight: Tensor, advantages: Tensor, lower: float, upper: float) -> dict[str, Tensor]:
    """Where a clip to [lower, upper] stops the gradient: bool, by side."""
    return {
        "clip_low_fraction": (weight < lower) & (advantages < 0),
        "clip_high_fraction": (weight > upper) & (advantages > 0),
    }


def signed_temperatures(rows: Rows, tau_pos: float, tau_neg: float) -> Tensor:
    """``tau_pos`` in rows with A > 0 and ``tau_neg`` in the others: [n, 1]."""
    neg_n1 = torch.full_like(rows.advantages_n1, tau_neg)
    return neg_n1.masked_fill(rows.advantages_n1 > 0, tau_pos)


def check_range(low: float, high: float) -> None:
    """Raise ValueError unless [1 - low, 1 + high] is a range of ratios around 1."""
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"a clip range needs 0 <= low <= 1 and high >= 0, got low={low}, high={high}")


def check_temperatures(tau_pos: float, tau_neg: float) -> None:
    """Raise ValueError unless both temperatures are positive."""
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"gate temperatures must be positive, got tau_pos={tau_pos}, tau_neg={tau_neg}")
