"""Rules of interval analysis: reductions, and ops that move or pick elements."""

from __future__ import annotations

import math

from ..ir import Node, SymDim, attribute
from .bounds import (
    EMPTY,
    INF,
    Bound,
    product,
    symmetric,
)
from .interval_facts import Facts, Rule, row_norm, row_width


def _reduced_length(node: Node, facts: Facts) -> float:
    shape = node.tensor(0).shape
    return facts.size(shape[attribute(node, "axis")])


def _sum(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].times(_reduced_length(node, facts)).without_norm()


def _mean(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].without_norm()


def _cumsum(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].join(xs[0].times(_reduced_length(node, facts))).without_norm()


def argmax(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(0.0, max(_reduced_length(node, facts) - 1, 0.0))


def _softmax(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    last = attribute(node, "axis") in (-1, node.result.type.rank - 1)
    return Bound(0.0, 1.0, 1.0 if last else INF)


def _reshape(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """A row that is cut into equal pieces bounds each of them."""
    old, new = row_width(node.tensor(0).shape), row_width(node.result.shape)
    if old == new or (isinstance(old, int) and isinstance(new, int) and old % new == 0):
        return xs[0]
    if isinstance(old, int) and isinstance(new, int) and new % old == 0:
        norm = product(math.sqrt(new // old), xs[0].norm)
        return Bound(xs[0].low, xs[0].high, norm)
    return xs[0].without_norm()


def _transpose(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    perm = attribute(node, "perm")
    kept = not perm or perm[-1] in (-1, len(perm) - 1)
    return xs[0] if kept else xs[0].without_norm()


def _expand(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(xs[0].low, xs[0].high, row_norm(node, 0, xs[0]))


def _concat(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    joined = EMPTY
    for x in xs:
        joined = joined.join(x)
    if attribute(node, "axis") in (-1, node.result.type.rank - 1):
        return Bound(joined.low, joined.high, math.sqrt(sum(x.norm**2 for x in xs)))
    return joined


def _picked(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """Elements of x, in other rows."""
    return xs[0].without_norm()


def _index_select(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    rank = node.tensor(0).type.rank
    return xs[0] if attribute(node, "axis") % rank != rank - 1 else xs[0].without_norm()


def _scatter(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].join(xs[2]).without_norm()


def _triangle(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].join(Bound(0.0, 0.0, 0.0))


def _arange(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    start, end, step = (attribute(node, n) for n in ("start", "end", "step"))
    if isinstance(start, SymDim):
        return Bound(0.0, INF) if "-" not in str(start) and step > 0 else Bound()
    least = float(start) if step > 0 else -INF
    return Bound(least, max(least, facts.size(end) - 1) if step > 0 else float(start))


def _full(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    value = attribute(node, "value")
    if isinstance(value, SymDim):
        return Bound(0.0, facts.size(value)) if facts.size(value) < INF else Bound()
    return Bound(float(value), float(value))


def _matmul(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """A row of a times a column of b, by Cauchy and Schwarz; the column by its elements."""
    inner = facts.size(row_width(node.tensor(0).shape))
    column = product(math.sqrt(inner), xs[1].magnitude)
    return symmetric(product(xs[0].norm, column))


def _same(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0]


ROW_RULES: dict[str, Rule] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _mean,
    "argmax": argmax,
    "cumsum": _cumsum,
    "softmax": _softmax,
    "topk": _picked,
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "slice": _same,
    "concat": _concat,
    "index_select": _index_select,
    "gather": _picked,
    "scatter": _scatter,
    "tril": _triangle,
    "triu": _triangle,
    "arange": _arange,
    "full": _full,
    "matmul": _matmul,
}
