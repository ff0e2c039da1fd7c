"""Rules of interval analysis: matrices, norms, rotations, attention, gated MLPs, experts."""

from __future__ import annotations

import math

import torch

from ..ir import Node, Operand, Value, attribute
from .bounds import (
    INF,
    Bound,
    plus,
    product,
    symmetric,
)
from .interval_facts import Facts, Rule, row_width
from .weights import Norms


def _stretched(x: Bound, weight: Norms | None) -> Bound:
    if weight is None:
        return Bound()
    return symmetric(product(x.norm, weight.bound.norm), product(x.norm, weight.frobenius))


def _linear(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    return _with_bias(_stretched(xs[0], facts.norms(node.operands[1])), xs[2:])


def qkv(node: Node, xs: list[Bound], facts: Facts, index: int = 0) -> Bound:
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
    width = row_width(node.result.shape)
    longest = math.sqrt(width) if isinstance(width, int) else INF
    eps = float(attribute(node, "eps"))
    shrunk = xs[0].norm / math.sqrt(eps) if eps > 0 else INF
    scale = plus(xs[1], Bound(*[float(attribute(node, "offset"))] * 2)) if xs[1:] else Bound(1, 1)
    return symmetric(INF, product(min(longest, shrunk), scale.magnitude))


def _layer_norm(node: Node, xs: list[Bound], facts: Facts) -> Bound:
    width = row_width(node.result.shape)
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


BLOCK_RULES: dict[str, Rule] = {
    "linear": _linear,
    "qkv": qkv,
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
