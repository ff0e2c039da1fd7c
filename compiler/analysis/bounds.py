"""What is known of every element of a value: an interval, and the norm of its rows.

Bounds are over real numbers: they hold for every admissible input (any token, any position) and
any content of a cache that the graph itself wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ir import Dim

INF = math.inf


@dataclass(frozen=True)
class Bound:
    """Every element lies in [low, high]; every row (last axis) has an L2 norm of at most `norm`.

    An interval with low > high is empty: nothing was there yet.
    """

    low: float = -INF
    high: float = INF
    norm: float = INF

    @property
    def magnitude(self) -> float:
        """The largest absolute value; 0 for the empty interval."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    @property
    def is_bounded(self) -> bool:
        """Whether the interval says anything."""
        return self.magnitude < INF

    def join(self, other: Bound) -> Bound:
        """Holds for elements of either."""
        if self.low > self.high or other.low > other.high:
            return other if self.low > self.high else self
        return Bound(
            min(self.low, other.low), max(self.high, other.high), max(self.norm, other.norm)
        )

    def meet(self, other: Bound) -> Bound:
        """Both hold."""
        return Bound(
            max(self.low, other.low), min(self.high, other.high), min(self.norm, other.norm)
        )

    def closed(self, width: Dim) -> Bound:
        """Interval and norm tightened by each other; `width` is the length of a row."""
        low, high = max(self.low, -self.norm), min(self.high, self.norm)
        if not isinstance(width, int):
            return Bound(low, high, self.norm)
        return Bound(low, high, min(self.norm, product(math.sqrt(width), magnitude(low, high))))

    def times(self, factor: float) -> Bound:
        """Every element multiplied."""
        ends = (product(self.low, factor), product(self.high, factor))
        return Bound(min(ends), max(ends), product(self.norm, abs(factor)))

    def without_norm(self) -> Bound:
        """The interval alone."""
        return replace(self, norm=INF)


EMPTY = Bound(INF, -INF, 0.0)


def symmetric(limit: float, norm: float = INF) -> Bound:
    """[-limit, limit]; an unknown limit (NaN, from inf - inf) is no limit."""
    limit = INF if math.isnan(limit) else limit
    return Bound(-limit, limit, INF if math.isnan(norm) else norm)


def magnitude(low: float, high: float) -> float:
    """The largest absolute value between two ends."""
    return max(abs(low), abs(high))


def product(a: float, b: float) -> float:
    """a * b where zero times infinity is zero: an element is a number, however large."""
    return 0.0 if a == 0 or b == 0 else a * b


def plus(a: Bound, b: Bound) -> Bound:
    """Sum of elements."""
    return Bound(a.low + b.low, a.high + b.high, a.norm + b.norm)


def multiply(a: Bound, b: Bound) -> Bound:
    """Product of elements; norms are the caller's."""
    ends = [product(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Bound(min(ends), max(ends))


def inverse(x: Bound) -> Bound:
    """1 / x; unbounded if the interval holds zero."""
    if x.low <= 0 <= x.high:
        at_zero = Bound(1 / x.high if x.high else -INF, INF) if x.low == 0 else Bound()
        return at_zero if x.high > 0 else Bound()
    return Bound(1 / x.high, 1 / x.low)


def rising(x: Bound, function: Callable[[float], float]) -> Bound:
    """A function that never falls, at both ends."""
    return Bound(function(x.low), function(x.high))


def valley(x: Bound, function: Callable[[float], float], bottom: float, least: float) -> Bound:
    """A function that falls to `least` near `bottom` and rises after it, such as silu."""
    ends = (function(x.low), function(x.high))
    low = least if x.low <= bottom <= x.high else min(ends)
    return Bound(low, max(ends))
