"""Fold the constant that a norm adds to its weight into the stored weight.

before:
    graph norm fused {
      input %x : f32[T, 8]
      const @w : f32[8] = parameter "norm.weight"
      %y = rms_norm(%x, @w, eps=1e-06, offset=1.0) : f32[T, 8]
      output %y
    }
after:
    graph norm fused {
      input %x : f32[T, 8]
      const @w.plus : f32[8] = parameter "norm.weight" plus=1.0
      %y = rms_norm(%x, @w.plus, eps=1e-06) : f32[T, 8]
      output %y
    }

Gemma scales by 1 + weight; the kernel then needs one addition less per element and one form only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Level, Node, attribute
from .base import NearMiss, Pass, PassReport


@dataclass(frozen=True)
class FoldNormOffset(Pass):
    """Fires once per norm with an offset."""

    name: ClassVar[str] = "fold-norm-offset"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)

    def run(self, graph: Graph) -> PassReport:
        """The weight must be a parameter."""
        report = PassReport(self.name)
        for node in graph.nodes:
            if node.op != "rms_norm" or not attribute(node, "offset"):
                continue
            if _fold(graph, node):
                report.fired.append(node.scope)
            else:
                report.missed.append(NearMiss(node.scope, "its weight is not a stored parameter"))
        return report


def _fold(graph: Graph, node: Node) -> bool:
    weight = node.operands[1] if len(node.operands) > 1 else None
    if not isinstance(weight, Constant) or weight.parameter is None:
        return False
    plus = weight.plus + float(attribute(node, "offset"))
    name = f"{weight.name}.plus"
    folded = Constant(name, weight.type, weight.parameter, plus=plus)
    node.operands[1] = graph.constants.setdefault(name, folded)
    del node.attrs["offset"]
    return True
