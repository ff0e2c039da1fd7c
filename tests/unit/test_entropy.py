"""Entropy-bounded sampling: the bound holds, nothing changes below it, the best stays the best."""

from __future__ import annotations

import numpy as np
import pytest
from spikeinfer.runtime.entropy import bounded_sharpness, entropy_bits
from spikeinfer.runtime.sampling import Choice, Sampler, choose_rows
from spikeinfer.runtime.sampling_params import SamplingParams


def random_rows(count: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of all sharpnesses, and limits below and above their entropies."""
    rng = np.random.default_rng(vocab)
    rows = rng.normal(0, rng.uniform(0.01, 10, (count, 1)), (count, vocab)).astype(np.float32)
    return rows, rng.uniform(0, 1.2 * np.log2(vocab), count)


def exact_entropy(rows: np.ndarray, sharpness: np.ndarray) -> np.ndarray:
    """Bits, all in float64."""
    scaled = (rows - rows.max(axis=1, keepdims=True)).astype(np.float64) * sharpness[:, None]
    weights = np.exp(scaled)
    total = weights.sum(axis=1)
    return (np.log(total) - (weights * scaled).sum(axis=1) / total) / np.log(2)


def bounded(rows: np.ndarray, sharpness: np.ndarray, bits: np.ndarray) -> np.ndarray:
    return bounded_sharpness(rows - rows.max(axis=1, keepdims=True), sharpness, bits)


@pytest.mark.parametrize("vocab", [2, 60, 300])
def test_ten_thousand_vectors_stay_within_their_limit(vocab: int) -> None:
    rows, bits = random_rows(10_000, vocab)
    asked = np.random.default_rng(0).uniform(0.3, 3, len(rows))
    found = bounded(rows, asked, bits)
    before, after = exact_entropy(rows, asked), exact_entropy(rows, np.minimum(found, 1e30))
    assert (after <= bits + 1e-3).all()
    below = before <= bits - 1e-5  # nearer, float32 can't tell
    assert below.any()
    np.testing.assert_array_equal(found[below], asked[below])
    changed = (found > asked) & np.isfinite(found)
    assert changed.mean() > 0.1
    assert (after[changed] >= bits[changed] - 1e-3).all()  # no sharper than it takes
    assert (found >= asked).all()  # a positive factor: the best token stays the best


def test_the_naive_rule_makes_it_worse() -> None:
    """Dividing the logits by entropy / limit flattens exactly those that are too flat."""
    rows, _ = random_rows(1000, 100)
    bits = exact_entropy(rows, np.ones(1000)) * 0.7
    naive = bits / exact_entropy(rows, np.ones(1000))  # sharpness: logits / (entropy / limit)
    assert (exact_entropy(rows, naive) > bits + 1e-3).all()
    assert (exact_entropy(rows, naive) > exact_entropy(rows, np.ones(1000))).all()
    ours = np.minimum(bounded(rows, np.ones(1000), bits), 1e30)
    assert (exact_entropy(rows, ours) <= bits + 1e-3).all()


def test_equal_best_tokens_are_one_bit_that_no_temperature_removes() -> None:
    rows = np.array([[3.0, 3.0, 0.0], [3.0, 3.0, 0.0], [1e-20, 0.0, -1.0]], np.float32)
    found = bounded(rows, np.ones(3), np.array([1.0, 0.5, 0.5]))
    assert np.isfinite(found[0])
    assert np.isinf(found[1])
    assert exact_entropy(rows[2:], found[2:])[0] <= 0.5


def test_an_unreachable_limit_and_none_at_all_take_the_best() -> None:
    row = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    for bits in (0.0, 0.5):
        samplers = [
            Sampler(SamplingParams(temperature=1.5, max_entropy=bits, seed=seed), [1])
            for seed in range(20)
        ]
        assert set(choose_rows([row] * 20, samplers)) == {Choice(1)}


def test_a_limit_above_the_entropy_changes_no_draw() -> None:
    rows, _ = random_rows(50, 300)
    plain = [Sampler(SamplingParams(temperature=0.9, seed=i), [1]) for i in range(50)]
    bound = [
        Sampler(SamplingParams(temperature=0.9, max_entropy=20, seed=i), [1]) for i in range(50)
    ]
    assert choose_rows(rows, bound) == choose_rows(rows, plain)


def test_entropy_of_known_distributions() -> None:
    rows = np.array([[0.0] * 8, [0.0] + [-np.inf] * 7], np.float32)
    assert entropy_bits(rows) == pytest.approx([3.0, 0.0], abs=1e-6)
    assert entropy_bits(np.log(np.array([[0.5, 0.25, 0.25]], np.float32))) == pytest.approx([1.5])
