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

# Nucleus search looks at this many best tokens first; a full sort is the rare case.
FIRST_CANDIDATES = 256


@dataclass(frozen=True)
class Candidates:
    """Tokens left after filtering, most probable first.

    Attributes:
        ids: token ids, int64 ``[C]``; equal probabilities in ascending id order.
        probs: their probabilities, float64 ``[C]``, summing to 1.
    """

    ids: IdRow
    probs: NDArray[np.float64]


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
        The surviving ids with renormalised probabilities; never empty.
    """
    scaled = row.astype(np.float32) / np.float32(temperature)
    weights = np.exp(scaled - scaled.max(), dtype=np.float32)
    ids = _top_k_ids(scaled, top_k)
    if top_p < 1.0:
        ids = _nucleus(weights, ids, top_p)
    elif ids is None:
        ids = np.arange(row.size, dtype=np.int64)
    kept = weights[ids].astype(np.float64)
    if min_p > 0.0:
        strong = kept >= min_p  # the best token's weight is exactly 1
        ids, kept = ids[strong], kept[strong]
    return Candidates(ids, kept / kept.sum())


def _top_k_ids(scaled: FloatRow, top_k: int) -> IdRow | None:
    """Ids of the k best (and of ties with the last), best first; None when top-k is off."""
    if top_k <= 0 or top_k >= scaled.size:
        return None
    threshold = np.partition(scaled, scaled.size - top_k)[scaled.size - top_k]
    return _best_first(scaled, np.flatnonzero(scaled >= threshold))


def _nucleus(weights: FloatRow, ids: IdRow | None, top_p: float) -> IdRow:
    """The fewest best ids whose mass reaches `top_p` of the mass of `ids` (None = all), best first.

    A token stays when the mass strictly before it is below `top_p`: the rule of transformers'
    TopPLogitsWarper read from the other end.
    """
    if ids is not None:
        return ids[: _nucleus_size(weights[ids], float(weights[ids].sum(dtype=np.float64)), top_p)]
    total = float(weights.sum(dtype=np.float64))
    if weights.size > FIRST_CANDIDATES:
        first = weights.size - FIRST_CANDIDATES
        threshold = np.partition(weights, first)[first]
        best = _best_first(weights, np.flatnonzero(weights >= threshold))
        size = _nucleus_size(weights[best], total, top_p)
        if size < best.size:
            return best[:size]
    everything = _best_first(weights, np.arange(weights.size, dtype=np.int64))
    return everything[: _nucleus_size(weights[everything], total, top_p)]


def _nucleus_size(sorted_weights: FloatRow, total: float, top_p: float) -> int:
    """How many leading tokens have less than ``top_p * total`` before them; at least 1."""
    before = np.cumsum(sorted_weights, dtype=np.float64)[:-1]
    return 1 + int(np.searchsorted(before, top_p * total, side="left"))


def _best_first(values: FloatRow, ids: IdRow) -> IdRow:
    """`ids` by falling value; equal values keep ascending ids, so the order is one of a kind."""
    return ids[np.argsort(-values[ids], kind="stable")]
