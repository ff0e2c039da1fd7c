"""Raise a matrix product with a weight to linear, with its bias.

before:
    graph conv1d fused {
      input %x : f32[T, 8]
      const @w : f32[8, 16] = parameter "c_attn.weight"
      const @b : f32[16] = parameter "c_attn.bias"
      %m = matmul(%x, @w) : f32[T, 16] in h.0
      %y = add(%m, @b) : f32[T, 16] in h.0
      output %y
    }
after:
    graph conv1d fused {
      input %x : f32[T, 8]
      const @b : f32[16] = parameter "c_attn.bias"
      const @w.T : f32[16, 8] = parameter "c_attn.weight" transposed
      %y = linear(%x, @w.T, @b) : f32[T, 16] in h.0
      output %y
    }

GPT-2's Conv1D keeps weights as [k, n]; kernels and k-quants work on rows [n, k].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Level, Node, TensorType, Users
from .base import NearMiss, Pass, PassReport


@dataclass(frozen=True)
class RaiseLinear(Pass):
    """Fires on matmul(x, weight), and on add(linear without a bias, vector constant)."""

    name: ClassVar[str] = "raise-linear"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 2e-6

    def run(self, graph: Graph) -> PassReport:
        """A weight that is also used in another way keeps its untransposed constant too."""
        report = PassReport(self.name)
        for node in graph.nodes:
            if node.op == "matmul" and isinstance(node.operands[1], Constant):
                reason = _raise_product(graph, node)
                if reason:
                    report.missed.append(NearMiss(node.scope, reason))
                else:
                    report.fired.append(node.scope)
        users = Users(graph)
        for node in graph.nodes:
            if node.op == "add" and _take_bias(node, users):
                report.fired.append(node.scope)
        return report


def _raise_product(graph: Graph, node: Node) -> str:
    weight = node.operands[1]
    assert isinstance(weight, Constant)
    if weight.type.rank != 2 or weight.parameter is None:
        return f"@{weight.name} is not a stored matrix"
    name = f"{weight.name}.T"
    if name not in graph.constants:
        kind = TensorType(weight.dtype, (weight.shape[1], weight.shape[0]))
        flipped = not weight.transposed
        graph.constants[name] = Constant(name, kind, weight.parameter, transposed=flipped)
    node.op, node.operands = "linear", [node.operands[0], graph.constants[name]]
    return ""


def _take_bias(node: Node, users: Users) -> bool:
    """Turns add(linear(x, w), b) into linear(x, w, b) in the add's place."""
    for index in (0, 1):
        product, bias = node.operands[index], node.operands[1 - index]
        source = getattr(product, "node", None)
        if not isinstance(source, Node) or source.op != "linear" or len(source.operands) != 2:
            continue
        if users.only(source.result) is not node or not isinstance(bias, Constant):
            continue
        if bias.shape != (source.result.shape[-1],) or node.result.shape != source.result.shape:
            continue
        node.op, node.operands = "linear", [*source.operands, bias]
        return True
    return False
