"""Raise activations that are spelled out to silu and gelu.

before:
    input %x : f32[T, 8]
    %half = mul(%x, 0.5) : f32[T, 8] in act
    %x3 = pow(%x, 3.0) : f32[T, 8] in act
    %c = mul(%x3, 0.044715) : f32[T, 8] in act
    %i = add(%x, %c) : f32[T, 8] in act
    %s = mul(%i, 0.7978845608028654) : f32[T, 8] in act
    %t = tanh(%s) : f32[T, 8] in act
    %p = add(%t, 1.0) : f32[T, 8] in act
    %y = mul(%half, %p) : f32[T, 8] in act
    output %y
after:
    input %x : f32[T, 8]
    %y = gelu(%x, approximate="tanh") : f32[T, 8] in act
    output %y
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt
from typing import ClassVar

from ..compiler.ir import Attr, Graph, Level, Node, Operand
from .base import NearMiss, Pass, PassReport
from .match import Match, Pattern, either, match, op, producer, var
from .rewrite import Rewriter

_X = var("x")
_SLOPE = sqrt(2 / pi)


def _half_of(one_plus: Pattern) -> Pattern:
    """0.5 * x * (1 + t) in every association."""
    return either(
        op("mul", op("mul", _X, 0.5), one_plus),
        op("mul", op("mul", _X, one_plus), 0.5),
        op("mul", _X, op("mul", one_plus, 0.5)),
        op("mul", op("div", _X, 2), one_plus),
        op("div", op("mul", _X, one_plus), 2),
    )


_CUBE = either(op("pow", _X, 3), op("mul", op("mul", _X, _X), _X))
_INNER = either(
    op("mul", op("add", _X, op("mul", _CUBE, 0.044715)), _SLOPE),
    op(
        "mul",
        op("mul", _X, _SLOPE),
        op("add", op("mul", op("mul", _X, 0.044715), _X), 1),
    ),
)
_GELU_TANH = _half_of(op("add", op("tanh", _INNER), 1))
_GELU_ERF = _half_of(
    op("add", op("erf", either(op("div", _X, sqrt(2)), op("mul", _X, sqrt(0.5)))), 1)
)
_SILU = op("mul", _X, op("sigmoid", _X))

RULES: tuple[tuple[Pattern, str, dict[str, Attr]], ...] = (
    (_GELU_TANH, "gelu", {"approximate": "tanh"}),
    (_GELU_ERF, "gelu", {}),
    (_SILU, "silu", {}),
)


@dataclass(frozen=True)
class RaiseActivation(Pass):
    """Finds GELU, exact and by tanh, and SiLU among elementwise primitives."""

    name: ClassVar[str] = "raise-activation"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    tolerance: ClassVar[float] = 1e-5  # torch rounds once where the primitives round nine times

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every spelling; a tanh or erf times something that stays is a near miss."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        for node in [n for n in graph.nodes if n.op in ("mul", "div")]:
            for pattern, name, attrs in RULES:
                found = match(pattern, node.result)
                if isinstance(found, Match) and found.shape("x") == node.result.shape:
                    rewriter.replace(node, name, [found.bound["x"]], attrs)
                    report.fired.append(node.scope)
                    break
            else:
                report.missed += _near_miss(node)
        rewriter.apply()
        return report


def _near_miss(node: Node) -> list[NearMiss]:
    """x * (1 + tanh(..)) and x * sigmoid(c * x) look like activations that have a name."""
    for operand in node.operands:
        shifted = producer(operand)
        if shifted is None:
            continue
        inner: list[Operand] = shifted.operands if shifted.op == "add" else [operand]
        gate = next((g for g in map(producer, inner) if g and g.op in _GATES), None)
        if gate is not None and not (gate.op == "tanh" and shifted.op == "tanh"):
            reason = f"no known activation multiplies by {gate.op} %{gate.result.name}"
            return [NearMiss(node.scope, reason)]
    return []


_GATES = ("tanh", "erf", "sigmoid")
