"""The sampling pipeline against transformers' logits processors, in generate()'s order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spikeinfer.runtime.logits import candidates, typical
from spikeinfer.runtime.logprobs import token_logprobs
from spikeinfer.runtime.penalties import penalise_repetition
from spikeinfer.runtime.sampling import Sampler
from spikeinfer.runtime.sampling_params import SamplingParams
from spikeinfer.runtime.softmax import scaled_rows
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

VOCAB = 700


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 50, VOCAB]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    penalty=st.sampled_from([0.8, 1.0, 1.3]),
)
@settings(max_examples=150, deadline=None)
def test_same_tokens_survive_with_the_same_probabilities(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 4, VOCAB).astype(np.float32)
    context = rng.integers(0, VOCAB, 30)

    ours = row.copy()
    penalise_repetition(ours, np.unique(context), penalty)
    sharpness = np.array([1 / temperature], np.float32)
    scaled = scaled_rows([ours], ours.max(keepdims=True), sharpness)[0]
    left = candidates(scaled, np.exp(scaled), top_k, top_p, min_p)

    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    chain.append(TemperatureLogitsWarper(temperature))
    chain.extend([TopKLogitsWarper(top_k)] if top_k else [])
    chain.extend([TopPLogitsWarper(top_p)] if top_p < 1 else [])
    chain.extend([MinPLogitsWarper(min_p)] if min_p else [])
    scores = chain(torch.from_numpy(context)[None], torch.from_numpy(row.copy())[None])[0]
    expected = scores.softmax(-1).numpy()

    found = np.zeros(VOCAB)
    found[slice(None) if left.ids is None else left.ids] = left.weights / left.weights.sum()
    # Both cut at a cumulative sum of float32: a token whose edge lies within the rounding of that
    # sum (700 terms, 2^-24 each) may fall on either side, and then all others rescale by it.
    differing = np.flatnonzero((found > 0) != (expected > 0))
    assert differing.size <= 1
    edge = float(max(found[differing].max(initial=0), expected[differing].max(initial=0)))
    if differing.size:
        exact = np.exp(ours.astype(np.float64) / temperature - ours.max() / temperature)
        order = np.argsort(-exact)
        mass = np.cumsum(exact[order]) / exact.sum()
        assert np.abs(mass - top_p).min() < 1e-4
    np.testing.assert_allclose(found, expected, rtol=1e-4 + 2 * edge, atol=1e-6 + edge)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 2.0])
def test_repetition_penalty_alone(penalty: float) -> None:
    row = np.linspace(-3, 3, 50, dtype=np.float32)
    seen = np.array([0, 3, 24, 25, 49])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.from_numpy(seen)[None], torch.from_numpy(row.copy())[None]
    )[0].numpy()
    penalise_repetition(row, seen, penalty)
    np.testing.assert_array_equal(row, expected)  # the same single float32 operations


@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.5, 2.0, 6.0]),
    mass=st.sampled_from([0.05, 0.3, 0.9, 0.99]),
    top_k=st.sampled_from([0, 40]),
)
@settings(max_examples=100, deadline=None)
def test_typical_keeps_what_transformers_keeps(
    seed: int, scale: float, mass: float, top_k: int
) -> None:
    row = np.random.default_rng(seed).normal(0, scale, VOCAB).astype(np.float32)
    scaled = row - row.max()
    left = typical(candidates(scaled, np.exp(scaled), top_k, 1.0, 0.0), mass)

    scores = torch.from_numpy(row)[None]
    if top_k:
        scores = TopKLogitsWarper(top_k)(torch.zeros(1, 1, dtype=torch.long), scores)
    kept = TypicalLogitsWarper(mass)(torch.zeros(1, 1, dtype=torch.long), scores)[0]
    expected = np.flatnonzero(np.isfinite(kept.numpy()))

    differing = np.setxor1d(left.ids, expected)
    # float32 sums against float64: tokens at the edge of the mass may fall on either side.
    share = np.exp(scaled.astype(np.float64))
    share /= share.sum()
    assert share[differing].sum() < 1e-4 + share.max() * (differing.size > 0)
    assert differing.size <= 1


def test_penalties_bias_and_draws_as_in_one_chain() -> None:
    """A whole request's options at once, against the processors in our documented order."""
    rng = np.random.default_rng(3)
    row = rng.normal(0, 2, VOCAB).astype(np.float32)
    context = rng.integers(0, VOCAB, 20)
    bias = {5: 3.0, 17: -math.inf, 40: -1.5}
    options = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2}
    sampler = Sampler(SamplingParams(seed=1, logit_bias=bias, **options), context.tolist())
    # One token is drawn each time from a fresh state: counts would change the next one.
    uniforms = (np.arange(4000) + 0.5) / 4000
    adjusted = sampler.adjusted(row)
    scaled = scaled_rows([adjusted], adjusted.max(keepdims=True), np.float32([1 / 0.7]))[0]
    left = candidates(scaled, np.exp(scaled), 30, 0.9, 0.0)
    found = np.bincount([left.draw(u) for u in uniforms], minlength=VOCAB) / uniforms.size

    scores = RepetitionPenaltyLogitsProcessor(1.2)(
        torch.from_numpy(context)[None], torch.from_numpy(row.copy())[None]
    )
    for token, value in bias.items():
        scores[0, token] += value
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(30), TopPLogitsWarper(0.9)):
        scores = warper(torch.from_numpy(context)[None], scores)
    expected = scores[0].softmax(-1).numpy()
    # 4,000 evenly spaced points resolve each probability to 1 / 4000 on either edge.
    np.testing.assert_allclose(found, expected, atol=2 / 4000)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_logprobs_are_those_of_log_softmax(count: int) -> None:
    rng = np.random.default_rng(9)
    rows = [rng.normal(0, 5, VOCAB).astype(np.float32) for _ in range(4)]
    rows[2][100:] = -np.inf
    tokens = [3, 699, 50, 0]
    found = token_logprobs(rows, tokens, [count] * 4)
    for row, token, one in zip(rows, tokens, found, strict=True):
        exact = torch.from_numpy(row.astype(np.float64)).log_softmax(-1)
        # Blocks of float32 weights are summed pairwise: 1e-6 relative in the normaliser.
        assert one.logprob == pytest.approx(float(exact[token]), abs=2e-6)
        assert one.rank == 1 + int((exact > exact[token]).sum())
        best = exact.topk(count) if count else None
        assert [t for t, _ in one.top] == ([] if best is None else best.indices.tolist())
        values = [] if best is None else best.values.tolist()
        assert [p for _, p in one.top] == pytest.approx(values, abs=2e-6)
