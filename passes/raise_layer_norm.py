"""Raise rms_norm(x - mean(x), w) + b to layer_norm.

before:
    input %x : f32[B, S, 64]
    const @w : f32[64] = parameter "norm.weight"
    const @b : f32[64] = parameter "norm.bias"
    %mu = mean(%x, axis=-1, keepdim=true) : f32[B, S, 1] in norm
    %d = sub(%x, %mu) : f32[B, S, 64] in norm
    %n = rms_norm(%d, @w, eps=1e-05) : f32[B, S, 64] in norm
    %y = add(%n, @b) : f32[B, S, 64] in norm
    output %y
after:
    input %x : f32[B, S, 64]
    const @w : f32[64] = parameter "norm.weight"
    const @b : f32[64] = parameter "norm.bias"
    %y = layer_norm(%x, @w, @b, eps=1e-05) : f32[B, S, 64] in norm
    output %y

A layer norm is the RMS norm of the centred input, so every spelling of the variance is already
read by raise-rms-norm. `aten.layer_norm` arrives as layer_norm and needs no raising.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Level, Node, Operand, attribute
from .base import NearMiss, Pass, PassReport
from .match import LAST, Match, match, op, orders, same, var
from .rewrite import Rewriter

_X = var("x")
_CENTRED = op("sub", _X, op("mean", _X, axis=LAST, keepdim=True))


@dataclass(frozen=True)
class RaiseLayerNorm(Pass):
    """Finds RMS norms of x - mean(x)."""

    name: ClassVar[str] = "raise-layer-norm"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED, Level.TRACED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 1e-5  # torch computes the variance in one pass

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every centred RMS norm; one whose weight has an offset is a near miss."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        for node in [n for n in graph.nodes if n.op == "rms_norm"]:
            found = match(_CENTRED, node.operands[0])
            if not isinstance(found, Match):
                continue
            if attribute(node, "offset"):
                reason = "its weight has an offset, which layer_norm does not have"
                report.missed.append(NearMiss(node.scope, reason))
                continue
            root, operands = _with_bias(rewriter, node, found.bound["x"])
            rewriter.replace(root, "layer_norm", operands, {"eps": attribute(node, "eps")})
            report.fired.append(root.scope)
        rewriter.apply()
        return report


def _with_bias(rewriter: Rewriter, norm: Node, x: Operand) -> tuple[Node, list[Operand]]:
    """The root of the whole norm and its operands; a bias needs a weight in front of it."""
    operands = [x, *norm.operands[1:]]
    user = rewriter.users.only(norm.result)
    if user is not None and user.op == "add" and len(operands) == 2:
        for this, other in orders(user):
            is_bias = isinstance(other, Constant) and other.shape == norm.result.shape[-1:]
            if same(this, norm.result) and is_bias:
                return user, [*operands, other]
    return norm, operands
