"""Logits changed by what came before: repetition, presence and frequency penalties.

Semantics: transformers' RepetitionPenaltyLogitsProcessor, and the OpenAI API's presence and
frequency penalties on generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatRow = NDArray[np.float32]
IdRow = NDArray[np.int64]


class TokenCounts:
    """Distinct token ids and how often each came, as arrays that grow."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        self._size = ids.size
        self._places = {int(token): place for place, token in enumerate(ids)}
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.concatenate([counts, np.zeros(64, np.int64)])

    @property
    def ids(self) -> IdRow:
        """Distinct ids, int64 ``[N]``."""
        return self._ids[: self._size]

    @property
    def counts(self) -> IdRow:
        """How often each of `ids` came, int64 ``[N]``."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one more."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


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
