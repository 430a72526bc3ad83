"""The chunked output head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.training.logprobs import OutputHead, scores_from_logits, token_scores


def problem(
    m: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((m, width), (vocabulary, width), (vocabulary,))
    )
    target = torch.randint(vocabulary, (m,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target


def test_two_tokens_by_hand() -> None:
    # Logits (0, ln 3): probabilities 1/4 and 3/4.
    head = OutputHead(torch.tensor([[0.0], [1.0]]))
    hidden = torch.log(torch.tensor([[3.0], [3.0]]))
    scores = token_scores(hidden, head, torch.tensor([0, 1]), entropy=True)
    torch.testing.assert_close(scores.logprobs_m.exp(), torch.tensor([0.25, 0.75]))
    expected = -(0.25 * torch.tensor(0.25).log() + 0.75 * torch.tensor(0.75).log())
    torch.testing.assert_close(scores.entropies_m, expected.expand(2))


@pytest.mark.parametrize("rectangle", [1, 7, 24, 1 << 20])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (2.0, 1.5)])
def test_values_and_gradients_equal_those_of_full_logits_for_every_rectangle(rectangle: int, scale: float, softcap: float | None) -> None:
    hidden, weight, bias, target = problem(6, 4, 11)
    upstream = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).view(2, 6)

    def gradients(logprobs: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        assert entropies is not None
        return torch.autograd.grad((upstream[0] * logprobs).sum() + (upstream[1] * entropies).sum(), (hidden, weight, bias))

    raw = hidden @ weight.T + bias
    logits = scale * (raw if softcap is None else softcap * torch.tanh(raw / softcap))
    expected = scores_from_logits(logits, target, entropy=True)
    scores = token_scores(hidden, OutputHead(weight, bias, scale, softcap), target, entropy=True, rectangle=rectangle)
    torch.testing.assert_close(scores.logprobs_m, expected.logprobs_m)
    torch.testing.assert_close(scores.entropies_m, expected.entropies_m)
    want = gradients(expected.logprobs_m, expected.entropies_m)
    for have, reference in zip(gradients(scores.logprobs_m, scores.entropies_m), want, strict=True):
        torch.testing.assert_close(have, reference)


def test_gradients_equal_finite_differences() -> None:
    hidden, weight, bias, target = problem(3, 2, 5)

    def scored(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = token_scores(hidden, OutputHead(weight, bias, 0.7, 2.0), target, entropy=True, rectangle=4)
        assert scores.entropies_m is not None
        return scores.logprobs_m, scores.entropies_m

    assert torch.autograd.gradcheck(scored, (hidden, weight, bias))


def test_large_logits_stay_finite() -> None:
    head = OutputHead(torch.tensor([[1e4], [-1e4], [0.0]]), None)
    hidden = torch.ones(3, 1, requires_grad=True)
    scores = token_scores(hidden, head, torch.tensor([0, 1, 2]), entropy=True, rectangle=1)
    assert scores.logprobs_m.tolist() == [0.0, -2e4, -1e4]
    scores.logprobs_m.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_weights_are_multiplied_in_float32() -> None:
    hidden, weight, _, target = problem(20, 16, 50, torch.bfloat16)
    scores = token_scores(hidden, OutputHead(weight), target)
    expected = scores_from_logits(hidden.float() @ weight.float().T, target)
    assert scores.logprobs_m.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs_m, expected.logprobs_m)
    scores.logprobs_m.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
)
def test_bfloat16_gradients_equal_float32_ones_to_their_own_precision(device: str) -> None:
    hidden, weight, _, target = problem(200, 64, 300, torch.bfloat16)
    low = [tensor.detach().to(device).requires_grad_() for tensor in (hidden, weight)]
    full = [tensor.detach().float().to(device).requires_grad_() for tensor in (hidden, weight)]
    for hidden, weight in (low, full):
        token_scores(hidden, OutputHead(weight), target.to(device), rectangle=1 << 12).logprobs_m.sum().backward()
    for have, want in zip(low, full, strict=True):
        error = (have.grad.float() - want.grad).square().mean().sqrt() / want.grad.square().mean().sqrt()
        assert error < 5e-3


def test_autocast_does_not_lower_the_precision_of_the_head() -> None:
    hidden, weight, _, target = problem(20, 16, 50, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = token_scores(hidden, OutputHead(weight), target).logprobs_m
    assert torch.equal(inside, token_scores(hidden, OutputHead(weight), target).logprobs_m)


class _Memory(TorchDispatchMode):
    """The largest storage that any operation made, and the peak of all storages alive at once (elements)."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes() // tensor.itemsize,
                )
                self.largest = max(self.largest, storage.nbytes() // tensor.itemsize)
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_memory_does_not_grow_with_vocabulary_times_length(entropy: bool) -> None:
    """Beside the inputs' own sizes (hidden states, weight, their gradients) only a few rectangles are ever alive."""
    rectangle, width = 1 << 12, 4

    def peak_beyond_inputs(m: int, vocabulary: int) -> int:
        hidden, weight, _, target = problem(m, width, vocabulary, torch.float32)
        with _Memory() as memory:
            scores = token_scores(hidden, OutputHead(weight), target, entropy=entropy, rectangle=rectangle)
            total = scores.logprobs_m.sum() if scores.entropies_m is None else scores.logprobs_m.sum() + scores.entropies_m.sum()
            total.backward()
        own = 3 * m * width + 3 * vocabulary * width + 12 * m
        assert memory.largest <= max(own, rectangle)
        return memory.peak - own

    small, large = peak_beyond_inputs(128, 256), peak_beyond_inputs(1024, 2048)  # 64 times the logits
    assert large <= max(small, 8 * rectangle) < 1024 * 2048 / 32
