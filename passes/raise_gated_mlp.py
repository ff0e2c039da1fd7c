"""Raise down(act(gate(x)) * up(x)) to gated_mlp.

before:
    input %x : f32[B, S, 8]
    const @gate_up : f32[32, 8] = parameter "mlp.gate_up_proj.weight"
    const @down : f32[8, 16] = parameter "mlp.down_proj.weight"
    %gu = linear(%x, @gate_up) : f32[B, S, 32] in mlp.gate_up_proj
    %g = slice(%gu, axis=2, start=0, end=16) : f32[B, S, 16] in mlp
    %u = slice(%gu, axis=2, start=16, end=32) : f32[B, S, 16] in mlp
    %a = silu(%g) : f32[B, S, 16] in mlp.act
    %h = mul(%u, %a) : f32[B, S, 16] in mlp
    %y = linear(%h, @down) : f32[B, S, 8] in mlp.down_proj
    output %y
after:
    input %x : f32[B, S, 8]
    const @down : f32[8, 16] = parameter "mlp.down_proj.weight"
    const @gate_up.0 : f32[16, 8] = parameter "mlp.gate_up_proj.weight" rows=0:16
    const @gate_up.16 : f32[16, 8] = parameter "mlp.gate_up_proj.weight" rows=16:32
    %y = gated_mlp(%x, @gate_up.0, @gate_up.16, @down) : f32[B, S, 8] in mlp
    output %y

Separate gate and up matrices are taken as they are; of a packed one, each takes its rows. If any of
the three projections has a bias, the others get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Attr, Constant, Graph, Level, Node, Operand, attribute
from .base import NearMiss, Pass, PassReport, Refusal
from .cost import traffic
from .match import (
    Match,
    Pattern,
    is_last_axis,
    match,
    op,
    orders,
    producer,
    same,
    show,
    var,
)
from .probe import cone
from .rewrite import Rewriter, common_scope, row_part, zeros

_G = var("gate")
ACTIVATIONS: tuple[tuple[Pattern, str], ...] = (
    (op("silu", _G), "silu"),
    (op("gelu", _G, approximate="tanh"), "gelu_tanh"),
    (op("gelu", _G, approximate="none"), "gelu_erf"),
    (op("pow", op("relu", _G), 2), "relu2"),
    (op("mul", op("relu", _G), op("relu", _G)), "relu2"),
    (op("relu", _G), "relu"),
    (op("mul", _G, op("sigmoid", op("mul", _G, 1.702))), "gelu_quick"),
)


_CHANGES = {
    "clamp": "is clamped, which gated_mlp cannot say",
    "minimum": "is clamped, which gated_mlp cannot say",
    "maximum": "is clamped, which gated_mlp cannot say",
    "mul": "is scaled, which gated_mlp cannot say",
    "add": "is shifted, which gated_mlp cannot say",
}


@dataclass(frozen=True)
class RaiseGatedMlp(Pass):
    """Finds gated MLPs with separate or packed gate and up projections."""

    name: ClassVar[str] = "raise-gated-mlp"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 1e-5  # a matrix product of half the rows may sum in another order

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every gated MLP; other products of an activation before a linear are misses."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        for node in [n for n in graph.nodes if n.op == "linear"]:
            hidden = producer(node.operands[0])
            gated = _gated(hidden) if hidden is not None and hidden.op == "mul" else None
            if hidden is None or gated is None:
                continue
            try:
                _emit(rewriter, node, hidden, *gated)
                report.fired.append(node.scope)
            except ValueError as reason:
                report.missed.append(NearMiss(node.scope, str(reason)))
        rewriter.apply()
        return report


def _gated(product: Node) -> tuple[str, Operand, Operand] | None:
    """The activation, the gate in front of it, and the factor beside it."""
    for gate, up in orders(product):
        for pattern, name in ACTIVATIONS:
            found = match(pattern, gate)
            if isinstance(found, Match):
                return name, found.bound["gate"], up
    return None


def _emit(
    rewriter: Rewriter, down: Node, product: Node, activation: str, gate: Operand, up: Operand
) -> None:
    if rewriter.users.only(product.result) is None:
        raise Refusal(f"its hidden state %{product.result.name} has another user")
    gate_linear, gate_rows = _projection(gate)
    up_linear, up_rows = _projection(up)
    if not same(gate_linear.operands[0], up_linear.operands[0]):
        raise Refusal("gate and up are projections of different values")
    if not isinstance(down.operands[1], Constant):
        raise Refusal("its down projection is no stored matrix")
    parts = [(gate_linear, gate_rows), (up_linear, up_rows), (down, None)]
    weights = [_part(rewriter.graph, n.operands[1], rows) for n, rows in parts]
    attrs: dict[str, Attr] = {} if activation == "silu" else {"activation": activation}
    biases: list[Operand] = []
    if any(len(n.operands) > 2 for n, _ in parts):
        attrs["biases"] = True
        biases = [
            _part(rewriter.graph, n.operands[2], rows)
            if len(n.operands) > 2
            else zeros(rewriter.graph, weight.shape[0])
            for (n, rows), weight in zip(parts, weights, strict=True)
        ]
    scope = common_scope(gate_linear.scope, up_linear.scope, product.scope, down.scope)
    operands = [gate_linear.operands[0], *weights, *biases]
    fused = Node("gated_mlp", operands, attrs, down.results)
    if not (traffic(_behind(down, gate_linear)) - traffic([fused])).pays:
        raise Refusal("it would move more bytes than it saves")
    rewriter.replace(down, "gated_mlp", operands, attrs, scope)


def _behind(down: Node, gate: Node) -> list[Node]:
    """Every node between the MLP's input and its output."""
    return cone([down.result], lambda node: gate.operands[0] not in node.results)[0]


def _projection(operand: Operand) -> tuple[Node, tuple[int, int] | None]:
    """The linear behind gate or up, and which of its rows it is if it is packed."""
    node, rows = producer(operand), None
    if node is not None and node.op == "slice":
        start, end = attribute(node, "start"), attribute(node, "end")
        if not is_last_axis(node) or attribute(node, "step") != 1:
            raise Refusal(f"gate and up are interleaved in {show(node.operands[0])}")
        node, rows = producer(node.operands[0]), (int(start), int(end))
    if node is None or node.op != "linear":
        how = _CHANGES.get(node.op if node else "", "is no linear projection")
        raise Refusal(f"{show(operand)} {how}")
    if not isinstance(node.operands[1], Constant):
        raise Refusal(f"{show(node.operands[1])} is no stored matrix")
    return node, rows


def _part(graph: Graph, whole: Operand, rows: tuple[int, int] | None) -> Constant:
    """A projection's weight or bias, or a constant for some of its rows."""
    if not isinstance(whole, Constant):
        raise Refusal(f"{show(whole)} is no stored tensor")
    return whole if rows is None else row_part(graph, whole, rows)
