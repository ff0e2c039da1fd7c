"""Compute the projections of queries, keys and values in one op.

before:
    graph attn fused {
      input %x : f32[T, 8]
      input %slots : i32[T]
      input %seq_starts : i32[B1]
      input %kv_lens : i32[B]
      input %block_tables : i32[B, M]
      const @q : f32[8, 8] = parameter "q_proj.weight"
      const @k : f32[4, 8] = parameter "k_proj.weight"
      const @v : f32[4, 8] = parameter "v_proj.weight"
      state key : f32[N, 1, 4] axis=0 kind=kv
      state value : f32[N, 1, 4] axis=0 kind=kv
      %ql = linear(%x, @q) : f32[T, 8] in attn.q_proj
      %kl = linear(%x, @k) : f32[T, 4] in attn.k_proj
      %vl = linear(%x, @v) : f32[T, 4] in attn.v_proj
      %qh = reshape(%ql, shape=[T, 2, 4]) : f32[T, 2, 4] in attn
      %kh = reshape(%kl, shape=[T, 1, 4]) : f32[T, 1, 4] in attn
      %vh = reshape(%vl, shape=[T, 1, 4]) : f32[T, 1, 4] in attn
      %y = paged_attention(%qh, %kh, %vh, %slots, %seq_starts, %kv_lens, %block_tables, key="key", value="value", scale=0.5) : f32[T, 2, 4] in attn
      output %y
    }
after:
    graph attn fused {
      input %x : f32[T, 8]
      input %slots : i32[T]
      input %seq_starts : i32[B1]
      input %kv_lens : i32[B]
      input %block_tables : i32[B, M]
      const @q : f32[8, 8] = parameter "q_proj.weight"
      const @k : f32[4, 8] = parameter "k_proj.weight"
      const @v : f32[4, 8] = parameter "v_proj.weight"
      state key : f32[N, 1, 4] axis=0 kind=kv
      state value : f32[N, 1, 4] axis=0 kind=kv
      %ql, %kl, %vl = qkv(%x, @q, @k, @v) : f32[T, 8], f32[T, 4], f32[T, 4] in attn
      %qh = reshape(%ql, shape=[T, 2, 4]) : f32[T, 2, 4] in attn
      %kh = reshape(%kl, shape=[T, 1, 4]) : f32[T, 1, 4] in attn
      %vh = reshape(%vl, shape=[T, 1, 4]) : f32[T, 1, 4] in attn
      %y = paged_attention(%qh, %kh, %vh, %slots, %seq_starts, %kv_lens, %block_tables, key="key", value="value", scale=0.5) : f32[T, 2, 4] in attn
      output %y
    }

The input is quantised once and threads start once; a packed projection also loses its three slices.
Runs behind assign-roles, which reads the single products.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import (
    Constant,
    Graph,
    Kind,
    Level,
    Node,
    Operand,
    Users,
    Value,
    attribute,
    op_of,
)
from .base import NearMiss, Pass, PassReport
from .cost import traffic
from .match import is_last_axis
from .rewrite import common_scope, row_part, zeros

PASS_THROUGH = (Kind.ELEMENTWISE, Kind.LAST_AXIS, Kind.SHAPE)


@dataclass(frozen=True)
class Projection:
    """Queries, keys or values: their value, the product behind it, its rows if it is packed."""

    value: Value
    product: Node
    rows: tuple[int, int] | None

    def part(self, graph: Graph, index: int) -> Constant | None:
        """The weight (1) or bias (2), or the projection's rows of it."""
        if len(self.product.operands) <= index:
            return None
        whole = self.product.operands[index]
        if not isinstance(whole, Constant):
            raise ValueError("a weight is computed")
        return whole if self.rows is None else row_part(graph, whole, self.rows)


@dataclass(frozen=True)
class FuseQkv(Pass):
    """Fires once per attention whose queries, keys and values are products of the same value."""

    name: ClassVar[str] = "fuse-qkv"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)
    tolerance: ClassVar[float] = 2e-6  # a packed product may sum in another order when it is cut

    def run(self, graph: Graph) -> PassReport:
        """Separate or packed (slices of one product), with or without biases."""
        report = PassReport(self.name)
        users = Users(graph)
        place = {id(node): index for index, node in enumerate(graph.nodes)}
        before: dict[int, Node] = {}
        gone: set[int] = set()
        for node in graph.nodes:
            if node.op not in ("paged_attention", "attention"):
                continue
            try:
                found = [_projection(node.value(i)) for i in range(3)]
                replaced = _replaced(found, users)
                first = min((p.product for p in found), key=lambda n: place[id(n)])
                before[id(first)] = _fused(graph, found, replaced)
            except ValueError as reason:
                report.missed.append(NearMiss(node.scope, str(reason)))
                continue
            gone.update(map(id, replaced))
            report.fired.append(node.scope)
        nodes = [n for old in graph.nodes for n in (before.get(id(old)), old) if n is not None]
        graph.nodes = [n for n in nodes if id(n) not in gone]
        return report


def _projection(value: Value) -> Projection:
    """The product behind an operand of attention, through what works per token."""
    while (node := value.node) is not None:
        if node.op == "linear":
            return Projection(value, node, None)
        source = node.operands[0] if node.operands else None
        behind = source.node if isinstance(source, Value) else None
        packed = node.op == "slice" and behind is not None and behind.op == "linear"
        if packed and behind and is_last_axis(node) and attribute(node, "step") == 1:
            rows = int(attribute(node, "start")), int(attribute(node, "end"))
            return Projection(value, behind, rows)
        passes = op_of(node).kind in PASS_THROUGH or node.op == "kv_append"
        if not passes or not isinstance(source, Value):
            break
        value = source
    raise ValueError(f"{node.op if node else 'an input'} %{value.name} is no projection")


def _replaced(found: list[Projection], users: Users) -> list[Node]:
    """The nodes whose values the fused node takes over. ValueError if the three do not fit."""
    products = {id(p.product): p.product for p in found}
    packed = [p.rows is not None for p in found]
    if len({id(p.product.operands[0]) for p in found}) > 1:
        raise ValueError("its projections read different values")
    if any(packed):
        if len(products) > 1 or not all(packed):
            raise ValueError("its projections are packed in part only")
        if len({id(n) for n in users.of(found[0].product.result)}) != 3:
            raise ValueError(
                "its packed projection has other readers, so it would be computed twice"
            )
    elif len(products) != 3:
        raise ValueError("two of its projections are one product")
    return [p.value.node for p in found if p.value.node is not None]


def _fused(graph: Graph, found: list[Projection], replaced: list[Node]) -> Node:
    weights = [p.part(graph, 1) for p in found]
    biases = [p.part(graph, 2) for p in found]
    operands: list[Operand] = [found[0].product.operands[0], *(w for w in weights if w)]
    if any(biases):
        operands += [
            b or zeros(graph, p.value.shape[-1]) for b, p in zip(biases, found, strict=True)
        ]
    scope = common_scope(*(p.product.scope for p in found))
    values = [p.value for p in found]
    fused = Node("qkv", operands, {}, values, scope)
    old = {id(n): n for n in (*replaced, *(p.product for p in found))}.values()
    if not (traffic(old) - traffic([fused])).pays:
        raise ValueError("it would move more bytes than it saves")
    for value in values:
        value.node = fused
    return fused
