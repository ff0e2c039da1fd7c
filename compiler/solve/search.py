"""One format for every matrix: the fewest bytes under a KL, or the least KL in a number of bytes.

KL adds up over matrices, so this is a knapsack with one choice per matrix. Lagrange's relaxation
solves it exactly at some points: give each matrix its smallest option, then take the steps along
every curve's lower convex hull in order of KL saved per byte. Every state on the way is the best
there is for its bytes (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of
quantizers", 1988). Between two such states the rest of the budget is filled by single exchanges,
options off the hull included; what is lost against the optimum is less than one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from .candidates import Curve, Option


@dataclass(frozen=True)
class Selection:
    """An option for every curve, in their order."""

    names: tuple[str, ...]
    options: tuple[Option, ...]

    @property
    def bytes(self) -> int:
        """Of all matrices."""
        return sum(option.bytes for option in self.options)

    @property
    def kl(self) -> float:
        """Predicted, in nats."""
        return fsum(option.kl for option in self.options)

    @property
    def formats(self) -> dict[str, str]:
        """Format by matrix name."""
        return {n: o.format for n, o in zip(self.names, self.options, strict=True)}

    @property
    def summary(self) -> dict[str, int]:
        """How many matrices have each format."""
        return dict(sorted(Counter(option.format for option in self.options).items()))

    @property
    def shares(self) -> dict[str, float]:
        """Each matrix's share of the predicted KL, to four digits."""
        whole = self.kl
        named = zip(self.names, self.options, strict=True)
        return {n: float(f"{o.kl / whole:.4g}") if whole else 0.0 for n, o in named}


def frontier(curves: Sequence[Curve]) -> list[Selection]:
    """Every state on the convex hull of the whole model, smallest first."""
    steps = []
    for index, curve in enumerate(curves):
        hull = _hull(curve.options)
        for before, after in pairwise(hull):
            gain = (before.kl - after.kl) / (after.bytes - before.bytes)
            steps.append((-gain, index, after))
    steps.sort(key=lambda step: step[:2])  # stable: a curve's own steps stay in order
    current = [curve.options[0] for curve in curves]
    names = tuple(curve.name for curve in curves)
    states = [Selection(names, tuple(current))]
    for _, index, option in steps:
        current[index] = option
        states.append(Selection(names, tuple(current)))
    return states


def smallest(curves: Sequence[Curve], max_kl: float) -> Selection | None:
    """The fewest bytes with a predicted KL of at most `max_kl`; None if nothing reaches it."""
    return _solved(curves, lambda size, kl: (size, kl), lambda _, kl: kl <= max_kl, up=True)


def best(curves: Sequence[Curve], max_bytes: int) -> Selection | None:
    """The least predicted KL in at most `max_bytes`; None if nothing is that small."""
    return _solved(curves, lambda size, kl: (kl, size), lambda size, _: size <= max_bytes, up=False)


Allowed = Callable[[int, float], bool]
Cost = Callable[[int, float], tuple[float, float]]
"""Both of bytes and KL."""


def _solved(curves: Sequence[Curve], cost: Cost, allowed: Allowed, up: bool) -> Selection | None:
    """The cheapest allowed selection found from the frontier, walked from its small end if `up`.

    Where the frontier enters what is allowed, one matrix takes a step. It may be a large one (an
    embedding), so each of its options is tried with the others solved around it.
    """
    before, start = _entry(frontier(curves), allowed, up)
    if start is None:
        return None
    starts = [start]
    if before is not None:
        nearer = _exchange(curves, before, cost, allowed)
        starts += [nearer] if nearer is not None else []
        pairs = zip(before.options, start.options, strict=True)
        step = next(i for i, (a, b) in enumerate(pairs) if a is not b)
        for option in curves[step].options:
            fixed = [*curves[:step], Curve(curves[step].name, (option,)), *curves[step + 1 :]]
            _, found = _entry(frontier(fixed), allowed, up)
            starts += [found] if found is not None else []
    ends = [_descend(curves, s, cost, allowed) for s in starts]
    return min(ends, key=lambda s: cost(s.bytes, s.kl))


def _entry(
    states: Sequence[Selection], allowed: Allowed, up: bool
) -> tuple[Selection | None, Selection | None]:
    """The state before the first allowed one, and that; None where there is none."""
    ordered = states if up else states[::-1]
    index = next((i for i, s in enumerate(ordered) if allowed(s.bytes, s.kl)), None)
    if index is None:
        return None, None
    return ordered[index - 1] if index else None, ordered[index]


def _hull(options: Sequence[Option]) -> list[Option]:
    """Lower convex hull of (bytes, KL), from the fewest bytes on."""
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and not _turns(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _turns(a: Option, b: Option, c: Option) -> bool:
    """Whether b lies below the line from a to c."""
    return (b.kl - a.kl) * (c.bytes - a.bytes) < (c.kl - a.kl) * (b.bytes - a.bytes)


def _descend(curves: Sequence[Curve], start: Selection, cost: Cost, allowed: Allowed) -> Selection:
    """Exchanges from an allowed selection, the best one each time, until none helps."""
    current = start
    while True:
        found = _exchange(curves, current, cost, allowed)
        if found is None or cost(found.bytes, found.kl) >= cost(current.bytes, current.kl):
            return current
        current = found


def _exchange(
    curves: Sequence[Curve], start: Selection, cost: Cost, allowed: Allowed
) -> Selection | None:
    """The cheapest allowed selection that differs from `start` in one matrix."""
    size, kl = start.bytes, start.kl
    found: tuple[tuple[float, float], int, Option] | None = None
    for index, (curve, now) in enumerate(zip(curves, start.options, strict=True)):
        for option in curve.options:
            after = size - now.bytes + option.bytes, kl - now.kl + option.kl
            if option is now or not allowed(*after):
                continue
            if found is None or cost(*after) < found[0]:
                found = cost(*after), index, option
    if found is None:
        return None
    _, index, option = found
    options = (*start.options[:index], option, *start.options[index + 1 :])
    return Selection(start.names, options)
