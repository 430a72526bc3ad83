"""AdamW whose arithmetic is float32 whatever the parameters are stored in.

A float32 parameter is its own master. A bfloat16 parameter has a float32 master: micro-batch gradients add up in float32,
the step changes the master, and the parameter is the master rounded. So small steps are not lost to bfloat16's 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AdamWSettings:
    """``weight_decay`` acts on matrices only (not on biases and norms). ``warmup_steps``: the rate rises linearly over so many steps."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    epsilon: float = 1e-8
    clip_norm: float = 1.0
    warmup_steps: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.learning_rate


@dataclass(frozen=True)
class StepReport:
    """``gradient_norm``: before clipping. ``taken``: False where it was not finite, so that nothing was changed."""

    taken: bool
    gradient_norm: float
    learning_rate: float


class Optimizer:
    """AdamW over named parameters; gradients collect in the masters inside ``accumulating()``."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: AdamWSettings) -> None:
        if not parameters:
            raise ValueError("there is nothing to train: no parameter requires a gradient")
        self.settings = settings
        self.steps = 0
        self._parameters = dict(parameters)
        self._masters = {name: _master(parameter) for name, parameter in parameters.items()}
        self._adamw = torch.optim.AdamW(self._groups(), lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)

    def _groups(self) -> list[dict[str, Any]]:
        matrices = [master for master in self._masters.values() if master.ndim >= 2]
        others = [master for master in self._masters.values() if master.ndim < 2]
        decayed = {"params": matrices, "weight_decay": self.settings.weight_decay}
        return [group for group in (decayed, {"params": others, "weight_decay": 0.0}) if group["params"]]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within it every backward adds to the masters' gradients; parameters that are not their own masters keep none."""
        handles = [
            _on_gradient(parameter, self._masters[name])
            for name, parameter in self._parameters.items()
            if self._masters[name] is not parameter
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step(self, *, usable: bool = True) -> StepReport:
        """Clip, step, forget the gradients. Where ``usable`` is False or the gradient is not finite, only the last."""
        masters = list(self._masters.values())
        norm = float(nn.utils.clip_grad_norm_(masters, self.settings.clip_norm))
        rate = self.settings.rate(self.steps)
        taken = usable and norm < float("inf")  # False for NaN too
        if taken:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self._round_masters()
            self.steps += 1
        self._adamw.zero_grad(set_to_none=True)
        return StepReport(taken, norm, rate)

    @torch.no_grad()
    def _round_masters(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """On the CPU: float32 masters by name, Adam's moments, the number of steps. Without ``copy`` the next step changes them."""
        return {
            "parameters": {name: _on_cpu(master, copy) for name, master in self._masters.items()},
            "moments": {
                name: {key: _on_cpu(value, copy) for key, value in self._adamw.state[master].items()}
                for name, master in self._masters.items()
                if master in self._adamw.state
            },
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where ``state_dict`` was taken. Raises ValueError where the parameters differ in name or shape."""
        saved = state["parameters"]
        for name in sorted(saved.keys() ^ self._masters.keys()):
            raise ValueError(f"the saved learner {'has' if name in saved else 'lacks'} the parameter {name}, this policy is another")
        for name, master in self._masters.items():
            if saved[name].shape != master.shape:
                raise ValueError(f"parameter {name} has shape {tuple(master.shape)} here, {tuple(saved[name].shape)} in the saved learner")
            master.copy_(saved[name])
            moments = state["moments"].get(name)
            self._adamw.state.pop(master, None)
            if moments is not None:
                self._adamw.state[master] = {key: value.to(master.device, copy=True) for key, value in moments.items()}
        self._round_masters()
        self.steps = int(state["steps"])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32))


def _on_gradient(parameter: nn.Parameter, master: nn.Parameter) -> Any:
    """Move each finished gradient of ``parameter`` into its float32 master; returns the hook's handle."""

    def move(_: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad += gradient

    hooked: Any = parameter
    return hooked.register_post_accumulate_grad_hook(move)


def _on_cpu(tensor: Tensor, copy: bool) -> Tensor:
    return tensor.detach().to("cpu", copy=copy)
