"""Entropy-bounded sampling: the highest temperature whose distribution has at most so many bits.

Entropy falls as the distribution gets sharper: with weights w = exp(y), y = s * (logit - peak) and
s the sharpness, dH / d(ln s) = -Var(y). So the sharpness is found by Newton's method in ln s, kept
inside a bracket by bisection. (Dividing the logits by entropy / limit, as one reads now and then,
*raises* the entropy where it is too high.)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FloatRows = NDArray[np.float32]
Doubles = NDArray[np.float64]

# How far below its limit an entropy may end, in nats; float32 sums of 262,144 weights carry 1e-5.
TOLERANCE = 2e-4
# exp() of less is no normal float32 any more.
LOWEST = -87.0
# Of ln s in one step: the bracket has no other end until one is found.
LONGEST_STEP = 2.0
# ln s for which float32 still holds s; and brackets that can't get narrower usefully.
HIGHEST = 85.0
SAME = 1e-9


def entropy_bits(rows: FloatRows, sharpness: Doubles | float = 1.0) -> Doubles:
    """Entropy of ``softmax(sharpness * rows)`` in bits, float64 ``[R]``.

    Args:
        rows: logits, finite or -inf, at least one finite in each row, ``[R, V]``.
        sharpness: 1 / temperature, for all or for each row.
    """
    shifted = rows - rows.max(axis=1, keepdims=True)
    nats, _ = _entropy(shifted, np.broadcast_to(np.asarray(sharpness, np.float64), len(rows)))
    return nats / math.log(2)


def bounded_sharpness(shifted: FloatRows, sharpness: Doubles, bits: Doubles) -> Doubles:
    """The sharpness, raised as little as it takes to have no more entropy than allowed.

    Args:
        shifted: logits less their row's best one, float32 ``[R, V]``.
        sharpness: 1 / temperature asked for, ``[R]``.
        bits: the limits, >= 0, ``[R]``.

    Returns:
        float64 ``[R]``: unchanged where the entropy is within its limit already; inf where no
        temperature is low enough (several best tokens are equal): then the first is to be taken.
    """
    limit = bits * math.log(2)
    found = sharpness.copy()
    nats, variance = _entropy(shifted, sharpness)
    active = np.flatnonzero(nats > limit)
    found[active] = np.inf
    active = active[limit[active] > TOLERANCE]
    low = np.log(sharpness[active])
    high = np.full_like(low, np.inf)
    point = _next_point(low, low, high, (nats - limit)[active], variance[active])
    while active.size:
        nats, variance = _entropy(shifted[active], np.exp(point))
        excess = nats - limit[active]
        within = excess <= 0
        found[active[within]] = np.exp(point[within])
        low, high = np.where(within, low, point), np.where(within, point, high)
        point = _next_point(point, low, high, excess, variance)
        left = ~(within & (excess >= -TOLERANCE)) & (high - low > SAME) & (point < HIGHEST)
        active, low, high, point = active[left], low[left], high[left], point[left]
    return found


def _entropy(shifted: FloatRows, sharpness: Doubles) -> tuple[Doubles, Doubles]:
    """Entropies in nats and variances of ln w, float64 ``[R]`` each."""
    scaled = shifted * sharpness.astype(np.float32)[:, None]
    np.maximum(scaled, np.float32(LOWEST), out=scaled)
    weights = np.exp(scaled)
    total = weights.sum(axis=1).astype(np.float64)
    weights *= scaled
    mean = weights.sum(axis=1) / total
    weights *= scaled
    variance = weights.sum(axis=1) / total - mean**2
    return np.log(total) - mean, variance


def _next_point(
    point: Doubles, low: Doubles, high: Doubles, excess: Doubles, variance: Doubles
) -> Doubles:
    """Newton's step where it stays inside the bracket, else its middle (or a long step up)."""
    step = np.full_like(point, np.inf)
    np.divide(excess + TOLERANCE / 2, variance, out=step, where=variance > 0)
    newton, ceiling = point + step, np.where(np.isinf(high), low + LONGEST_STEP, high)
    fallback = np.where(np.isinf(high), ceiling, (low + ceiling) / 2)
    return np.where((newton > low) & (newton < ceiling), newton, fallback)
