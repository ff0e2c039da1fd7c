"""Let the kernel that ends a block add the residual stream.

before:
    graph block fused {
      input %h : f32[T, 8]
      input %x : f32[T, 4]
      const @w : f32[8, 4] = parameter "o_proj.weight"
      %o = linear(%x, @w) : f32[T, 8]
      %y = add(%h, %o) : f32[T, 8]
      output %y
    }
after:
    graph block fused {
      input %h : f32[T, 8]
      input %x : f32[T, 4]
      const @w : f32[8, 4] = parameter "o_proj.weight"
      %y = linear_residual(%x, @w, %h) : f32[T, 8]
      output %y
    }

Saves one write and one read of the stream per block, and a kernel launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Level, Node, Operand, Users, Value, attribute
from .base import NearMiss, Pass, PassReport
from .cost import traffic


@dataclass(frozen=True)
class FuseResidual(Pass):
    """Fires on add(stream, linear) and add(stream, gated_mlp), in either order."""

    name: ClassVar[str] = "fuse-residual"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)
    tolerance: ClassVar[float] = 2e-6

    def run(self, graph: Graph) -> PassReport:
        """The product's result must have no other reader."""
        report = PassReport(self.name)
        users = Users(graph)
        for node in graph.nodes:
            if node.op != "add":
                continue
            for index in (1, 0):
                reason = _fuse(node, node.operands[index], node.operands[1 - index], users)
                if reason is None:
                    report.fired.append(node.scope)
                    break
                if reason:
                    report.missed.append(NearMiss(node.scope, reason))
        return report


def _fuse(node: Node, product: Operand, stream: Operand, users: Users) -> str | None:
    """None if fused, empty if the operand is no product, else why not."""
    source = product.node if isinstance(product, Value) else None
    if source is None or source.op not in ("linear", "gated_mlp"):
        return ""
    if not isinstance(stream, Value) or stream.type != node.result.type:
        return "the other operand is not a stream of the same shape"
    if users.only(source.result) is not node:
        return f"%{source.result.name} has other readers"
    if source.op == "gated_mlp":
        if len(source.operands) > (7 if attribute(source, "biases") else 4):
            return "the gated MLP already adds a residual"
        fused = Node("gated_mlp", [*source.operands, stream], dict(source.attrs), node.results)
    else:
        if not isinstance(source.operands[1], Constant):
            return "its weight is computed"
        x, weight, *bias = source.operands
        fused = Node("linear_residual", [x, weight, stream, *bias], {}, node.results)
    if not (traffic([source, node]) - traffic([fused])).pays:
        return "it would move more bytes than it saves"
    node.op, node.operands, node.attrs = fused.op, fused.operands, fused.attrs
    return None
