"""The sampling pipeline against transformers' logits processors, in generate()'s order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spikeinfer.runtime.logits import candidates, penalise_repetition
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
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
    left = candidates(ours, temperature, top_k, top_p, min_p)

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
