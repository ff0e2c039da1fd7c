"""Compute the head, and whatever else only the head needs, for the wanted rows only.

before:
    graph head fused {
      input %h : f32[T, 8]
      input %a : f32[T, 8]
      const @w : f32[16, 8] = parameter "lm_head.weight"
      %s = add(%h, %a) : f32[T, 8]
      %l = linear(%s, @w) : f32[T, 16]
      output %l
    }
after:
    graph head fused {
      input %h : f32[T, 8]
      input %a : f32[T, 8]
      input %logit_rows : i32[R]
      const @w : f32[16, 8] = parameter "lm_head.weight"
      %h_rows = index_select(%h, %logit_rows, axis=0) : f32[R, 8]
      %a_rows = index_select(%a, %logit_rows, axis=0) : f32[R, 8]
      %s = add(%h_rows, %a_rows) : f32[R, 8]
      %l = linear(%s, @w) : f32[R, 16]
      output %l
    }

The tail is every token-wise node whose results only the tail reads; in a decoder it reaches from
the logits down to the last layer's attention. Needs the flat graph of flatten-tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import (
    Attr,
    Builder,
    DType,
    Graph,
    Level,
    Node,
    Operand,
    TensorType,
    Users,
    Value,
    symbol,
)
from .base import NearMiss, Pass, PassReport

TOKENS, ROWS = symbol("T"), symbol("R")
MIXES_TOKENS = ("paged_attention", "kv_append", "attention")


@dataclass(frozen=True)
class SelectLogitRows(Pass):
    """Fires once, on the first output."""

    name: ClassVar[str] = "select-logit-rows"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)

    def run(self, graph: Graph) -> PassReport:
        """Rewrites the tail from [T, ...] to [R, ...]."""
        report = PassReport(self.name)
        logits = graph.outputs[0]
        if logits.node is None or not logits.shape or logits.shape[0] != TOKENS:
            report.missed.append(NearMiss(logits.name, "the output is not one row a token"))
            return report
        tail = _tail(graph, logits)
        _rewrite(graph, tail)
        report.fired.append(logits.node.scope or graph.name)
        report.facts["nodes on selected rows"] = len(tail)
        return report


def _per_token(value: Value) -> bool:
    return bool(value.shape) and value.shape[0] == TOKENS


def _tail(graph: Graph, logits: Value) -> list[Node]:
    """Nodes that only the logits need, in order; each treats tokens apart."""
    users, inside = Users(graph), set[int]()
    for node in reversed(graph.nodes):
        per_token = all(_per_token(v) for v in node.results)
        if not per_token or node.op in MIXES_TOKENS:
            continue
        ends = all(v is logits or not users.is_root(v) for v in node.results)
        readers = (id(n) in inside for v in node.results for n in users.of(v))
        if ends and all(readers) and (logits.node is node or users.of(node.results[0])):
            inside.add(id(node))
    return [n for n in graph.nodes if id(n) in inside]


def _rewrite(graph: Graph, tail: list[Node]) -> None:
    builder = Builder(graph)
    wanted = builder.input("logit_rows", TensorType(DType.I32, (ROWS,)))
    inside = {id(n) for n in tail}
    graph.nodes = [n for n in graph.nodes if id(n) not in inside]
    rows: dict[int, Value] = {}

    def selected(operand: Operand) -> Operand:
        if not isinstance(operand, Value) or not _per_token(operand):
            return operand
        if id(operand) not in rows:
            rows[id(operand)] = builder.emit(
                "index_select",
                [operand, wanted],
                operand.node.scope if operand.node else "",
                name=f"{operand.name}_rows",
                axis=0,
            )
        return rows[id(operand)]

    for node in tail:
        node.operands = [selected(o) for o in node.operands]
        node.attrs = {k: _with_rows(v) for k, v in node.attrs.items()}
        for value in node.results:
            value.type = value.type.with_shape((ROWS, *value.shape[1:]))
        graph.nodes.append(node)


def _with_rows(attr: Attr) -> Attr:
    if isinstance(attr, tuple):
        return tuple(ROWS if a == TOKENS else a for a in attr)
    return attr
