"""Draw the weight that each objective gives a token's gradient against its importance ratio, from the code itself.

    python docs/draw_weights.py [FOLDER]        # default: docs/images

One sequence of one token: the weight is ``(d term / d lp) / A``, taken from the objective's own gradient. Needs matplotlib.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from headrace.algorithms import CISPO, GMPO, GSPO, KERNELS, SAPO, SSPO, Clip, Objective

PICTURES: dict[str, dict[str, Objective]] = {
    "weights-hard": {
        "clip .2 / .28 (dapo)": Clip(),
        "clip, dual 2 (spo++)": Clip(dual=2.0),
        "CISPO, cap 5": CISPO(),
    },
    "weights-soft-token": {
        "clip .2 / .28": Clip(),
        **{f"SAPO, {kernel}": SAPO(kernel=kernel) for kernel in KERNELS if kernel != "identity"},
    },
    "weights-sequence": {
        "GSPO (3e-4, 4e-4)": GSPO(),
        "GMPO (.4)": GMPO(),
        "SSPO, arctan": SSPO(),
        "no gate": SSPO(kernel="identity"),
    },
    "weights-gates-log": {f"SSPO, {kernel}": SSPO(kernel=kernel) for kernel in KERNELS},
    "weights-gates-ratio": {f"SSPO, {kernel}": SSPO(kernel=kernel, domain="ratio") for kernel in KERNELS},
}
RATIOS = torch.logspace(-1, 1, 241, dtype=torch.float64)


def weights(objective: Objective, advantage: float, ratios: torch.Tensor = RATIOS) -> torch.Tensor:
    """The gradient weight at each ratio, for one-token sequences with the given advantage."""
    n = len(ratios)
    lp = ratios.log().unsqueeze(1).requires_grad_()
    advantages = torch.full((n,), advantage, dtype=ratios.dtype)
    objective(lp, torch.zeros_like(lp), advantages, torch.ones(n, 1)).loss.backward()
    assert lp.grad is not None
    return -lp.grad.squeeze(1) * n / advantage


def draw(folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "headrace", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, objectives in PICTURES.items():
        figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.2), sharey=True, layout="constrained")
        for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
            for index, (label, objective) in enumerate(objectives.items()):
                style = ("-", "--", "-.", ":", (0, (1, 1)))[index % 5]
                axis.plot(RATIOS, weights(objective, advantage), linestyle=style, linewidth=1.6, label=label)
            axis.set_xscale("log")
            ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.axvline(1, color="0.85", linewidth=1, zorder=0)
            axis.set_ylim(0, 3)
            axis.set_title(f"A {'>' if advantage > 0 else '<'} 0")
            axis.set_xlabel("importance ratio r")
        axes[0].set_ylabel("gradient weight")
        axes[0].legend(frameon=False, loc="upper left")
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        paths.append(path)
    return paths


if __name__ == "__main__":
    assert math.isclose(float(weights(Clip(), 1.0, torch.ones(1, dtype=torch.float64))), 1.0)
    for drawn in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images"):
        print(drawn)
