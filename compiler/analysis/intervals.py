"""Interval analysis: what every element of every value is bound by, from op semantics and weights.

One sweep in topological order, one rule per op; an op without a rule bounds nothing. A row of an
RMS norm has length sqrt(n) whatever its input, a softmax lies in [0, 1], attention is a convex
combination of values, a rotation keeps lengths, and a linear layer stretches a row at most by its
matrix' Frobenius norm: from these, bounds hold through a whole model without running it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..ir import Constant, Dim, DType, Graph, Node, Operand, Shape, SymDim, Users, Value, attribute
from .bounds import (
    EMPTY,
    INF,
    Bound,
    inverse,
    multiply,
    plus,
    product,
    rising,
    symmetric,
    valley,
)
from .weights import Norms, Weights

GELU_BOTTOM, GELU_LEAST = -0.7518, -0.1701
SILU_BOTTOM, SILU_LEAST = -1.2785, -0.2785


@dataclass(frozen=True)
class Facts:
    """What rules may ask besides their operands' bounds.

    Args:
        weights: norms of constants.
        longest: no symbolic dimension is larger.
    """

    weights: Weights
    longest: int

    def size(self, dim: Dim) -> float:
        """An upper bound of a dimension."""
        if not isinstance(dim, SymDim):
            return dim
        if "-" in str(dim):  # a negative coefficient, also inside of a minimum
            return INF
        return dim.evaluate(dict.fromkeys(dim.symbols, self.longest))

    def norms(self, operand: Operand) -> Norms | None:
        """Norms of a constant operand; None for anything else, or if its values are unknown."""
        return self.weights.of(operand) if isinstance(operand, Constant) else None


Rule = Callable[[Node, list[Bound], Facts], Bound]


def intervals(
    graph: Graph, weights: Weights, longest: int, inputs: Mapping[str, Bound]
) -> dict[int, Bound]:
    """Bounds of every value, by id.

    Args:
        longest: tokens of one sequence; no symbolic dimension is larger.
        inputs: bounds of graph inputs by name; others are unbounded, but a KV past: it holds what
            earlier steps wrote, so it adds nothing to the step's own rows.
    """
    facts = Facts(weights, longest)
    past = _appended_pasts(graph)
    found = {
        id(v): EMPTY if id(v) in past else inputs.get(v.name, Bound()).closed(_width(v.shape))
        for v in graph.inputs
    }
    for node in graph.nodes:
        operands = [_operand(o, found, facts) for o in node.operands]
        rule = RULES.get(node.op)
        bound = rule(node, operands, facts) if rule else Bound()
        for index, value in enumerate(node.results):
            own = bound if index == 0 else _later_result(node, index, operands, facts)
            found[id(value)] = _sound(own).closed(_width(value.shape))
    return found


def _appended_pasts(graph: Graph) -> set[int]:
    """Pasts of states whose only use is the concatenation with the new rows."""
    users = Users(graph)
    return {
        id(s.input)
        for s in graph.states.values()
        if s.input is not None
        and s.kind == "kv"
        and (node := users.only(s.input)) is not None
        and node.op == "concat"
        and node.results[0] is s.output
    }


def _operand(operand: Operand, found: dict[int, Bound], facts: Facts) -> Bound:
    if isinstance(operand, Value):
        return found[id(operand)]
    if isinstance(operand, Constant):
        norms = facts.norms(operand)
        return norms.bound if norms else Bound()
    return Bound(float(operand), float(operand))


def _sound(bound: Bound) -> Bound:
    """inf - inf and the like say nothing."""
    if math.isnan(bound.low) or math.isnan(bound.high):
        return Bound(norm=bound.norm)
    return Bound(bound.low, bound.high, INF if math.isnan(bound.norm) else bound.norm)


def _width(shape: Shape) -> Dim:
    return shape[-1] if shape else 1


def _shape(operand: Operand) -> Shape:
    return operand.shape if isinstance(operand, Value | Constant) else ()


def _row_norm(node: Node, index: int, bound: Bound) -> float:
    """Norm of operand `index`'s rows after it is broadcast to the result's shape."""
    width, own = _width(node.result.shape), _width(_shape(node.operands[index]))
    if own == width:
        return bound.norm
    return product(math.sqrt(width), bound.magnitude) if isinstance(width, int) else INF


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
    return Bound(both.low, both.high, _row_norm(node, 0, xs[0]) + _row_norm(node, 1, xs[1]))


def _sub(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """x minus its own maximum, as softmax shifts, is never positive."""
    bound = _add(node, [xs[0], xs[1].times(-1)], facts)
    taken = node.operands[1]
    top = computed_by(taken) if isinstance(taken, Value) else None
    own = top is not None and top.op == "amax" and top.operands[0] is node.operands[0]
    return bound.meet(Bound(high=0.0)) if own else bound


def computed_by(value: Value) -> Node | None:
    """The node that computed a value's elements, not the ones that only moved them."""
    node = value.node
    while node is not None and node.op in ("reshape", "expand"):
        node = node.value(0).node
    return node


def _mul(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    a, b = xs
    if node.operands[0] is node.operands[1]:
        return _power(a, 2)
    both = multiply(a, b)
    norms = (
        product(_row_norm(node, 0, a), b.magnitude),
        product(_row_norm(node, 1, b), a.magnitude),
    )
    return Bound(both.low, both.high, min(norms))


def _div(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    under = inverse(xs[1])
    both = multiply(xs[0], under)
    return Bound(both.low, both.high, product(_row_norm(node, 0, xs[0]), under.magnitude))


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
    return rising(_sound(_div(node, xs, facts)), _floor)


def _floor(x: float) -> float:
    return float(math.floor(x)) if math.isfinite(x) else x


def _truth(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(0.0, 1.0)


def _where(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    # A row may take elements of both.
    both = xs[1].join(xs[2])
    return Bound(both.low, both.high, _row_norm(node, 1, xs[1]) + _row_norm(node, 2, xs[2]))


def _clamp(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    low, high = attribute(node, "low"), attribute(node, "high")
    low, high = (-INF if low is None else low), (INF if high is None else high)
    return Bound(*(min(max(end, low), high) for end in (xs[0].low, xs[0].high)))


def _cast(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    if node.result.dtype is DType.BOOL:
        return Bound(0.0, 1.0)
    return xs[0] if node.result.dtype.is_float else xs[0].without_norm()


def _reduced_length(node: Node, facts: Facts) -> float:
    shape = node.tensor(0).shape
    return facts.size(shape[attribute(node, "axis")])


def _sum(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].times(_reduced_length(node, facts)).without_norm()


def _mean(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].without_norm()


def _cumsum(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0].join(xs[0].times(_reduced_length(node, facts))).without_norm()


def _argmax(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return Bound(0.0, max(_reduced_length(node, facts) - 1, 0.0))


def _later_result(node: Node, index: int, xs: list[Bound], facts: Facts) -> Bound:
    """Of ops with several: topk's second is an index."""
    if node.op == "qkv":
        return _qkv(node, xs, facts, index)
    return _argmax(node, [], facts) if node.op == "topk" else Bound()


def _softmax(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    last = attribute(node, "axis") in (-1, node.result.type.rank - 1)
    return Bound(0.0, 1.0, 1.0 if last else INF)


def _reshape(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """A row that is cut into equal pieces bounds each of them."""
    old, new = _width(node.tensor(0).shape), _width(node.result.shape)
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
    return Bound(xs[0].low, xs[0].high, _row_norm(node, 0, xs[0]))


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
    inner = facts.size(_width(node.tensor(0).shape))
    column = product(math.sqrt(inner), xs[1].magnitude)
    return symmetric(product(xs[0].norm, column))


def _stretched(x: Bound, weight: Norms | None) -> Bound:
    if weight is None:
        return Bound()
    return symmetric(product(x.norm, weight.bound.norm), product(x.norm, weight.frobenius))


def _linear(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return _with_bias(_stretched(xs[0], facts.norms(node.operands[1])), xs[2:])


def _qkv(node: Node, xs: list[Bound], facts: Facts, index: int = 0) -> Bound:
    """Three linear layers on one x."""
    bias = xs[4:][index : index + 1]
    return _with_bias(_stretched(xs[0], facts.norms(node.operands[1 + index])), bias)


def _with_bias(bound: Bound, rest: list[Bound]) -> Bound:
    for term in rest:
        bound = plus(bound, term)
    return bound


def _embedding(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0]


def _rms_norm(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """Rows of length sqrt(n) at most; tiny inputs stay below |x| / sqrt(eps)."""
    width = _width(node.result.shape)
    longest = math.sqrt(width) if isinstance(width, int) else INF
    eps = float(attribute(node, "eps"))
    shrunk = xs[0].norm / math.sqrt(eps) if eps > 0 else INF
    scale = plus(xs[1], Bound(*[float(attribute(node, "offset"))] * 2)) if xs[1:] else Bound(1, 1)
    return symmetric(INF, product(min(longest, shrunk), scale.magnitude))


def _layer_norm(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    width = _width(node.result.shape)
    longest = math.sqrt(width) if isinstance(width, int) else INF
    scale = xs[1].magnitude if xs[1:] else 1.0
    return _with_bias(symmetric(product(longest, scale), product(longest, scale)), xs[2:])


def _rope(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """Pairs turn: sqrt(2) of an element at most, and rows keep their length.

    A table that is not seen to be cosine and sine of the same angle may do both at once.
    """
    x, cos, sin = xs
    turned = _rotation_scale(node)
    if turned is None:
        reach = cos.magnitude + sin.magnitude
        return symmetric(product(max(reach, 1.0), min(x.magnitude, x.norm)))
    reach = max(turned, 1.0)
    element = min(product(math.sqrt(2), x.magnitude), x.norm)
    return symmetric(product(reach, element), product(reach * math.sqrt(2), x.norm))


def _rotation_scale(node: Node) -> float | None:
    """s if the tables are s cos(a) and s sin(a) of one angle."""
    cos, sin = _table_root(node.value(1), "cos"), _table_root(node.value(2), "sin")
    if cos is None or sin is None or cos[0] is not sin[0] or cos[1] != sin[1]:
        return None
    return cos[1]


def _table_root(value: Value, op: str) -> tuple[Operand, float] | None:
    scale = 1.0
    while value.node is not None and value.node.op != op:
        node = value.node
        if node.op == "mul" and isinstance(node.operands[1], int | float):
            scale *= abs(node.operands[1])
        elif node.op not in ("reshape", "expand", "transpose", "cast", "index_select"):
            return None
        if not isinstance(node.operands[0], Value):
            return None
        value = node.operands[0]
    return (value.node.operands[0], scale) if value.node is not None else None


def _attention(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """A convex combination of the values' rows; with sinks, of zero too."""
    sinks = len(xs) > (7 if node.op == "paged_attention" else 3)
    return xs[2].join(Bound(0.0, 0.0, 0.0)) if sinks else xs[2]


def _gated_mlp(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """|act(g)| <= |g| (its square for relu2), and products of the rows' norms for g * u."""
    gate, up, down = (facts.norms(o) for o in node.operands[1:4])
    if gate is None or up is None or down is None:
        return Bound()
    power = 2 if attribute(node, "activation") == "relu2" else 1
    biases, rest = (xs[4:6], xs[6:]) if attribute(node, "biases") else ([], xs[4:])
    if xs[0].norm >= 1e100:
        return Bound()
    rows = [weight.rows.double() * xs[0].norm for weight in (gate, up)]
    for row, bias in zip(rows, biases, strict=False):
        row += bias.magnitude
    length = torch.linalg.vector_norm(rows[0] ** power * rows[1]).item()
    return _with_bias(_stretched(symmetric(INF, length), down), rest)


def _route(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """Shares of at most one, but for raw logits."""
    share = attribute(node, "scores") != "none" or attribute(node, "softmax_chosen")
    return Bound(0.0, 1.0).times(float(attribute(node, "scale"))) if share else Bound()


def _unbounded(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    """Nothing is proven: observation decides."""
    return Bound()


def _same(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return xs[0]


RULES: dict[str, Rule] = {
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
    "sum": _sum,
    "mean": _mean,
    "amax": _mean,
    "argmax": _argmax,
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
    "linear": _linear,
    "qkv": _qkv,
    "linear_residual": lambda node, xs, facts: plus(
        _linear(node, [xs[0], xs[1], *xs[3:]], facts), xs[2]
    ),
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "attention": _attention,
    "paged_attention": _attention,
    "kv_append": _same,
    "gated_mlp": _gated_mlp,
    "route": _route,
    "moe": _unbounded,
}
