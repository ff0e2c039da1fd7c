"""Raise x * rsqrt(mean(x^2) + eps) * w to rms_norm.

before:
    input %x : f32[B, S, 64]
    const @w : f32[64] = parameter "norm.weight"
    %sq = pow(%x, 2) : f32[B, S, 64] in norm
    %ms = mean(%sq, axis=-1, keepdim=true) : f32[B, S, 1] in norm
    %me = add(%ms, 1e-05) : f32[B, S, 1] in norm
    %r = rsqrt(%me) : f32[B, S, 1] in norm
    %n = mul(%x, %r) : f32[B, S, 64] in norm
    %y = mul(@w, %n) : f32[B, S, 64] in norm
    output %y
after:
    input %x : f32[B, S, 64]
    const @w : f32[64] = parameter "norm.weight"
    %y = rms_norm(%x, @w, eps=1e-05) : f32[B, S, 64] in norm
    output %y

Also: x / sqrt(..), powers of -1/2, x * x, sum / D, (1 + w) as offset=1.0, no weight at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Level, Node, Operand
from .base import NearMiss, Pass, PassReport
from .match import (
    LAST,
    Match,
    Miss,
    Pattern,
    constant,
    either,
    match,
    number,
    op,
    orders,
    producer,
    same,
    var,
)
from .rewrite import Rewriter

X = var("x")
_SQUARE = either(op("pow", X, 2), op("mul", X, X))
_SUM = op("sum", _SQUARE, axis=LAST, keepdim=True)
_MEAN_SQUARE = either(
    op("mean", _SQUARE, axis=LAST, keepdim=True),
    op("div", _SUM, number("width")),
    op("mul", _SUM, number("inverse_width")),
)
_SHIFTED = either(op("add", _MEAN_SQUARE, number("eps")), _MEAN_SQUARE)
_ROOT = either(op("sqrt", _SHIFTED), op("pow", _SHIFTED, 0.5))
_INVERSE_ROOT = either(
    op("rsqrt", _SHIFTED),
    op("pow", _SHIFTED, -0.5),
    op("reciprocal", _ROOT),
    op("div", 1, _ROOT),
    op("pow", _ROOT, -1),
)
CORE: Pattern = either(op("mul", X, _INVERSE_ROOT), op("div", X, _ROOT))
_OFFSET_WEIGHT = op("add", constant("weight"), number("offset"))
_ANCHORS = ("rsqrt", "sqrt", "pow")


@dataclass(frozen=True)
class RaiseRmsNorm(Pass):
    """Finds root-mean-square norms over the last axis, with or without weight."""

    name: ClassVar[str] = "raise-rms-norm"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 1e-5  # a few roundings per element, in another order

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every norm it finds; inverse roots of something else are near misses."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        covered: set[int] = set()
        for node in graph.nodes:
            found = _norm(node)
            if isinstance(found, Match):
                root, operands, offset = _with_weight(rewriter, node, found)
                attrs = {"eps": found.number("eps")} | ({"offset": offset} if offset else {})
                rewriter.replace(root, "rms_norm", operands, attrs)
                report.fired.append(root.scope)
                covered.update(id(n) for n in _anchors(node))
        report.missed += [_near_miss(rewriter, n) for n in graph.nodes if _uncovered(n, covered)]
        rewriter.apply()
        return report


def _norm(node: Node) -> Match | Miss:
    """The norm that ends at a product or quotient, without its weight."""
    if node.op not in ("mul", "div"):
        return Miss(0, "no product")
    found = match(CORE, node.result)
    if isinstance(found, Miss):
        return found
    width, divisor = found.shape("x")[-1], found.number("width")
    if "inverse_width" in found.bound:
        divisor = 1 / found.number("inverse_width")
    if divisor and (not isinstance(width, int) or abs(width - divisor) > 1e-3):
        return Miss(9, f"a sum over {width} elements is divided by {divisor:g}")
    return found


def _with_weight(rewriter: Rewriter, core: Node, found: Match) -> tuple[Node, list[Operand], float]:
    """The root of the whole norm, its operands, and what is added to the weight."""
    x = found.bound["x"]
    user = rewriter.users.only(core.result)
    if user is not None and user.op == "mul":
        for this, other in orders(user):
            if not same(this, core.result):
                continue
            weight, offset = _weight(other)
            if weight is not None and weight.shape == core.result.shape[-1:]:
                return user, [x, weight], offset
    return core, [x], 0.0


def _weight(operand: Operand) -> tuple[Constant | None, float]:
    if isinstance(operand, Constant):
        return operand, 0.0
    found = match(_OFFSET_WEIGHT, operand)
    if isinstance(found, Match):
        weight = found.bound["weight"]
        return (weight, found.number("offset")) if isinstance(weight, Constant) else (None, 0.0)
    return None, 0.0


def _anchors(core: Node) -> list[Node]:
    """The inverse roots in a matched norm: they are not near misses."""
    found = [n for n in map(producer, core.operands) if n is not None]
    found += [n for n in map(producer, [o for f in found for o in f.operands]) if n is not None]
    return [n for n in found if n.op in _ANCHORS]


def _uncovered(node: Node, covered: set[int]) -> bool:
    if node.op not in _ANCHORS or id(node) in covered:
        return False
    exponent = node.operands[1] if node.op == "pow" else -0.5
    return exponent in (-0.5, 0.5)


def _near_miss(rewriter: Rewriter, anchor: Node) -> NearMiss:
    """Why an inverse root is no part of an RMS norm: the deepest reason among its users."""
    users = [u for u in rewriter.users.of(anchor.result) if u.op in ("mul", "div")]
    misses = [m for m in map(_norm, users) if isinstance(m, Miss)]
    if not misses:
        return NearMiss(anchor.scope, f"no product with the {anchor.op} %{anchor.result.name}")
    return NearMiss(anchor.scope, max(misses, key=lambda m: m.depth).reason)
