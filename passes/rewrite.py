"""Collecting the rewrites of one run and applying them in one sweep over the node list.

A replacement takes over the *values* of the node it replaces, so users need no change, names stay
readable and a rewrite costs nothing per user. Dead nodes are left to the manager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..compiler.ir import (
    Attr,
    Builder,
    Constant,
    Dim,
    DType,
    Graph,
    Node,
    Operand,
    TensorType,
    Users,
    Value,
    infer,
)


class Rewriter:
    """Rewrites of one graph: match on the old nodes, then `apply` once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.users = Users(graph)
        self.builder = Builder(graph)
        self._before: dict[int, list[Node]] = {}
        self._replaced: dict[int, Node] = {}

    def emit(
        self, root: Node, op: str, operands: Sequence[Operand], attrs: Mapping[str, Attr]
    ) -> Value:
        """A new node in front of `root`, in its scope; its result."""
        node = create(self.builder, op, operands, attrs, root.scope)
        self._before.setdefault(id(root), []).append(node)
        return node.result

    def replace(
        self,
        root: Node,
        op: str,
        operands: Sequence[Operand],
        attrs: Mapping[str, Attr],
        scope: str = "",
    ) -> Node:
        """A new node computes `root`'s values. ValueError if its types differ from theirs."""
        node = become(root, op, operands, attrs, scope)
        self._replaced[id(root)] = node
        return node

    def apply(self) -> None:
        """Rebuilds the graph's node list with everything collected."""
        nodes: list[Node] = []
        for node in self.graph.nodes:
            nodes += self._before.pop(id(node), [])
            nodes.append(self._replaced.pop(id(node), node))
        self.graph.nodes = nodes


def create(
    builder: Builder, op: str, operands: Sequence[Operand], attrs: Mapping[str, Attr], scope: str
) -> Node:
    """A new node with values of its own. ValueError if the operands do not fit the op."""
    node = Node(op, list(operands), dict(attrs), [], scope)
    node.results = [Value(builder.fresh(), kind, node) for kind in infer(node)]
    return node


def become(
    root: Node,
    op: str,
    operands: Sequence[Operand],
    attrs: Mapping[str, Attr],
    scope: str = "",
) -> Node:
    """A new node that owns `root`'s values. ValueError if its types differ from theirs."""
    node = Node(op, list(operands), dict(attrs), root.results, scope or root.scope)
    types = infer(node)
    if types != [v.type for v in root.results]:
        raise ValueError(f"{op} gives {types}, but {root!r} gives {root.results}")
    for value in node.results:
        value.node = node
    return node


def row_part(graph: Graph, whole: Constant, rows: tuple[int, int]) -> Constant:
    """A constant for rows [start, end) of a parameter; ValueError if it is no whole parameter."""
    if whole.parameter is None or whole.rows is not None:
        raise ValueError(f"@{whole.name} is no whole parameter of the checkpoint")
    kind = TensorType(whole.dtype, (rows[1] - rows[0], *whole.shape[1:]))
    part = Constant(f"{whole.name}.{rows[0]}", kind, whole.parameter, role=whole.role)
    part.transposed, part.rows, part.plus = whole.transposed, rows, whole.plus
    return graph.constants.setdefault(part.name, part)


def zeros(graph: Graph, count: Dim) -> Constant:
    """f32 zeros: the bias of a product that has none beside others that have one."""
    assert isinstance(count, int)
    made = Constant(f"zeros.{count}", TensorType(DType.F32, (count,)), data=np.zeros(count, "f4"))
    return graph.constants.setdefault(made.name, made)


def common_scope(*scopes: str) -> str:
    """The innermost module that holds all the given modules; empty scopes do not count."""
    paths = [s.split(".") for s in scopes if s]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
