"""Log probabilities as the model gave them, before temperature, penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .logits import best_tokens
from .softmax import Rows, totals

FloatRow = NDArray[np.float32]


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model found a token.

    Attributes:
        token_id: the token that was chosen, or stands in the prompt.
        logprob: natural logarithm of its probability.
        rank: 1 = the most likely; equal ones share the smaller rank.
        top: the most likely tokens and their log probabilities, best first; as many as asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(rows: Rows, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log probabilities of one token of each row.

    Args:
        rows: R rows of logits, float32 ``[V]``, each with a finite best one.
        tokens: R ids.
        counts: how many of the most likely tokens are wanted with each.
    """
    if not len(rows):
        return []
    peaks = np.array([row.max() for row in rows], np.float32)
    wholes = peaks + np.log(totals(rows, peaks))
    return [
        _one(row, float(whole), token, count)
        for row, whole, token, count in zip(rows, wholes, tokens, counts, strict=True)
    ]


def _one(row: FloatRow, whole: float, token: int, count: int) -> TokenLogprob:
    rank = 1 + int(np.count_nonzero(row > row[token]))
    top = tuple((best, float(row[best]) - whole) for best in best_tokens(row, count))
    return TokenLogprob(token, float(row[token]) - whole, rank, top)
