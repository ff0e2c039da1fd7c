"""Error feedback: never worse than the plain quantiser, better on correlated inputs, and, given the
grid that it chose, the codes of a few lines of numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from spikeinfer.kernels import (
    Format,
    block_elements,
    dequantize,
    quantize,
    quantize_with_feedback,
    row_bytes,
)

Floats = NDArray[np.float32]
BLOCKS = [f for f in get_args(Format) if block_elements(f) > 1]


def factor_of(moment: NDArray[np.float64]) -> Floats:
    """Upper triangular R with R R^T = moment."""
    return np.linalg.cholesky(moment[::-1, ::-1])[::-1, ::-1].astype(np.float32)


def correlated(k: int, seed: int = 0, damping: float = 0.01) -> NDArray[np.float64]:
    """Second moments of inputs that live in a quarter of their dimensions; one channel is loud."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2 * k, k // 4)) @ rng.standard_normal((k // 4, k))
    x[:, 3] *= 20
    moment = x.T @ x / len(x)
    return np.asarray(moment + damping * np.trace(moment) / k * np.eye(k))


def weights(n: int, k: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * np.float32(0.05)


def errors_of(
    w: Floats, rows: NDArray[np.uint8], fmt: Format, moment: NDArray[np.float64]
) -> NDArray[np.float64]:
    difference = (w - dequantize(rows, fmt, w.shape[1])).astype(np.float64)
    return np.asarray(((difference @ moment) * difference).sum(1))


@pytest.mark.parametrize("fmt", BLOCKS)
def test_keeps_the_least_error_and_tells_it(fmt: Format) -> None:
    w, moment = weights(19, 512), correlated(512)
    rows, errors = quantize_with_feedback(w, factor_of(moment), fmt)
    kept = errors_of(w, rows, fmt, moment)
    plain = errors_of(w, quantize(w, fmt), fmt, moment)
    weighted = quantize(w, fmt, importance=np.diagonal(moment).astype(np.float32))
    # fp32 sums over 512 columns, and a factor rounded to fp32
    np.testing.assert_allclose(errors.min(1), kept, rtol=2e-3)
    np.testing.assert_allclose(errors[:, 0], plain, rtol=2e-3)
    np.testing.assert_allclose(errors[:, 1], errors_of(w, weighted, fmt, moment), rtol=2e-2)
    assert (kept <= plain * 1.002).all()
    assert kept.sum() < 0.5 * plain.sum()


@pytest.mark.parametrize("fmt", [f for f in BLOCKS if block_elements(f) == 256])
@pytest.mark.parametrize("k", [64, 320])
def test_a_short_last_block(fmt: Format, k: int) -> None:
    w, moment = weights(9, k), correlated(k)
    rows, errors = quantize_with_feedback(w, factor_of(moment), fmt)
    kept = errors_of(w, rows, fmt, moment)
    np.testing.assert_allclose(errors.min(1), kept, rtol=2e-3)
    assert kept.sum() < 0.6 * errors[:, 0].sum()


# --- the same in numpy ---------------------------------------------------------------------------


def read_q8_0(rows: NDArray[np.uint8]) -> tuple[Floats, Floats, Floats]:
    blocks = rows.reshape(len(rows), -1, 34)
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    codes = blocks[..., 2:].view(np.int8).astype(np.float32)
    return spread(d, 32), spread(0 * d, 32), codes.reshape(len(rows), -1)


def read_q5_0(rows: NDArray[np.uint8]) -> tuple[Floats, Floats, Floats]:
    blocks = rows.reshape(len(rows), -1, 22)
    d = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    nibbles = blocks[..., 6:]
    low = np.concatenate([nibbles & 15, nibbles >> 4], -1)
    codes = (low | (high << 4)).astype(np.float32) - 16
    return spread(d, 32), spread(0 * d, 32), codes.reshape(len(rows), -1)


def read_q4_k(rows: NDArray[np.uint8]) -> tuple[Floats, Floats, Floats]:
    blocks = rows.reshape(len(rows), -1, 144)
    d, dmin = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    s = blocks[..., 4:16]
    scale = np.concatenate([s[..., :4] & 63, (s[..., 8:] & 15) | ((s[..., :4] >> 6) << 4)], -1)
    low = np.concatenate([s[..., 4:8] & 63, (s[..., 8:] >> 4) | ((s[..., 4:8] >> 6) << 4)], -1)
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], -2).astype(np.float32)
    return spread(d * scale, 32), spread(dmin * low, 32), codes.reshape(len(rows), -1)


def spread(values: Floats, length: int) -> Floats:
    return np.repeat(values.reshape(len(values), -1), length, axis=1)


@pytest.mark.parametrize(
    ("fmt", "read", "lowest", "highest"),
    [("q8_0", read_q8_0, -128, 127), ("q5_0", read_q5_0, -16, 15), ("q4_k", read_q4_k, 0, 15)],
)
def test_no_worse_than_numpys_feedback_on_the_same_grid_and_nearly_a_minimum(
    fmt: Format, read: Callable[[Any], tuple[Floats, Floats, Floats]], lowest: int, highest: int
) -> None:
    w, moment = weights(16, 512), correlated(512)
    factor = factor_of(moment).astype(np.float64)
    rows, errors = quantize_with_feedback(w, factor_of(moment), fmt)
    scale, low, codes = read(rows)
    np.testing.assert_array_equal(dequantize(rows, fmt, 512), scale * codes - low)
    error = np.zeros(w.shape)
    for j in range(512):
        wanted = w[:, j] + error[:, :j] @ factor[:j, j] / factor[j, j]
        code = np.clip(np.round((wanted + low[:, j]) / scale[:, j]), lowest, highest)
        error[:, j] = w[:, j] - (scale[:, j] * code - low[:, j])
    fed = errors.argmin(1) == 2
    assert fed.mean() > 0.9
    assert errors[fed].min(1).sum() <= ((error @ factor) ** 2).sum(1)[fed].sum()
    # The code that a column would have if all others stayed, after two sweeps.
    kept = (w - (scale * codes - low)).astype(np.float64)
    wanted = scale * codes - low + kept @ moment / np.diagonal(moment)
    best = np.clip(np.round((wanted + low) / scale), lowest, highest)
    assert (best == codes)[fed].mean() > 0.9
    assert np.abs(best - codes)[fed].max() <= 2


# --- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", BLOCKS)
def test_same_bytes_for_any_number_of_threads(fmt: Format) -> None:
    w, factor = weights(37, 256), factor_of(correlated(256))
    first, errors = quantize_with_feedback(w, factor, fmt, 1)
    for threads in (2, 4):
        rows, again = quantize_with_feedback(w, factor, fmt, threads)
        assert rows.tobytes() == first.tobytes()
        assert again.tobytes() == errors.tobytes()


@pytest.mark.parametrize("fmt", BLOCKS)
def test_rows_do_not_depend_on_their_neighbours(fmt: Format) -> None:
    w, factor = weights(21, 256), factor_of(correlated(256))
    rows, _ = quantize_with_feedback(w, factor, fmt)
    for row in (0, 7, 20):
        alone, _ = quantize_with_feedback(w[row : row + 1], factor, fmt)
        assert alone.tobytes() == rows[row].tobytes()


@pytest.mark.parametrize("fmt", BLOCKS)
def test_zeros_tiny_and_huge_values_stay_finite(fmt: Format) -> None:
    w, factor = weights(6, 512), factor_of(correlated(512))
    w[0] = 0
    w[1, 32:] = 0
    w[2] *= np.float32(1e-36)
    w[3] *= np.float32(1e4)
    w[4, 100] = 300
    w[5] = 0.25
    rows, errors = quantize_with_feedback(w, factor, fmt)
    back = dequantize(rows, fmt, 512)
    assert np.isfinite(back).all()
    assert np.isfinite(errors).all()
    assert not back[0].any()
    np.testing.assert_allclose(back[3], w[3], atol=np.abs(w[3]).max())


@pytest.mark.parametrize("fmt", BLOCKS)
def test_dead_inputs_and_few_tokens(fmt: Format) -> None:
    """A damped moment of three tokens, half of whose channels are always zero."""
    x = np.random.default_rng(2).standard_normal((3, 256))
    x[:, ::2] = 0
    moment = x.T @ x / 3
    moment += 0.01 * np.trace(moment) / 256 * np.eye(256)
    w = weights(9, 256)
    rows, errors = quantize_with_feedback(w, factor_of(moment), fmt)
    back = dequantize(rows, fmt, 256)
    assert np.isfinite(back).all()
    # Channels that no token used aren't free to go anywhere.
    assert np.abs(back - w).max() < 8 * np.abs(dequantize(quantize(w, fmt), fmt, 256) - w).max()
    assert errors.min(1).sum() < 0.2 * errors[:, 0].sum()


def test_uncorrelated_inputs_leave_nothing_to_feed_back() -> None:
    """With H = I every column stands alone: only the choice of scales can differ from plain."""
    w = weights(16, 256)
    _, errors = quantize_with_feedback(w, np.eye(256, dtype=np.float32), "q4_k")
    plain = errors_of(w, quantize(w, "q4_k"), "q4_k", np.eye(256))
    assert (errors.min(1) <= plain * 1.001).all()
    assert errors.min(1).sum() > 0.7 * plain.sum()


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_cannot_be_stored_is_refused(fmt: Format, bad: float) -> None:
    w, factor = weights(5, 256), factor_of(correlated(256))
    w[3, 17] = bad
    with pytest.raises(ValueError, match="row 3, column 17"):
        quantize_with_feedback(w, factor, fmt)


def test_factors_that_do_not_fit_are_refused() -> None:
    w = weights(2, 256)
    with pytest.raises(ValueError, match="no blocks"):
        quantize_with_feedback(w, np.eye(256, dtype=np.float32), "f16")
    with pytest.raises(ValueError, match="positive diagonal"):
        quantize_with_feedback(w, np.zeros((256, 256), np.float32), "q8_0")
    with pytest.raises(ValueError, match="must be"):
        quantize_with_feedback(w, np.eye(128, dtype=np.float32), "q8_0")
    assert row_bytes("q8_0", 256) == 272
