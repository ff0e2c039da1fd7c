"""How long a step takes, learnt from the steps that ran.

seconds = base + few * min(tokens, 16) + token * tokens + row * logit rows + read * KV tokens read
+ chunk_read * KV tokens read by chunks, all >= 0. A step of few tokens is bound by reading the
weights (base) and by kernels for single tokens (few), one of many by arithmetic (token); attention
reads the cache for each single token (read), but for a chunk's tokens together (chunk_read).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLES = 128  # of either kind: steps with and without prompt chunks
REFIT_EVERY = 16  # steps
FIRST_FIT = 8
# Beyond this relative error a step counts for less: it was held up (by another process, say).
TOLERATED = 0.5
FEW = 16


@dataclass(frozen=True)
class StepShape:
    """What a step's time depends on.

    Attributes:
        tokens: new tokens.
        rows: tokens whose logits are wanted.
        reads: cached and new tokens that each token which is its sequence's only one attends to,
            summed.
        chunk_reads: the same of all other tokens.
    """

    tokens: int
    rows: int
    reads: int
    chunk_reads: int = 0

    @classmethod
    def of(cls, parts: Iterable[tuple[int, int]], rows: int) -> StepShape:
        """The shape of a step.

        Args:
            parts: of each sequence, how many new tokens and the position of the first.
            rows: see the class.
        """
        tokens, read = 0, [0, 0]
        for count, start in parts:  # of every step, maybe dozens: no object for each
            tokens += count
            read[count > 1] += reads(count, start)
        return cls(tokens, rows, *read)

    def plus(self, count: int, start: int) -> StepShape:
        """This shape and one more sequence's `count` tokens from position `start` on."""
        one = StepShape.of([(count, start)], self.rows)
        return StepShape(
            self.tokens + one.tokens,
            self.rows,
            self.reads + one.reads,
            self.chunk_reads + one.chunk_reads,
        )


def reads(count: int, start: int) -> int:
    """Tokens that `count` new ones from position `start` on attend to, summed."""
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a constant, and per token, logit row and token read from the cache.

    Attributes:
        base: of any step.
        token: of each token.
        row: of each logit row.
        read: of each token read from the cache, for a token alone.
        chunk_read: of each token read from the cache, for a token among others of its sequence.
        few: of each of the first `FEW` tokens, besides.
    """

    base: float
    token: float
    row: float
    read: float
    chunk_read: float
    few: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Predicted time of a step."""
        tokens = self.token * shape.tokens + self.few * min(shape.tokens, FEW)
        attention = self.read * shape.reads + self.chunk_read * shape.chunk_reads
        return self.base + tokens + self.row * shape.rows + attention


class CostModel:
    """Fits `StepCost` to what is observed.

    Args:
        cost: to begin with; None = nothing is known.

    Attributes:
        widest: most tokens of a step that was observed; what is said of far wider ones is a guess.
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self._cost = cost
        self._samples = {mixed: deque[tuple[StepShape, float]](maxlen=SAMPLES) for mixed in (0, 1)}
        self._unused = 0
        self.widest = 0

    @property
    def cost(self) -> StepCost | None:
        """What is known by now. Fitted when asked for: most steps decode, and nobody asks then."""
        due = FIRST_FIT if self._cost is None else REFIT_EVERY
        if self._unused >= due:
            self._unused = 0
            self._cost = fit([*self._samples[0], *self._samples[1]])
        return self._cost

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that ran."""
        self._samples[shape.tokens > shape.rows].append((shape, seconds))
        self._unused += 1
        if shape.tokens > self.widest:
            self.widest = shape.tokens
            if self._cost is not None:
                self._unused = REFIT_EVERY  # it tells most of all: no waiting for others


def fit(samples: Iterable[tuple[StepShape, float]]) -> StepCost:
    """The costs >= 0 of least squared relative error, outliers counting for less.

    Args:
        samples: steps and their seconds, at least one.
    """
    pairs = list(samples)
    seconds = np.array([max(s, 1e-9) for _, s in pairs])
    features = np.array([_features(shape) for shape, _ in pairs], float)
    # Relative to what is predicted: relative to what was measured, slow steps would count for less
    # and the whole be foretold too fast.
    scale, weights = seconds, np.ones(len(pairs))
    for _ in range(5):
        found = _non_negative(features * (weights / scale)[:, None], seconds * weights / scale)
        scale = np.maximum(features @ found, 1e-9)
        error = np.abs(seconds / scale - 1)
        weights = np.sqrt(1 / np.maximum(1, error / TOLERATED))
    return StepCost(*found.tolist())


def _features(shape: StepShape) -> tuple[int, ...]:
    """What the fields of `StepCost` are multiplied by."""
    few = min(shape.tokens, FEW)
    return 1, shape.tokens, shape.rows, shape.reads, shape.chunk_reads, few


def _non_negative(
    features: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares with the most negative coefficient set to 0 until none is left."""
    free = list(range(features.shape[1]))
    found = np.zeros(features.shape[1])
    scale = np.maximum(np.abs(features).max(0), 1e-300)  # reads are thousands, the constant is one
    while free:
        part = np.linalg.lstsq(features[:, free] / scale[free], wanted, rcond=1e-6)[0]
        if part.min() >= 0:
            found[free] = part / scale[free]
            break
        del free[int(part.argmin())]
    return found
