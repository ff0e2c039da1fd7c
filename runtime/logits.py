"""From one row of logits to the tokens that may be drawn: penalties, top-k, top-p, min-p.

Semantics and order are those of transformers' logits processors (repetition penalty, temperature,
top-k, top-p, min-p) and of the OpenAI API (presence and frequency penalties on generated tokens);
`tests/numeric/test_sampling_oracle.py` compares with the former.

Everything works on a single row. A row of 49,152 floats stays in the L2 cache, a batch of rows does
not, and a row's result can't depend on which other rows are in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatRow = NDArray[np.float32]
IdRow = NDArray[np.int64]

# Buckets of the nucleus search: 1/64 nat wide, the last one open.
BUCKETS_PER_NAT = 64
BUCKETS = 64 * BUCKETS_PER_NAT
# Rows longer than this are drawn from in two levels: first a block, then a token in it.
DRAW_BLOCK = 512
# Block length of the search for the k-th best.
PARTITION_BLOCK = 64


@dataclass(frozen=True)
class Candidates:
    """Tokens left after filtering.

    Attributes:
        ids: token ids in rising order, int64 ``[C]``; None = every id of the row.
        weights: relative probabilities, the best token's is 1; float32 ``[C]``.
    """

    ids: IdRow | None
    weights: FloatRow

    def draw(self, uniform: float) -> int:
        """The token at the point `uniform` (0 <= uniform < 1) of the cumulative distribution."""
        index = _draw_index(self.weights, uniform)
        return index if self.ids is None else int(self.ids[index])


def penalise_repetition(row: FloatRow, seen: IdRow, penalty: float) -> None:
    """Divide positive and multiply negative logits of `seen` ids by `penalty`, in place.

    Source: Keskar et al. 2019 (CTRL), as in transformers' RepetitionPenaltyLogitsProcessor.

    Args:
        row: logits, float32 ``[V]``.
        seen: distinct ids of the prompt and of what was generated.
        penalty: > 0; 1 leaves the row as it is.
    """
    if penalty == 1.0 or not seen.size:
        return
    values = row[seen]
    row[seen] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))


def penalise_generated(
    row: FloatRow, ids: IdRow, counts: IdRow, presence: float, frequency: float
) -> None:
    """Subtract ``presence + frequency * count`` from the logits of generated ids, in place.

    Source: OpenAI API reference, "frequency and presence penalties".

    Args:
        row: logits, float32 ``[V]``.
        ids: distinct generated ids.
        counts: how often each of `ids` was generated.
        presence: subtracted once for each id.
        frequency: subtracted for each occurrence.
    """
    if ids.size and (presence != 0.0 or frequency != 0.0):
        row[ids] -= (presence + frequency * counts).astype(np.float32)


def candidates(
    row: FloatRow, temperature: float, top_k: int, top_p: float, min_p: float
) -> Candidates:
    """Apply temperature, then keep the top-k, of these the top-p, of these the min-p.

    Args:
        row: finite or -inf logits, float32 ``[V]``, at least one finite; not changed.
        temperature: > 0.
        top_k: keep ids at least as likely as the k-th best (ties are kept); 0 = all.
        top_p: keep the fewest best ids whose mass reaches it; 1 = all.
        min_p: keep ids with at least this fraction of the best id's probability; 0 = all.

    Returns:
        The surviving ids; never none.
    """
    scaled = row / np.float32(temperature)
    scaled -= scaled.max()
    weights = np.exp(scaled)
    floor, within = min_p, weights
    if 0 < top_k < row.size:
        kth = _kth_largest(weights, top_k)
        floor, within = max(floor, float(kth)), weights[weights >= kth]
    mass = float(within.sum(dtype=np.float64)) * top_p
    if top_p < 1.0:
        # Ids below this have less than 1 - top_p together, so the nucleus is full without them.
        floor = max(floor, mass * (1 / top_p - 1) / within.size)
    if floor <= 0.0:
        return Candidates(None, weights)
    ids = np.flatnonzero(weights >= np.float32(floor))
    if top_p < 1.0:
        ids = ids[_nucleus(scaled[ids], weights[ids], mass)]
    return Candidates(ids, weights[ids])


def _kth_largest(values: FloatRow, k: int) -> np.float32:
    """The k-th largest value, 1 <= k <= size.

    The k-th largest of the blocks' maxima is at most that, so only values above it are looked at.
    """
    starts = np.arange(0, values.size, PARTITION_BLOCK)
    if k <= starts.size // 4:
        maxima = np.maximum.reduceat(values, starts)
        values = values[values >= np.partition(maxima, maxima.size - k)[maxima.size - k]]
    kth: np.float32 = np.partition(values, values.size - k)[values.size - k]
    return kth


def _nucleus(scaled: FloatRow, weights: FloatRow, mass: float) -> NDArray[np.bool_]:
    """Which of these ids are the fewest best ones whose weights reach `mass`, bool ``[C]``.

    A token stays when the weight strictly before it (more likely, or as likely with a smaller id)
    is below `mass`: the rule of transformers' TopPLogitsWarper read from the other end. Only the
    bucket in which the mass is reached is sorted.

    Args:
        scaled: logits less the best one, <= 0, float32 ``[C]``.
        weights: their exponentials.
        mass: > 0.
    """
    bucket = np.minimum(scaled * np.float32(-BUCKETS_PER_NAT), BUCKETS - 1).astype(np.int32)
    reached = np.cumsum(np.bincount(bucket, weights))
    last = int(np.searchsorted(reached, mass))
    keep: NDArray[np.bool_] = bucket < last
    edge = np.flatnonzero(bucket == last)
    edge = edge[np.argsort(-weights[edge], kind="stable")]
    before = np.cumsum(weights[edge], dtype=np.float64) - weights[edge]
    before += reached[last - 1] if last else 0.0
    keep[edge[before < mass]] = True
    return keep


def _draw_index(weights: FloatRow, uniform: float) -> int:
    """Index at the point `uniform` of the cumulative distribution of `weights`."""
    if weights.size <= DRAW_BLOCK:
        return _search(np.cumsum(weights, dtype=np.float64), uniform)[0]
    starts = np.arange(0, weights.size, DRAW_BLOCK)
    sums = np.add.reduceat(weights, starts, dtype=np.float64)
    block, rest = _search(np.cumsum(sums), uniform)
    inside = weights[starts[block] : starts[block] + DRAW_BLOCK]
    return int(starts[block]) + _search(np.cumsum(inside, dtype=np.float64), rest)[0]


def _search(cumulative: NDArray[np.float64], uniform: float) -> tuple[int, float]:
    """Where `uniform` of the whole falls, and how far into that entry, both 0 <= x < 1."""
    point = uniform * cumulative[-1]
    index = min(int(np.searchsorted(cumulative, point, side="right")), cumulative.size - 1)
    start = cumulative[index - 1] if index else 0.0
    size = cumulative[index] - start
    return index, float((point - start) / size) if size > 0 else 0.0
