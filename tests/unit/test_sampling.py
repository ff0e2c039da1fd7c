"""Sampling: ranges, determinism, distribution, and rows that can't be used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from spikeinfer import SpikeError
from spikeinfer.runtime.logits import _draw_index, _kth_largest, candidates
from spikeinfer.runtime.sampling import Sampler, SamplingParams, choose_rows

ROWS = hnp.arrays(np.float32, st.integers(2, 600), elements=st.floats(-20, 20, width=32))


def plain(**options: object) -> Sampler:
    return Sampler(SamplingParams(**options), [1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("seed", -1),
        ("stop", ["a", ""]),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(SpikeError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.code == "SPK608"
    assert f"{name}={value!r}" in caught.value.what


def test_the_default_is_greedy() -> None:
    row = np.array([0.0, 3.0, 2.0], np.float32)
    assert [plain().choose(row) for _ in range(3)] == [1, 1, 1]


@given(row=ROWS, seed=st.integers(0, 2**32), top_p=st.floats(0.01, 1), top_k=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_a_seed_gives_the_same_tokens_in_any_batch(
    row: np.ndarray, seed: int, top_p: float, top_k: int
) -> None:
    options = {"temperature": 0.8, "top_p": top_p, "top_k": top_k, "seed": seed}
    alone = plain(**options)
    want = [alone.choose(row) for _ in range(4)]
    together, other = plain(**options), plain(temperature=1.0, seed=5)
    batch = np.stack([row[::-1].copy(), row])
    assert [choose_rows(batch, [other, together])[1] for _ in range(4)] == want


@given(row=ROWS, top_p=st.floats(0.01, 0.999))
@settings(max_examples=100, deadline=None)
def test_the_nucleus_is_the_smallest_prefix_that_reaches_the_mass(
    row: np.ndarray, top_p: float
) -> None:
    kept = candidates(row, 1.0, 0, top_p, 0.0)
    assert kept.ids is not None
    exact = np.exp(row.astype(np.float64) - row.max())
    exact /= exact.sum()
    mass = exact[kept.ids].sum()
    # float32 weights carry a relative error of about 1e-6 into both sums.
    assert mass >= top_p - 1e-5
    assert mass - exact[kept.ids].min() < top_p + 1e-5
    left_out = np.setdiff1d(np.arange(row.size), kept.ids)
    # Logits that differ by less than float32 tells apart are equally likely: the first one stays.
    likely = np.exp(row - row.max())
    assert not left_out.size or likely[left_out].max() <= likely[kept.ids].min()


def test_of_equal_tokens_the_nucleus_takes_the_first() -> None:
    row = np.zeros(5_000, np.float32)
    ids = candidates(row, 1.0, 0, 0.5, 0.0).ids
    np.testing.assert_array_equal(ids, np.arange(2_500))


@given(values=ROWS, k=st.integers(1, 600))
def test_kth_largest(values: np.ndarray, k: int) -> None:
    k = min(k, values.size)
    assert _kth_largest(values, k) == np.sort(values)[-k]
    tiled = np.tile(values, 40)  # long enough for the search by blocks
    assert _kth_largest(tiled, k) == np.sort(tiled)[-k]


@given(values=ROWS, uniform=st.floats(0, 1, exclude_max=True))
def test_drawing_inverts_the_cumulative_distribution(values: np.ndarray, uniform: float) -> None:
    weights = np.tile(np.exp(values - values.max()), 3)
    index = _draw_index(weights, uniform)
    edges = np.cumsum(weights, dtype=np.float64)
    # The two levels round differently than one sum does.
    slack = 1e-9 * edges[-1]
    assert edges[index] - weights[index] - slack <= uniform * edges[-1] <= edges[index] + slack


def test_frequencies_follow_the_probabilities() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = plain(temperature=1.0, seed=11)
    counts = np.bincount([sampler.choose(row) for _ in range(20_000)], minlength=3) / 20_000
    # Standard deviation of a frequency is below 0.0036; five of them.
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.018


def test_min_p_is_relative_to_the_best() -> None:
    row = np.log(np.array([0.6, 0.31, 0.06, 0.03], np.float32))
    np.testing.assert_array_equal(candidates(row, 1.0, 0, 1.0, 0.5).ids, [0, 1])
    assert candidates(row, 1.0, 0, 1.0, 0.0).ids is None


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    row = np.array([2.0, 1.9, 0.0], np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=0.2, frequency_penalty=0.0), [0, 0, 0])
    assert [sampler.choose(row) for _ in range(3)] == [0, 1, 0]
    often = Sampler(SamplingParams(frequency_penalty=0.06), [1])
    assert [often.choose(row) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_repetition_counts_the_prompt() -> None:
    row = np.array([2.0, 1.9, -1.0], np.float32)
    assert Sampler(SamplingParams(repetition_penalty=1.2), [0]).choose(row) == 1
    assert row.tolist() == [2.0, pytest.approx(1.9), -1.0]  # the caller's row is as it was


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_unusable_row_harms_nobody_else(temperature: float, bad: float) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[:, 2] = 9
    logits[1, 5] = bad
    samplers = [plain(temperature=temperature, seed=i, top_p=0.5) for i in range(3)]
    first, second, third = choose_rows(logits, samplers)
    assert (first, third) == (2, 2)
    assert isinstance(second, SpikeError)
    assert second.code == "SPK609"


def test_minus_infinity_is_a_ban_not_an_error() -> None:
    row = np.array([-np.inf, 1.0, -np.inf], np.float32)
    assert {plain(temperature=5.0, seed=s).choose(row) for s in range(20)} == {1}
    with pytest.raises(SpikeError, match="SPK609"):
        plain().choose(np.full(3, -np.inf, np.float32))
