"""Logits of many rows to relative probabilities, and draws from them.

Vectorised over the batch, in tiles that stay in a core's L2 cache. No row's result depends on the
rows beside it: elements are computed alone, and sums run along a row in a fixed order.
"""

from __future__ import annotations

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
    sums = _block_sums(rows, peaks, sharpness)
    blocks, rest = _search(sums.cumsum(axis=1), np.asarray(uniforms, np.float64))
    starts = blocks * BLOCK
    inside = np.full((len(rows), BLOCK), -np.inf, np.float32)
    for row, start, out in zip(rows, starts.tolist(), inside, strict=True):
        part = row[start : start + BLOCK]
        out[: part.size] = part
    _scale(inside, peaks, sharpness, inside)
    weights = np.exp(inside, out=inside)
    tokens, _ = _search(weights.cumsum(axis=1, dtype=np.float64), rest)
    return [int(token) for token in starts + tokens]


def draw_index(weights: FloatRow, uniform: float) -> int:
    """Index at the point `uniform` of the cumulative distribution of `weights`, ``[C]``."""
    point = np.array([uniform])
    if weights.size <= BLOCK:
        return int(_search(weights.cumsum(dtype=np.float64)[None], point)[0][0])
    starts = np.arange(0, weights.size, BLOCK)
    sums = np.add.reduceat(weights, starts, dtype=np.float64)
    blocks, rest = _search(sums.cumsum()[None], point)
    start = int(starts[blocks[0]])
    inside = weights[start : start + BLOCK].cumsum(dtype=np.float64)
    return start + int(_search(inside[None], rest)[0][0])


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
        tile = slice(top, min(top + height, len(rows)))
        for left in range(0, vocab, width):
            blocks = min(width, -(-(vocab - left) // BLOCK) * BLOCK) // BLOCK
            shape = (tile.stop - top, blocks * BLOCK)
            part = scratch[: shape[0] * shape[1]].reshape(shape)
            part[:, vocab - left :] = 0.0  # the last block's rest
            real = part[:, : vocab - left]
            pieces = [row[left : left + width] for row in rows[tile]]
            _scale(pieces, peaks[tile], None if sharpness is None else sharpness[tile], real)
            np.exp(real, out=real)
            first = left // BLOCK
            sums[tile, first : first + blocks] = part.reshape(shape[0], blocks, BLOCK).sum(axis=2)
    return sums


def _search(cumulative: Doubles, uniforms: Doubles) -> tuple[NDArray[np.int64], Doubles]:
    """Where `uniforms` of the rows' wholes fall, and how far into that entry, 0 <= x < 1.

    Args:
        cumulative: rising, ``[R, N]``.
        uniforms: 0 <= u < 1, ``[R]``.
    """
    whole = cumulative[:, -1]
    # Below the whole even when rounded, so that no entry of weight 0 is found at the end.
    points = np.minimum(uniforms * whole, np.nextafter(whole, 0.0))
    index = (cumulative <= points[:, None]).sum(axis=1).clip(max=cumulative.shape[1] - 1)
    every = np.arange(index.size)
    ends = cumulative[every, index]
    starts = np.where(index > 0, cumulative[every, index - 1], 0.0)
    size = ends - starts
    rest = np.divide(points - starts, size, out=np.zeros_like(points), where=size > 0)
    return index, rest.clip(0.0, np.nextafter(1.0, 0.0))
