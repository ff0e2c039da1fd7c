"""Rules of interval analysis: ops that compute each element by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..ir import Constant, DType, Node, Value, attribute
from .bounds import (
    INF,
    Bound,
    inverse,
    multiply,
    plus,
    product,
    rising,
    valley,
)
from .interval_facts import Facts, Rule, computed_by, row_norm, sound

GELU_BOTTOM, GELU_LEAST = -0.7518, -0.1701
SILU_BOTTOM, SILU_LEAST = -1.2785, -0.2785


def _monotone(function: Callable[[float], float]) -> Rule:
    return lambda node, xs, facts: rising(xs[0], function)


def _shrinking(function: Callable[[float], float]) -> Rule:
    """Rises, and |f(x)| <= |x|."""

    def rule(node: Node, xs: list[Bound], facts: Facts) -> Bound:
        ends = rising(xs[0], function)
        return Bound(ends.low, ends.high, xs[0].norm)

    return rule


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else INF


def _log(x: float) -> float:
    return -INF if x <= 0 else math.log(x)


def _root(x: float) -> float:
    return math.sqrt(max(x, 0.0))


def _sigmoid(x: float) -> float:
    return 1 / (1 + _exp(-x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(_exp(-abs(x)))


def _silu(x: float) -> float:
    return 0.0 if x == -INF else product(x, _sigmoid(x))


def _gelu(x: float) -> float:
    return 0.0 if x == -INF else product(x, 0.5 * (1 + math.erf(x / math.sqrt(2))))


def _bowl(function: Callable[[float], float], bottom: float, least: float) -> Rule:
    """silu and gelu: |f(x)| <= |x|, so that rows shrink."""

    def rule(node: Node, xs: list[Bound], facts: Facts) -> Bound:
        bound = valley(xs[0], function, bottom, least)
        return Bound(bound.low, bound.high, xs[0].norm)

    return rule


def _neg(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].times(-1)


def _abs(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    x = xs[0]
    low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Bound(low, x.magnitude, x.norm)


def _rsqrt(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    x = xs[0]
    if x.low < 0 or x.high <= 0:
        return Bound()
    return Bound(1 / math.sqrt(x.high), 1 / math.sqrt(x.low) if x.low else INF)


def _circular(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(-1.0, 1.0)


def _add(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    both = plus(xs[0], xs[1])
    return Bound(both.low, both.high, row_norm(node, 0, xs[0]) + row_norm(node, 1, xs[1]))


def _sub(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """x minus its own maximum, as softmax shifts, is never positive."""
    bound = _add(node, [xs[0], xs[1].times(-1)], facts)
    taken = node.operands[1]
    top = computed_by(taken) if isinstance(taken, Value) else None
    own = top is not None and top.op == "amax" and top.operands[0] is node.operands[0]
    return bound.meet(Bound(high=0.0)) if own else bound


def _mul(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    a, b = xs
    if node.operands[0] is node.operands[1]:
        return _power(a, 2)
    both = multiply(a, b)
    norms = (
        product(row_norm(node, 0, a), b.magnitude),
        product(row_norm(node, 1, b), a.magnitude),
    )
    return Bound(both.low, both.high, min(norms))


def _div(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    under = inverse(xs[1])
    both = multiply(xs[0], under)
    return Bound(both.low, both.high, product(row_norm(node, 0, xs[0]), under.magnitude))


def _power(x: Bound, exponent: float) -> Bound:
    whole = exponent == int(exponent)
    if exponent < 0:
        return inverse(_power(x, -exponent))
    if not whole and x.low < 0:
        return Bound()
    ends = (_raised(x.low, exponent), _raised(x.high, exponent))
    if not whole or exponent % 2:
        return Bound(*ends)
    return Bound(0.0 if x.low <= 0 <= x.high else min(ends), max(ends))


def _raised(x: float, exponent: float) -> float:
    try:
        return float(x**exponent)
    except OverflowError:
        return INF if x > 0 or exponent % 2 == 0 else -INF


def _pow(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    exponent = node.operands[1]
    return Bound() if isinstance(exponent, Value | Constant) else _power(xs[0], float(exponent))


def _maximum(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(max(xs[0].low, xs[1].low), max(xs[0].high, xs[1].high))


def _minimum(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(min(xs[0].low, xs[1].low), min(xs[0].high, xs[1].high))


def _remainder(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    y = xs[1]
    return Bound(min(y.low, 0.0), max(y.high, 0.0))


def _floor_div(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return rising(sound(_div(node, xs, facts)), _floor)


def _floor(x: float) -> float:
    return float(math.floor(x)) if math.isfinite(x) else x


def _truth(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(0.0, 1.0)


def _where(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    # A row may take elements of both.
    both = xs[1].join(xs[2])
    return Bound(both.low, both.high, row_norm(node, 1, xs[1]) + row_norm(node, 2, xs[2]))


def _clamp(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    low, high = attribute(node, "low"), attribute(node, "high")
    low, high = (-INF if low is None else low), (INF if high is None else high)
    return Bound(*(min(max(end, low), high) for end in (xs[0].low, xs[0].high)))


def _cast(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    if node.result.dtype is DType.BOOL:
        return Bound(0.0, 1.0)
    return xs[0] if node.result.dtype.is_float else xs[0].without_norm()


ELEMENT_RULES: dict[str, Rule] = {
    "neg": _neg,
    "abs": _abs,
    "exp": _monotone(_exp),
    "log": _monotone(_log),
    "sqrt": _monotone(_root),
    "rsqrt": _rsqrt,
    "reciprocal": lambda node, xs, facts: inverse(xs[0]),
    "sin": _circular,
    "cos": _circular,
    "tanh": _shrinking(math.tanh),
    "erf": _monotone(math.erf),
    "sigmoid": _monotone(_sigmoid),
    "silu": _bowl(_silu, SILU_BOTTOM, SILU_LEAST),
    "gelu": _bowl(_gelu, GELU_BOTTOM, GELU_LEAST),
    "relu": _shrinking(lambda x: max(x, 0.0)),
    "softplus": _monotone(_softplus),
    "floor": _monotone(_floor),
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "floor_div": _floor_div,
    "remainder": _remainder,
    "maximum": _maximum,
    "minimum": _minimum,
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"), _truth
    ),
    "where": _where,
    "clamp": _clamp,
    "cast": _cast,
}
