"""Logits of many rows to relative probabilities, and draws from them.

Vectorised over the batch, in tiles that stay in a core's L2 cache. No row's result depends on the
rows beside it: elements are computed alone, and sums run along a row in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatRow = NDArray[np.float32]
FloatRows = NDArray[np.float32]
Rows = Sequence[FloatRow] | FloatRows
Doubles = NDArray[np.float64]

# Rows are drawn from in two levels: first a block, then a token in it.
BLOCK = 512
# Elements of a tile, 256 KiB: a multiple of BLOCK.
TILE = 1 << 16
BELOW_ONE = math.nextafter(1.0, 0.0)


def scaled_rows(rows: Rows, peaks: FloatRow, sharpness: FloatRow | None = None) -> FloatRows:
    """Logits less their row's best one, over the temperature: float32 ``[R, V]``, <= 0.

    Args:
        rows: R logits rows, float32 ``[V]``, finite or -inf.
        peaks: the best logit of each, float32 ``[R]``.
        sharpness: 1 / temperature, float32 ``[R]``; None = 1.
    """
    scaled = np.empty((len(rows), rows[0].size), np.float32)
    _scale(rows, peaks, sharpness, scaled)
    return scaled


def totals(rows: Rows, peaks: FloatRow) -> Doubles:
    """Sum of ``exp(logit - peak)`` over each row, float64 ``[R]``; arguments as above."""
    sums = _block_sums(rows, peaks, None)
    return sums.cumsum(axis=1)[:, -1]


def draw_rows(
    rows: Rows, peaks: FloatRow, sharpness: FloatRow, uniforms: Sequence[float]
) -> list[int]:
    """Draw one token of each row from its softmax.

    Args:
        rows, peaks, sharpness: as for `scaled_rows`.
        uniforms: points of the cumulative distributions, 0 <= u < 1.
    """
    found = []
    sums = _block_sums(rows, peaks, sharpness).cumsum(axis=1)
    for row, peak, sharp, ends, uniform in zip(rows, peaks, sharpness, sums, uniforms, strict=True):
        block, rest = _find(ends, uniform)
        inside = row[block * BLOCK : (block + 1) * BLOCK] - peak
        inside *= sharp
        ends = np.exp(inside, out=inside).cumsum(dtype=np.float64)
        found.append(block * BLOCK + _find(ends, rest)[0])
    return found


def draw_index(weights: FloatRow, uniform: float) -> int:
    """Index at the point `uniform` of the cumulative distribution of `weights`, ``[C]``."""
    if weights.size <= BLOCK:
        return _find(weights.cumsum(dtype=np.float64), uniform)[0]
    starts = np.arange(0, weights.size, BLOCK)
    sums = np.add.reduceat(weights, starts, dtype=np.float64)
    block, rest = _find(sums.cumsum(), uniform)
    inside = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    return block * BLOCK + _find(inside, rest)[0]


def _scale(rows: Rows, peaks: FloatRow, sharpness: FloatRow | None, out: FloatRows) -> None:
    for row, peak, to in zip(rows, peaks, out, strict=True):
        np.subtract(row, peak, out=to)
    if sharpness is not None:
        out *= sharpness[:, None]


def _block_sums(rows: Rows, peaks: FloatRow, sharpness: FloatRow | None) -> Doubles:
    """Sums of the exponentials of each block, float64 ``[R, ceil(V / BLOCK)]``."""
    vocab = rows[0].size
    sums = np.empty((len(rows), -(-vocab // BLOCK)), np.float64)
    width = min(TILE, sums.shape[1] * BLOCK)
    height = min(len(rows), TILE // width)
    scratch = np.empty(height * width, np.float32)
    for top in range(0, len(rows), height):
        tile = slice(top, top + height)
        count, sharp = len(peaks[tile]), None if sharpness is None else sharpness[tile]
        for left in range(0, vocab, width):
            real = min(width, vocab - left)
            blocks = -(-real // BLOCK)
            part = scratch[: count * blocks * BLOCK].reshape(count, blocks * BLOCK)
            part[:, real:] = 0.0  # the last block's rest
            weights = part[:, :real]
            _scale([row[left : left + width] for row in rows[tile]], peaks[tile], sharp, weights)
            np.exp(weights, out=weights)
            first = left // BLOCK
            sums[tile, first : first + blocks] = part.reshape(count, blocks, BLOCK).sum(axis=2)
    return sums


def _find(ends: Doubles, uniform: float) -> tuple[int, float]:
    """Where `uniform` of the whole falls, and how far into that entry, both 0 <= x < 1.

    Args:
        ends: cumulative weights, ``[N]``.
        uniform: 0 <= u < 1.
    """
    whole = float(ends[-1])
    # Below the whole even when rounded, so that no entry of weight 0 is found at the end.
    point = min(uniform * whole, math.nextafter(whole, 0.0))
    index = int(ends.searchsorted(point, side="right"))
    start = float(ends[index - 1]) if index else 0.0
    return index, min((point - start) / (float(ends[index]) - start), BELOW_ONE)
