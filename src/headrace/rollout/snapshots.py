"""Pinned policy snapshots: which versions of the weights an engine still holds, and which one its module computes with."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from headrace.rollout.engine import EngineError, UnknownVersion, Weights


class Snapshots:
    """Versioned copies of a module's parameters and persistent buffers.

    The newest ``keep`` versions stay, and every older one that is pinned. ``activate`` points the module's tensors at a
    version's copy, so switching costs no copying. Tied parameters are held once; a publication may name them by any of
    their names.
    """

    def __init__(self, module: nn.Module, *, keep: int, version: int = 0) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 snapshot, got {keep}")
        self._keep = keep
        self._targets = _targets(module)
        self._aliases = _aliases(module, self._targets)
        self._held: dict[int, dict[str, Tensor]] = {version: {name: target.data for name, target in self._targets.items()}}
        self._pins: Counter[int] = Counter()
        self.active = version

    @property
    def newest(self) -> int:
        return max(self._held)

    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._held))

    def check(self, version: int) -> None:
        if version not in self._held:
            held = ", ".join(map(str, self.versions()))
            raise UnknownVersion(f"snapshot {version} is not held by the engine (it holds {held}): its result would be too stale to use")

    def pin(self, version: int) -> None:
        self.check(version)
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if self._pins[version] <= 0:
            del self._pins[version]
        self._prune()

    def publish(self, version: int, weights: Weights) -> None:
        """Copy ``weights`` as ``version``. It must be newer than all others; the newest may be replaced while nobody has pinned it."""
        if version < self.newest or (version == self.newest and self._pins[version]):
            raise EngineError(f"cannot publish snapshot {version}: the newest is {self.newest} and versions only grow")
        self._held[version] = self._copy(weights)
        if version == self.active:
            self.active = -1
        self._prune()

    def activate(self, version: int) -> None:
        if version == self.active:
            return
        for name, tensor in self._held[version].items():
            self._targets[name].data = tensor
        self.active = version

    def _prune(self) -> None:
        for version in self.versions()[: -self._keep]:
            if not self._pins[version]:
                del self._held[version]

    def _copy(self, weights: Weights) -> dict[str, Tensor]:
        copied: dict[str, Tensor] = {}
        for name, target in self._targets.items():
            source = next((weights[alias] for alias in self._aliases[name] if alias in weights), None)
            if source is None:
                raise EngineError(f"published weights lack {name!r}; they must name every parameter and persistent buffer of the model")
            if source.shape != target.shape:
                raise EngineError(f"published weight {name!r} has shape {tuple(source.shape)}, the model's has {tuple(target.shape)}")
            copied[name] = torch.empty_like(target, requires_grad=False).copy_(source.detach())
        known = {alias for aliases in self._aliases.values() for alias in aliases}
        unknown = sorted(set(weights) - known)
        if unknown:
            raise EngineError(f"published weights name {unknown[0]!r}, which the model does not have")
        return copied


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """Every distinct tensor of the state dict: parameters (tied ones once) and persistent buffers."""
    persistent = set(module.state_dict())
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return tensors


def _aliases(module: nn.Module, targets: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {id(tensor): [name] for name, tensor in targets.items()}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in every:
        if id(tensor) in names and name not in names[id(tensor)]:
            names[id(tensor)].append(name)
    return {name: tuple(names[id(tensor)]) for name, tensor in targets.items()}
