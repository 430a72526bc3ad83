"""Pinned policy snapshots: which versions of the weights an engine still holds, and which one its module computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from headrace.rollout.engine import EngineError, UnknownVersion, Weights

T = TypeVar("T")


class VersionStore(Generic[T]):
    """Values by version: the newest ``keep`` stay, and every older one that a live dispatch has pinned."""

    def __init__(self, *, keep: int, version: int, value: T) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 snapshot, got {keep}")
        self._keep = keep
        self._held: dict[int, T] = {version: value}
        self._pins: dict[int, int] = {}

    @property
    def newest(self) -> int:
        return max(self._held)

    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._held))

    def __getitem__(self, version: int) -> T:
        if version not in self._held:
            held = ", ".join(map(str, self.versions()))
            raise UnknownVersion(f"snapshot {version} is not held by the engine (it holds {held}): its result would be too stale to use")
        return self._held[version]

    def pin(self, dispatch: int, version: int | None) -> None:
        """The dispatch lives and needs ``version`` from now on; None: always the newest, which needs no pin."""
        if version is None:
            self.unpin(dispatch)
        elif self._pins.get(dispatch) != version:
            self[version]
            self._pins[dispatch] = version
            self._prune()

    def unpin(self, dispatch: int) -> None:
        if self._pins.pop(dispatch, None) is not None:
            self._prune()

    def refuse_old(self, version: int) -> None:
        """A publication must be newer than all others; the newest may be replaced while nobody has pinned it."""
        if version < self.newest or (version == self.newest and version in self._pins.values()):
            raise EngineError(f"cannot publish snapshot {version}: the newest is {self.newest} and versions only grow")

    def put(self, version: int, value: T) -> None:
        self.refuse_old(version)
        self._held[version] = value
        self._prune()

    def _prune(self) -> None:
        pinned = set(self._pins.values())
        for version in self.versions()[: -self._keep]:
            if version not in pinned:
                del self._held[version]


class Snapshots(VersionStore[dict[str, Tensor]]):
    """Versioned copies of a module's parameters and persistent buffers.

    ``activate`` points the module's tensors at a version's copy, so switching costs no copying. Tied parameters are held
    once; a publication may name them by any of their names. The first version is what the module holds now. Parameters of
    a pack (equal in all but their first axis) lie side by side in memory, in the pack's order.
    """

    def __init__(self, module: nn.Module, *, keep: int, version: int = 0, packs: Sequence[tuple[str, ...]] = ()) -> None:
        self._targets = _targets(module)
        self._aliases = _aliases(module, self._targets)
        self._packs = packs
        self._active: dict[str, Tensor] = {name: target.data for name, target in self._targets.items()}
        for name, place in self._places().items():
            self._active[name] = place.copy_(self._active[name])
            self._targets[name].data = place
        super().__init__(keep=keep, version=version, value=self._active)

    def publish(self, version: int, weights: Weights) -> None:
        """Copy ``weights`` as ``version``."""
        self.refuse_old(version)
        self.put(version, self._copy(weights))

    def activate(self, version: int) -> None:
        """Let the module compute with ``version``."""
        wanted = self[version]
        if wanted is self._active:
            return
        for name, tensor in wanted.items():
            self._targets[name].data = tensor
        self._active = wanted

    def _places(self) -> dict[str, Tensor]:
        """New memory for the packed parameters."""
        places: dict[str, Tensor] = {}
        for pack in self._packs:
            parts = [self._targets[name] for name in pack]
            joined = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
            places |= dict(zip(pack, torch.split(joined, [len(part) for part in parts]), strict=True))
        return places

    def _copy(self, weights: Weights) -> dict[str, Tensor]:
        copied: dict[str, Tensor] = self._places()
        for name, target in self._targets.items():
            source = next((weights[alias] for alias in self._aliases[name] if alias in weights), None)
            if source is None:
                raise EngineError(f"published weights lack {name!r}; they must name every parameter and persistent buffer of the model")
            if source.shape != target.shape:
                raise EngineError(f"published weight {name!r} has shape {tuple(source.shape)}, the model's has {tuple(target.shape)}")
            place = copied[name] if name in copied else torch.empty_like(target, requires_grad=False)
            copied[name] = place.copy_(source.detach())
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
