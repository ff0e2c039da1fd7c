"""Which tokens of a row may be drawn: top-k, of these top-p, of these min-p, of these typical-p.

Semantics and order are those of transformers' logits warpers;
`tests/numeric/test_sampling_oracle.py` compares with them. The shared passes over a whole row are
in softmax.py, for the batch; what is left here is the choice among few, row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .softmax import draw_index

FloatRow = NDArray[np.float32]
IdRow = NDArray[np.int64]

# Buckets of the search for a mass: 1/64 nat wide, the last one open.
BUCKETS_PER_NAT = 64
BUCKETS = 64 * BUCKETS_PER_NAT
# Block length of the search for the k-th best.
PARTITION_BLOCK = 64


@dataclass(frozen=True)
class Candidates:
    """Tokens left after filtering.

    Attributes:
        ids: token ids in rising order, int64 ``[C]``; None = every id of the row.
        weights: relative probabilities, float32 ``[C]``.
    """

    ids: IdRow | None
    weights: FloatRow

    def draw(self, uniform: float) -> int:
        """The token at the point `uniform` (0 <= uniform < 1) of the cumulative distribution."""
        index = draw_index(self.weights, uniform)
        return index if self.ids is None else int(self.ids[index])

    def keep(self, kept: NDArray[np.bool_]) -> Candidates:
        """Only these, bool ``[C]``."""
        ids = np.flatnonzero(kept) if self.ids is None else self.ids[kept]
        return Candidates(ids, self.weights[kept])

    def surprises(self) -> NDArray[np.float64]:
        """Bits of surprise of each, float64 ``[C]``."""
        with np.errstate(divide="ignore"):  # a weight that underflowed surprises without end
            bits = np.log2(self.weights, dtype=np.float64)
        return math.log2(float(self.weights.sum(dtype=np.float64))) - bits


def candidates(
    scaled: FloatRow, weights: FloatRow, top_k: int, top_p: float, min_p: float
) -> Candidates:
    """Keep the top-k, of these the top-p, of these the min-p.

    Args:
        scaled: logits over the temperature, less the best one, float32 ``[V]``.
        weights: their exponentials.
        top_k: keep ids at least as likely as the k-th best (ties are kept); 0 = all.
        top_p: keep the fewest best ids whose mass reaches it; 1 = all.
        min_p: keep ids with at least this fraction of the best id's probability; 0 = all.

    Returns:
        The surviving ids; never none.
    """
    floor, within = min_p, weights
    if 0 < top_k < weights.size:
        kth = kth_largest(weights, top_k)
        floor, within = max(floor, float(kth)), weights[weights >= kth]
    whole = float(within.sum(dtype=np.float64))
    mass = whole * top_p
    if top_p < 1.0:
        # Ids below this have less than 1 - top_p together, so the nucleus is full without them.
        floor = max(floor, whole * (1 - top_p) / within.size)
    if floor <= 0.0:
        return Candidates(None, weights)
    ids = np.flatnonzero(weights >= np.float32(floor))
    if top_p < 1.0:
        ids = ids[_fewest(-scaled[ids], weights[ids], mass, -weights[ids])]
    return Candidates(ids, weights[ids])


def typical(left: Candidates, mass: float) -> Candidates:
    """Keep the tokens whose surprise is nearest to the entropy, the fewest that reach `mass`.

    Tokens as near as the last of them stay too. Source: Meister et al. 2022, "Locally Typical
    Sampling", as in transformers' TypicalLogitsWarper.

    Args:
        left: what other filters left.
        mass: in (0, 1]; 1 keeps all.
    """
    if mass >= 1.0:
        return left
    surprises = left.surprises() * math.log(2)
    share = left.weights / left.weights.sum(dtype=np.float64)
    possible = share > 0  # those that underflowed have no part in it
    entropy = float((share[possible] * surprises[possible]).sum())
    distance = np.abs(surprises - entropy)
    kept = _fewest(distance, share, mass, distance)
    return left.keep(distance <= distance[kept].max())


def unsurprising(left: Candidates, bits: float) -> Candidates:
    """Keep the tokens of at most so many bits of surprise, or the best one (mirostat 2.0)."""
    kept = left.surprises() <= bits
    if not kept.any():
        kept[left.weights.argmax()] = True
    return left.keep(kept)


def best_tokens(row: FloatRow, count: int) -> list[int]:
    """The `count` ids of the largest logits, best first, of equal ones the smaller id first."""
    count = min(count, row.size)
    if count == 0:
        return []
    ids = np.flatnonzero(row >= kth_largest(row, count))
    return [int(token) for token in ids[np.argsort(-row[ids], kind="stable")][:count]]


def kth_largest(values: FloatRow, k: int) -> np.float32:
    """The k-th largest value, 1 <= k <= size.

    The k-th largest of the blocks' maxima is at most that, so only values above it are looked at.
    """
    starts = np.arange(0, values.size, PARTITION_BLOCK)
    if k <= starts.size // 4:
        maxima = np.maximum.reduceat(values, starts)
        values = values[values >= np.partition(maxima, maxima.size - k)[maxima.size - k]]
    kth: np.float32 = np.partition(values, values.size - k)[values.size - k]
    return kth


def _fewest(
    cost: NDArray[np.floating], weights: NDArray[np.floating], mass: float, order: FloatRow
) -> NDArray[np.bool_]:
    """Which of these ids are the first ones whose weights reach `mass`, bool ``[C]``.

    A token stays when the weight strictly before it (earlier, or at the same place with a smaller
    id) is below `mass`: the rule of transformers' TopPLogitsWarper read from the other end. Only
    the bucket in which the mass is reached is sorted.

    Args:
        cost: who comes first, in nats, >= 0, ``[C]``.
        weights: their weights.
        mass: > 0.
        order: who comes first within a bucket; rises where `cost` does.
    """
    bucket = np.minimum(cost * BUCKETS_PER_NAT, BUCKETS - 1).astype(np.int32)
    reached = np.cumsum(np.bincount(bucket, weights))
    last = int(np.searchsorted(reached, mass))
    keep: NDArray[np.bool_] = bucket < last
    edge = np.flatnonzero(bucket == last)
    edge = edge[np.argsort(order[edge], kind="stable")]
    before = np.cumsum(weights[edge], dtype=np.float64) - weights[edge]
    before += reached[last - 1] if last else 0.0
    keep[edge[before < mass]] = True
    return keep
