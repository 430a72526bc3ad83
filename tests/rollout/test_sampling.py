import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.sampling import greedy, sample, uniforms


def splitmix(x: int) -> int:
    """The published finalizer on Python integers."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.integers(0, 10**6))
def test_uniforms_equal_the_published_mixer_on_plain_integers(seed: int, turn: int, position: int) -> None:
    mask = (1 << 64) - 1
    state = splitmix(seed & mask)
    state = splitmix((state + turn) & mask)
    state = splitmix((state + position) & mask)
    assert uniforms([seed], [turn], [position])[0] == (state >> 11) / 2**53


def test_the_first_output_of_splitmix64_seeded_with_zero() -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF


def test_uniforms_depend_on_each_name_and_fill_the_unit_interval() -> None:
    names = [(seed, turn, position) for seed in range(20) for turn in range(20) for position in range(50)]
    numbers = uniforms(*(list(part) for part in zip(*names, strict=True)))
    assert len(set(numbers.tolist())) == len(names)
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # 20,000 draws over 20 bins: chi-squared with 19 degrees of freedom is below 43.8 with probability .999
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 43.8


def test_a_number_picks_the_token_whose_cumulative_interval_holds_it() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.0, 0.25])).expand(6, 4)
    tokens, logprobs = sample(logits, np.array([0.0, 0.499999, 0.5, 0.749999, 0.75, 1 - 2**-53]))
    assert tokens == [0, 0, 1, 1, 3, 3]
    assert logprobs == pytest.approx([np.log(0.5)] * 2 + [np.log(0.25)] * 4)


@pytest.mark.parametrize("vocabulary", [2, 255, 256, 257, 1000])
def test_frequencies_follow_the_distribution_and_logprobs_are_its_logarithms(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(vocabulary, generator=generator) * 2
    draws = 20_000
    tokens, logprobs = sample(logits.expand(draws, -1).contiguous(), (np.arange(draws) + 0.5) / draws)
    expected = logits.double().log_softmax(-1)
    assert logprobs == pytest.approx(expected[tokens].tolist(), abs=1e-5)
    counts = np.bincount(tokens, minlength=vocabulary)
    # evenly spread numbers hit each interval its length's worth, give or take one at either end
    assert np.abs(counts - draws * expected.exp().numpy()).max() <= 1.01


@given(st.integers(1, 600), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_is_never_sampled(vocabulary: int, seed: int, number: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * 30
    allowed = torch.rand(vocabulary, generator=generator) < 0.3
    allowed[int(torch.randint(vocabulary, (), generator=generator))] = True
    tokens, logprobs = sample(logits.masked_fill(~allowed, float("-inf")), np.array([number]))
    assert allowed[tokens[0]]
    assert np.isfinite(logprobs[0])


def test_rows_that_are_not_finite_give_nan_and_leave_the_others_alone() -> None:
    logits = torch.tensor([[0.0, 0.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    for tokens, logprobs in (sample(logits, np.full(3, 0.75)), greedy(logits)):
        assert logprobs[0] == pytest.approx(np.log(0.5))
        assert np.isnan(logprobs[1:]).all()
        assert tokens[1:] == [0, 0]


def test_greedy_takes_the_top_with_its_probability_in_the_full_distribution() -> None:
    tokens, logprobs = greedy(torch.log(torch.tensor([[0.2, 0.7, 0.1]])))
    assert tokens == [1]
    assert logprobs == pytest.approx([np.log(0.7)])
