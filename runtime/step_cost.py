"""How long a step takes, learnt from the steps that ran.

seconds = base + few * min(tokens, 16) + token * tokens + row * logit rows + read * KV tokens read,
all >= 0. A step of few tokens is bound by reading the weights (base) and by kernels for single
tokens (few), one of many by arithmetic (token), and attention by the cache (read).
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
        reads: cached and new tokens that each new token attends to, summed.
    """

    tokens: int
    rows: int
    reads: int

    def plus(self, count: int, start: int) -> StepShape:
        """This shape with `count` tokens of a prompt from position `start` on."""
        return StepShape(self.tokens + count, self.rows, self.reads + reads(count, start))


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
        read: of each token read from the cache.
        few: of each of the first `FEW` tokens, besides.
    """

    base: float
    token: float
    row: float
    read: float
    few: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Predicted time of a step."""
        tokens = self.token * shape.tokens + self.few * min(shape.tokens, FEW)
        return self.base + tokens + self.row * shape.rows + self.read * shape.reads


class CostModel:
    """Fits `StepCost` to what is observed.

    Args:
        cost: to begin with; None = nothing is known.
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self._cost = cost
        self._samples = {mixed: deque[tuple[StepShape, float]](maxlen=SAMPLES) for mixed in (0, 1)}
        self._unused = 0

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


def fit(samples: Iterable[tuple[StepShape, float]]) -> StepCost:
    """The costs >= 0 of least squared relative error, outliers counting for less.

    Args:
        samples: steps and their seconds, at least one.
    """
    pairs = list(samples)
    seconds = np.array([max(s, 1e-9) for _, s in pairs])
    features = np.array(
        [(1, s.tokens, s.rows, s.reads, min(s.tokens, FEW)) for s, _ in pairs], float
    )
    # Relative to what is predicted: relative to what was measured, slow steps would count for less
    # and the whole be foretold too fast.
    scale, weights = seconds, np.ones(len(pairs))
    for _ in range(5):
        found = _non_negative(features * (weights / scale)[:, None], seconds * weights / scale)
        scale = np.maximum(features @ found, 1e-9)
        error = np.abs(seconds / scale - 1)
        weights = np.sqrt(1 / np.maximum(1, error / TOLERATED))
    return StepCost(*found.tolist())


def _non_negative(
    features: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares with the most negative coefficient set to 0 until none is left, ``[5]``."""
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
