"""The compiled kernels and both paged caches against plain float64 arithmetic."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.rollout import kernels
from headrace.rollout.kernels import Kernels, NativeUnavailable
from headrace.rollout.native_pages import NativePagedCache
from headrace.rollout.paged_attention import PagedCache
from headrace.rollout.pages import PAGE, PageTable, Span
from headrace.rollout.torch_pages import TorchPagedCache

DTYPES = [torch.float32, torch.bfloat16]
# of values around 1: rounding of the result for bfloat16 (8 bits), of the sum for float32
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        Kernels(torch.float32)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, *, times: float = 1.0) -> None:
    allowed = times * TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=allowed, rtol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 33, 128])
def test_norm_adds_what_is_given_and_divides_by_the_root_mean_square(size: int, dtype: torch.dtype) -> None:
    x, delta, weight = draw(5, size, dtype=dtype), draw(5, size, dtype=dtype, seed=1), draw(size, dtype=dtype, seed=2)
    both = (x.double() + delta.double()).to(dtype)
    expected = both.double() / (both.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = Kernels(dtype).norm(x, delta, weight, 1e-5, torch.empty_like(x))
    close(out, expected, dtype)
    assert torch.equal(x, both)
    close(Kernels(dtype).norm(x, None, weight, 1e-5, torch.empty_like(x)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norms_touch_only_their_heads(dtype: torch.dtype) -> None:
    x, weight = draw(3, 5 * 8, dtype=dtype), draw(8, dtype=dtype, seed=1)
    heads = x.double().view(3, 5, 8)
    expected = heads.clone()
    expected[:, 2:4] = heads[:, 2:4] / (heads[:, 2:4].square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    Kernels(dtype).norm_heads(x, 2, 2, 8, weight, 1e-6)
    close(x.view(3, 5, 8), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 8, 34, 64])
def test_rotation_turns_the_halves_of_the_leading_heads(size: int, dtype: torch.dtype) -> None:
    x, angle = draw(4, 3 * size, dtype=dtype), draw(4, size // 2, seed=1)
    a, b = x.double().view(4, 3, 2, size // 2).unbind(2)
    cosine, sine = angle.double().cos()[:, None], angle.double().sin()[:, None]
    expected = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    expected[:, 2] = x.double().view(4, 3, size)[:, 2]
    Kernels(dtype).rotate(x, 2, size, angle.cos(), angle.sin())
    close(x.view(4, 3, size), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 47])
def test_gate_is_silu_times_the_second_half_also_far_out(size: int, dtype: torch.dtype) -> None:
    both = draw(6, 2 * size, dtype=dtype)
    both[0, :size] = 100.0
    both[1, :size] = -100.0
    expected = torch.nn.functional.silu(both[:, :size].double()) * both[:, size:].double()
    close(Kernels(dtype).gate(both, both.new_empty(6, size)), expected, dtype)


def test_other_precisions_are_refused() -> None:
    with pytest.raises(NativeUnavailable, match="float64"):
        Kernels(torch.float64)


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="false failed"):
        kernels._load(tmp_path / "kernels.so", ["false"])
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        kernels._library.__wrapped__()


# --- attention -----------------------------------------------------------------------------------------------------------

CACHES: dict[str, Callable[[torch.dtype], PagedCache[Any]]] = {
    "native": lambda dtype: NativePagedCache(4, 300, dtype),
    "torch": lambda dtype: TorchPagedCache(4, 300, torch.device("cpu")),
    "torch, gathered": lambda dtype: TorchPagedCache(4, 300, torch.device("cpu"), gather=True),
}


def reference(query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention [t, heads, size] of one whole sequence in float64."""
    groups = query.shape[1] // keys.shape[1]
    q, k, v = query.double(), keys.double().repeat_interleave(groups, 1), values.double().repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    visible = (distance >= 0) & ((distance < window) if window else True)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(4, 2, 8, 8), (4, 4, 16, 16), (9, 3, 64, 64), (6, 1, 20, 48), (2, 1, 80, 80)]),
    window=st.sampled_from([0, 1, 30, 70]),
    data=st.data(),
)
def test_attention_over_pages_equals_attention_over_the_whole_sequences(
    name: str, dtype: torch.dtype, seed: int, shape: tuple[int, int, int, int], window: int, data: st.DataObject
) -> None:
    heads, shared, size, value_size = shape
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    cuts = [sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))}) for length in lengths]
    parts = [
        [draw(length, count, width, dtype=dtype, seed=seed + 10 * slot + kind) for kind, (count, width) in enumerate(kinds)]
        for slot, length in enumerate(lengths)
        for kinds in [((heads, size), (shared, size), (shared, value_size))]
    ]
    expected = [reference(*part, window) for part in parts]
    cache = CACHES[name](dtype)
    steps = [list(pairwise(cut)) for cut in cuts]
    for step in range(max(map(len, steps))):
        fed = [slot for slot in range(len(steps)) if step < len(steps[slot])]
        spans = [Span(slot, steps[slot][step][0], [0] * (steps[slot][step][1] - steps[slot][step][0])) for slot in fed]
        flat = [
            torch.cat([parts[slot][kind][slice(*steps[slot][step])] for slot in fed] + [torch.ones_like(parts[0][kind][:1])])
            for kind in range(3)
        ]
        with cache.attending(spans, high=seed % 2 == 1) as plan:
            done = cache.attend(plan, 0, *flat, 0.3, window)
        assert done.is_contiguous()
        assert torch.isfinite(done).all()  # the padding row too
        row = 0
        for slot in fed:
            first, last = steps[slot][step]
            # PyTorch's operations round the scaled queries and the weights too
            close(done[row : row + last - first], expected[slot][first:last], dtype, times=1 if name == "native" else 4)
            row += last - first


def test_pages_come_from_either_end_and_go_back() -> None:
    table = PageTable(slots=3, context_limit=2 * PAGE)
    assert table.capacity == 6
    table.grow(0, 2 * PAGE, high=False)
    table.grow(1, PAGE + 1, high=True)
    assert table.table[0].tolist() == [0, 1]
    assert table.table[1].tolist() == [5, 4]
    table.truncate(0, 1)
    assert table.used.tolist() == [1, 2, 0]
    table.truncate(1, 0)
    table.grow(2, 2 * PAGE, high=True)
    assert table.table[2].tolist() == [5, 4]
    table.grow(0, 2 * PAGE, high=False)
    assert table.table[0].tolist() == [0, 1]
    for _ in range(100):
        table.truncate(2, 0)
        table.grow(2, 2 * PAGE, high=False)
    assert sorted(table.table[2].tolist()) == [2, 3]
    assert len(table._low) + len(table._high) <= 2 * table.capacity
