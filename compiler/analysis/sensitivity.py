"""First-order rounding analysis: what rounding a value costs at the end of its subpath.

The unit is the format's relative rounding error. Sweeping backwards, an op says how much an error
of its operand moves its result: a *gain* for absolute errors (its Lipschitz constant on the
interval), and a *reach* for the value's own rounding, which is relative: sup |x f'(x)|. They
differ where it matters: exp of a shifted logit x <= 0 has |x| e^x <= 1/e, so shifted logits may be
rounded although they are large; cos of an angle has |x|, so an angle in the thousands may not.

A subpath ends where an axis is contracted (linear, matmul, attention) or normalised: rounding an
operand of W x changes the sum as rounding W by one unit does, which storing W in the format does
anyway (componentwise backward error), and a norm keeps relative errors. There a value's rounding
counts one unit of its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..ir import OPS, Constant, Graph, Kind, Node, Operand, Value, attribute
from .bounds import INF, Bound, product
from .interval_facts import computed_by

CHAIN = 4
"""Ops of a chain that a reason names."""


@dataclass(frozen=True)
class Cost:
    """Of one value.

    Args:
        units: what rounding it moves the end of its subpath by, in units of the end's scale.
        gain: the same per absolute error of one, for errors that come from before it.
        via: ops on the way, the costliest.
        end: identity of the node at the end.
    """

    units: float
    gain: float
    via: tuple[str, ...] = ()
    end: int = 0


@dataclass(frozen=True)
class Step:
    """How one op passes on an operand's error."""

    gain: float
    reach: float


END = Step(1.0, 1.0)
"""A subpath ends here (compared by identity, as is DISCRETE)."""
DISCRETE = Step(INF, INF)
"""A decision (comparison, index, rounding to integers): an error of any size may flip it."""

Through = Callable[[Node, int, "Scales"], Step]


class Scales:
    """Bounds of the operands and results of nodes."""

    def __init__(self, bounds: Mapping[int, Bound]) -> None:
        self._bounds = bounds

    def of(self, operand: Operand) -> Bound:
        """A constant counts by its bound if known; a literal is itself."""
        if isinstance(operand, Value | Constant):
            return self._bounds.get(id(operand), Bound())
        return Bound(float(operand), float(operand))


def costs(graph: Graph, bounds: Mapping[int, Bound], longest: int) -> dict[int, Cost]:
    """Cost of rounding every floating-point value, by id.

    Args:
        bounds: of values and constants, as tight as known: they are the scales of errors.
        longest: no symbolic dimension is larger.
    """
    softmaxes = _normalised(graph)
    scales = Scales(bounds)
    paths: dict[int, list[Cost]] = {
        id(v): [_at_end(v, scales, "output", id(v))] for v in graph.roots()
    }
    found: dict[int, Cost] = {}
    for node in reversed(graph.nodes):
        for value in node.results:
            found[id(value)] = _worst(paths.pop(id(value), []))
        behind = found[id(node.results[0])]
        for index, operand in enumerate(node.operands):
            if isinstance(operand, Value) and operand.dtype.is_float:
                step = _step(node, index, scales)
                if step is END:
                    path = _at_end(operand, scales, node.op, id(node))
                elif step is DISCRETE:
                    path = Cost(INF, INF, (node.op,), id(node))
                elif (division := softmaxes.get(id(node))) is not None:
                    through = _softmax(scales.of(operand), terms(division[1], longest))
                    path = _longer(through, found[id(division[0].result)], "exp / sum")
                else:
                    path = _longer(step, behind, node.op)
                paths.setdefault(id(operand), []).append(path)
    return found


def _at_end(value: Value, scales: Scales, op: str, end: int) -> Cost:
    scale = scales.of(value).magnitude
    return Cost(1.0, 1 / scale if scale else INF, (op,), end)


def _longer(step: Step, behind: Cost, op: str) -> Cost:
    units, gain = product(step.reach, behind.gain), product(step.gain, behind.gain)
    return Cost(units, gain, (op, *behind.via)[:CHAIN], behind.end)


def _worst(paths: list[Cost]) -> Cost:
    """Paths that meet again at an end add up; of different ends the worst counts."""
    ends: dict[int, Cost] = {}
    for path in paths:
        ends[path.end] = _added(ends[path.end], path) if path.end in ends else path
    if not ends:
        return Cost(0.0, 0.0)
    worst = max(ends.values(), key=lambda c: c.units)
    return replace(worst, gain=max(c.gain for c in ends.values()))


def _added(a: Cost, b: Cost) -> Cost:
    via = max(a, b, key=lambda c: c.units).via
    return Cost(a.units + b.units, a.gain + b.gain, via, a.end)


def _normalised(graph: Graph) -> dict[int, tuple[Node, Node]]:
    """Exponentials that are divided by their own sum: (division, sum) by the exp node's id."""
    found = {}
    for node in graph.nodes:
        if node.op == "div" and all(isinstance(o, Value) for o in node.operands):
            over, under = node.value(0).node, computed_by(node.value(1))
            if over is None or under is None or (over.op, under.op) != ("exp", "sum"):
                continue
            if under.operands[0] is node.operands[0]:
                found[id(over)] = (node, under)
    return found


def _softmax(x: Bound, count: float) -> Step:
    """Of logits x. Rounding them moves a probability by sum |x| p + |x| p at most.

    For logits shifted to x <= 0 with a largest one of 0, the sum is largest when all others are
    equal, at W((count - 1) / e) (Lambert's W); and |x| e^x <= 1 / e.
    """
    shifted = _lambert(max(count - 1, 0) / math.e) + 1 / math.e
    plain = x.magnitude / 2
    return Step(0.5, min(plain, shifted) if x.high <= 0 else plain)


def _lambert(y: float) -> float:
    """w with w e^w = y >= 0, by Newton's steps from above."""
    w = math.log1p(y)
    for _ in range(8):
        w -= (w - y * math.exp(-w)) / (1 + w)
    return w


def _step(node: Node, index: int, scales: Scales) -> Step:
    through = STEPS.get(node.op)
    if through is not None:
        return through(node, index, scales)
    # Moving elements changes none of them; an unknown op may do anything to an error.
    known = node.op in OPS and OPS[node.op].kind is Kind.SHAPE
    return _pass(node, index, scales) if known else DISCRETE


def _pass(node: Node, index: int, scales: Scales) -> Step:
    return Step(1.0, scales.of(node.operands[index]).magnitude)


def _end(node: Node, index: int, scales: Scales) -> Step:
    return END


def _discrete(node: Node, index: int, scales: Scales) -> Step:
    return DISCRETE


def _limited(gain: float, reach: float) -> Through:
    """Functions whose derivative and x f'(x) are bounded everywhere."""
    return lambda node, index, scales: Step(
        gain, min(reach, product(gain, scales.of(node.operands[index]).magnitude))
    )


def _exp(node: Node, index: int, scales: Scales) -> Step:
    x = scales.of(node.operands[0])
    top = math.exp(x.high) if x.high < 709 else INF
    below = 1 / math.e if x.low <= -1 else abs(min(x.low, 0.0)) * math.exp(min(x.low, 0.0))
    return Step(top, max(below, product(max(x.high, 0.0), top)))


def _power(node: Node, index: int, scales: Scales) -> Step:
    """x^p: relative errors grow p times; absolute ones by p x^(p - 1) at the worse end."""
    exponent = _exponent(node)
    if exponent is None:
        return DISCRETE
    x = scales.of(node.operands[0])
    away = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    at = x.magnitude if exponent >= 1 else away
    slope = INF if at == 0 and exponent < 1 else abs(exponent) * at ** (exponent - 1)
    return Step(slope, abs(exponent) * scales.of(node.result).magnitude)


def _exponent(node: Node) -> float | None:
    fixed = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
    if node.op in fixed:
        return fixed[node.op]
    exponent = node.operands[1]
    return None if isinstance(exponent, Value | Constant) else float(exponent)


def _log(node: Node, index: int, scales: Scales) -> Step:
    low = scales.of(node.operands[0]).low
    return Step(1 / low if low > 0 else INF, 1.0)


def _mul(node: Node, index: int, scales: Scales) -> Step:
    """The product's own magnitude bounds |x f'(x)|, tighter than the factors'."""
    other = scales.of(node.operands[1 - index]).magnitude
    return Step(other, scales.of(node.result).magnitude)


def _div(node: Node, index: int, scales: Scales) -> Step:
    under, result = scales.of(node.operands[1]), scales.of(node.result).magnitude
    least = 0.0 if under.low <= 0 <= under.high else min(abs(under.low), abs(under.high))
    slope = 1 / least if least else INF
    return Step(slope if index == 0 else product(slope, result), result)


def _reduce(node: Node, index: int, scales: Scales) -> Step:
    """Terms of one sign: their relative errors do not grow."""
    x, result = scales.of(node.operands[0]), scales.of(node.result).magnitude
    count = terms(node, INF)
    gain = 1.0 if node.op == "mean" else count
    return Step(gain, result if x.low >= 0 else product(gain, x.magnitude))


def _cast(node: Node, index: int, scales: Scales) -> Step:
    return _pass(node, index, scales) if node.result.dtype.is_float else DISCRETE


def _where(node: Node, index: int, scales: Scales) -> Step:
    return DISCRETE if index == 0 else _pass(node, index, scales)


def _except(index_through: int) -> Through:
    """An end, but for operands from `index_through` on, which are added."""
    return lambda node, index, scales: _pass(node, index, scales) if index >= index_through else END


def _rope(node: Node, index: int, scales: Scales) -> Step:
    """An isometry in x: an element takes at most sqrt(2) of a pair; in its tables, x itself."""
    own = scales.of(node.operands[index]).magnitude
    gain = math.sqrt(2) if index == 0 else scales.of(node.operands[0]).magnitude
    return Step(gain, product(gain, own))


def terms(node: Node, longest: float) -> float:
    """Terms that one element of a reduction adds up; 1 for other ops.

    Linear layers, norms, softmax and attention add up in f32 whatever dtype they take, in our
    kernels as on tensor cores.
    """
    if node.op not in ("sum", "mean", "cumsum"):
        return 1.0
    size = node.tensor(0).shape[attribute(node, "axis")]
    return float(size) if isinstance(size, int) else longest


STEPS: dict[str, Through] = {
    "neg": _pass,
    "abs": _pass,
    "relu": _pass,
    "exp": _exp,
    "log": _log,
    **dict.fromkeys(("pow", "sqrt", "rsqrt", "reciprocal"), _power),
    **dict.fromkeys(("sin", "cos"), _limited(1.0, INF)),
    # sup |f'|, sup |x f'(x)| of each.
    "tanh": _limited(1.0, 0.448),
    "erf": _limited(1.1284, 0.484),
    "sigmoid": _limited(0.25, 0.224),
    "silu": _limited(1.0999, INF),
    "gelu": _limited(1.1290, INF),
    "softplus": _limited(1.0, INF),
    "softmax": _limited(0.5, INF),
    "floor": _discrete,
    "add": _pass,
    "sub": _pass,
    "mul": _mul,
    "div": _div,
    **dict.fromkeys(("maximum", "minimum", "clamp", "amax"), _pass),
    **dict.fromkeys(("floor_div", "remainder", "argmax", "topk"), _discrete),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _discrete),
    "where": _where,
    "cast": _cast,
    **dict.fromkeys(("sum", "mean", "cumsum"), _reduce),
    **dict.fromkeys(("index_select", "gather", "scatter", "tril", "triu", "kv_append"), _pass),
    "matmul": _end,
    "linear": _except(2),
    "qkv": _end,
    "linear_residual": _except(2),
    "gated_mlp": _except(4),
    "route": _discrete,
    "moe": _end,
    "rms_norm": _end,
    "layer_norm": _except(2),
    "rope": _rope,
    "attention": _end,
    "paged_attention": _end,
}
