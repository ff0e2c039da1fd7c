"""Sampling: ranges, determinism, distribution, and rows that can't be used."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from spikeinfer import SpikeError
from spikeinfer.runtime.logits import Candidates, candidates, kth_largest, typical, unsurprising
from spikeinfer.runtime.sampling import Choice, Sampler, choose_rows
from spikeinfer.runtime.sampling_params import SamplingParams
from spikeinfer.runtime.softmax import draw_index, draw_rows

ROWS = hnp.arrays(np.float32, st.integers(2, 600), elements=st.floats(-20, 20, width=32))


def plain(**options: object) -> Sampler:
    return Sampler(SamplingParams(**options), [1])


def choose(sampler: Sampler, row: np.ndarray) -> int:
    choice = choose_rows([row], [sampler])[0]
    if isinstance(choice, SpikeError):
        raise choice
    return choice.token


def filtered(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> Candidates:
    scaled = row - row.max()
    return candidates(scaled, np.exp(scaled), top_k, top_p, min_p)


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
        ("max_entropy", -0.5),
        ("max_entropy", float("nan")),
        ("typical_p", 0.0),
        ("mirostat_tau", 0),
        ("mirostat_eta", 2.0),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {"1": 0.0}),
        ("logit_bias", [1]),
        ("logprobs", -1),
        ("logprobs", 1001),
        ("prompt_logprobs", 1.5),
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(SpikeError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.code == "SPK608"
    assert f"{name}={value!r}" in caught.value.what


def test_the_default_is_greedy() -> None:
    row = np.array([0.0, 3.0, 2.0], np.float32)
    assert [choose(plain(), row) for _ in range(3)] == [1, 1, 1]


@given(row=ROWS, seed=st.integers(0, 2**32), top_p=st.floats(0.01, 1), top_k=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_a_seed_gives_the_same_tokens_in_any_batch(
    row: np.ndarray, seed: int, top_p: float, top_k: int
) -> None:
    options = {"temperature": 0.8, "top_p": top_p, "top_k": top_k, "seed": seed}
    alone = plain(**options)
    want = [choose(alone, row) for _ in range(4)]
    together, other = plain(**options), plain(temperature=1.0, seed=5)
    batch = np.stack([row[::-1].copy(), row])
    found = [choose_rows(batch, [other, together])[1] for _ in range(4)]
    assert found == [Choice(token) for token in want]


@given(row=ROWS, top_p=st.floats(0.01, 0.999))
@settings(max_examples=100, deadline=None)
def test_the_nucleus_is_the_smallest_prefix_that_reaches_the_mass(
    row: np.ndarray, top_p: float
) -> None:
    kept = filtered(row, 0, top_p, 0.0)
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
    ids = filtered(row, 0, 0.5, 0.0).ids
    np.testing.assert_array_equal(ids, np.arange(2_500))


@given(values=ROWS, k=st.integers(1, 600))
def test_kth_largest(values: np.ndarray, k: int) -> None:
    k = min(k, values.size)
    assert kth_largest(values, k) == np.sort(values)[-k]
    tiled = np.tile(values, 40)  # long enough for the search by blocks
    assert kth_largest(tiled, k) == np.sort(tiled)[-k]


@given(values=ROWS, uniform=st.floats(0, 1, exclude_max=True))
def test_drawing_inverts_the_cumulative_distribution(values: np.ndarray, uniform: float) -> None:
    weights = np.tile(np.exp(values - values.max()), 3)
    index = draw_index(weights, uniform)
    edges = np.cumsum(weights, dtype=np.float64)
    # The two levels round differently than one sum does.
    slack = 1e-9 * edges[-1]
    assert edges[index] - weights[index] - slack <= uniform * edges[-1] <= edges[index] + slack


def test_frequencies_follow_the_probabilities() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = plain(temperature=1.0, seed=11)
    chosen = choose_rows([row] * 20_000, [sampler] * 20_000)
    tokens = [choice.token for choice in chosen if isinstance(choice, Choice)]
    counts = np.bincount(tokens, minlength=3) / 20_000
    # Standard deviation of a frequency is below 0.0036; five of them.
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.018


def test_min_p_is_relative_to_the_best() -> None:
    row = np.log(np.array([0.6, 0.31, 0.06, 0.03], np.float32))
    np.testing.assert_array_equal(filtered(row, 0, 1.0, 0.5).ids, [0, 1])
    assert filtered(row, 0, 1.0, 0.0).ids is None


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    row = np.array([2.0, 1.9, 0.0], np.float32)
    sampler = Sampler(SamplingParams(presence_penalty=0.2, frequency_penalty=0.0), [0, 0, 0])
    assert [choose(sampler, row) for _ in range(3)] == [0, 1, 0]
    often = Sampler(SamplingParams(frequency_penalty=0.06), [1])
    assert [choose(often, row) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_repetition_counts_the_prompt() -> None:
    row = np.array([2.0, 1.9, -1.0], np.float32)
    assert choose(Sampler(SamplingParams(repetition_penalty=1.2), [0]), row) == 1
    assert row.tolist() == [2.0, pytest.approx(1.9), -1.0]  # the caller's row is as it was


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_unusable_row_harms_nobody_else(temperature: float, bad: float) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[:, 2] = 9
    logits[1, 5] = bad
    samplers = [plain(temperature=temperature, seed=i, top_p=0.5) for i in range(3)]
    first, second, third = choose_rows(logits, samplers)
    assert first == third == Choice(2)
    assert isinstance(second, SpikeError)
    assert second.code == "SPK609"


def test_minus_infinity_is_a_ban_not_an_error() -> None:
    row = np.array([-np.inf, 1.0, -np.inf], np.float32)
    assert {choose(plain(temperature=5.0, seed=s), row) for s in range(20)} == {1}
    with pytest.raises(SpikeError, match="SPK609"):
        choose(plain(), np.full(3, -np.inf, np.float32))


ANY_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 20]),
        "top_p": st.sampled_from([0.3, 0.95]),
        "min_p": st.sampled_from([0.01, 0.5]),
        "typical_p": st.sampled_from([0.4, 0.95]),
        "mirostat_tau": st.sampled_from([1.0, 4.0]),
        "max_entropy": st.sampled_from([0.0, 0.7, 3.0]),
        "presence_penalty": st.sampled_from([-0.5, 0.8]),
        "repetition_penalty": st.sampled_from([0.9, 1.4]),
        "logit_bias": st.sampled_from([{1: 5.0}, {0: float("-inf"), 1: 0.1}]),
        "logprobs": st.sampled_from([0, 3]),
    },
)


@pytest.mark.parametrize("vocab", [9, 700, 70_001])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_rows_choice_does_not_depend_on_its_batch(vocab: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    options = data.draw(st.lists(ANY_OPTIONS, min_size=2, max_size=6))
    steps = [rng.normal(0, 3, (len(options), vocab)).astype(np.float32) for _ in range(3)]

    def samplers() -> list[Sampler]:
        return [plain(seed=i, **given) for i, given in enumerate(options)]

    alone, together = samplers(), samplers()
    for logits in steps:
        expected = [choose_rows([r], [s])[0] for r, s in zip(logits, alone, strict=True)]
        assert choose_rows(logits, together) == expected  # logprobs too, to the bit


@pytest.mark.parametrize("vocab", [5, 512, 513, 66_000])
def test_draws_of_rows_invert_the_cumulative_distribution(vocab: int) -> None:
    rows = np.random.default_rng(vocab).normal(0, 3, (40, vocab)).astype(np.float32)
    rows[:, -1] = -np.inf
    uniforms = [0.0, 1 - 2**-53, *np.random.default_rng(1).random(38)]
    tokens = draw_rows(rows, rows.max(axis=1), np.full(40, 2.0, np.float32), uniforms)
    weights = np.exp((rows - rows.max(axis=1, keepdims=True)).astype(np.float64) * 2)
    edges = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
    for row, token, uniform in zip(edges, tokens, uniforms, strict=True):
        # Blocks are summed in float32: about 1e-6 of the whole.
        assert row[token] >= uniform - 2e-6
        assert token == 0 or row[token - 1] <= uniform + 2e-6
        assert token != vocab - 1  # it has no weight


def test_logit_bias_is_added_and_bans() -> None:
    row = np.array([2.0, 1.0, 0.0], np.float32)
    assert choose(plain(logit_bias={1: 1.5}), row) == 1
    assert choose(plain(logit_bias={0: float("-inf")}), row) == 1
    with pytest.raises(SpikeError, match=r"SPK608.*logit_bias"):
        choose(plain(logit_bias=dict.fromkeys(range(3), float("-inf"))), row)


def test_a_ban_hides_no_nan() -> None:
    row = np.array([2.0, np.nan, 0.0], np.float32)
    with pytest.raises(SpikeError, match="SPK609"):
        choose(plain(logit_bias={1: float("-inf")}), row)


def test_typical_prefers_the_expected_surprise_to_the_best() -> None:
    # Entropy 3.4 bits: the best token has 1.3 bits of surprise, the others 4.7 and so are nearer.
    weights = np.array([0.4] + [0.6 / 16] * 16, np.float32)
    left = typical(Candidates(None, weights), 0.4)
    np.testing.assert_array_equal(left.ids, np.arange(1, 17))


def test_surprising_tokens_go_but_never_all() -> None:
    left = Candidates(None, np.array([0.5, 0.25, 0.25], np.float32))
    np.testing.assert_array_equal(unsurprising(left, 1.5).ids, [0])
    np.testing.assert_array_equal(unsurprising(left, 2.0).ids, [0, 1, 2])
    np.testing.assert_array_equal(unsurprising(left, 0.1).ids, [0])


@pytest.mark.parametrize("tau", [2.0, 5.0])
def test_mirostat_steers_the_surprise_to_its_target(tau: float) -> None:
    rng = np.random.default_rng(4)
    sampler, surprises = plain(temperature=1.0, mirostat_tau=tau, seed=8), []
    for _ in range(600):
        row = (-1.2 * np.log(np.arange(1, 5001)) + rng.normal(0, 0.1, 5000)).astype(np.float32)
        token = choose(sampler, row)
        bits = -np.log2(np.exp(row - row.max()) / np.exp(row - row.max()).sum())
        surprises.append(bits[token])
    # The mean of 500 draws, whose standard deviation is about 2 bits, comes within 5 of its errors.
    assert abs(np.mean(surprises[100:]) - tau) < 0.45


def test_logprobs_are_the_models_own() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    options = {"temperature": 0.1, "logit_bias": {2: 20.0}, "seed": 1, "logprobs": 2}
    choice = choose_rows([row], [plain(**options)])[0]
    assert isinstance(choice, Choice)
    assert choice.logprob is not None
    assert (choice.token, choice.logprob.rank) == (2, 3)
    assert choice.logprob.logprob == pytest.approx(np.log(0.2), abs=1e-6)
    assert [token for token, _ in choice.logprob.top] == [0, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-39},
        {"temperature": 1e-39, "top_k": 3},
        {"temperature": 1e46, "logit_bias": {3: -math.inf}},
        {"temperature": 1e46, "logit_bias": {3: -math.inf}, "max_entropy": 2.0},
        {"temperature": 1.0, "top_p": 1e-310},
    ],
)
def test_extreme_options_still_choose_a_token(options: dict[str, Any]) -> None:
    row = np.array([0.0, 2.0, 1.0, 9.0, -3.0], np.float32)
    chosen = choose_rows([row], [Sampler(SamplingParams(seed=0, **options), [1])])[0]
    assert isinstance(chosen, Choice)
    if options["temperature"] <= 1.0:
        assert chosen.token == 3
    else:
        assert chosen.token != 3


@pytest.mark.parametrize("name", ["temperature", "frequency_penalty", "logit_bias"])
def test_whole_numbers_beyond_floats_are_out_of_range(name: str) -> None:
    huge: Any = {3: 10**400} if name == "logit_bias" else 10**400
    with pytest.raises(SpikeError, match=f"SPK608.*{name}"):
        SamplingParams(**{name: huge})


def test_a_bias_is_what_it_was_when_the_request_began() -> None:
    bias = {1: 5.0}
    sampler = Sampler(SamplingParams(logit_bias=bias), [1])
    bias[10**6] = 1.0
    assert choose_rows([np.zeros(4, np.float32)], [sampler])[0] == Choice(1)
