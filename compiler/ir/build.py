"""Making nodes: result types come from the op's rule, names are unique."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .graph import Attr, Constant, Graph, Node, Operand, Value
from .ops import infer, op_of
from .types import DType, TensorType


class Builder:
    """Creates nodes for one graph.

    `emit` appends to the graph; `node` only makes the node, for a pass that collects a new list.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._used = {v.name for v in graph.values()}
        self._next = len(self._used)

    def fresh(self, stem: str = "") -> str:
        """A value name not in use: the stem if free, else a number (behind the stem)."""
        name = stem
        while not name or name in self._used:
            name, self._next = f"{stem}_{self._next}" if stem else f"{self._next}", self._next + 1
        self._used.add(name)
        return name

    def node(
        self,
        op: str,
        operands: Sequence[Operand],
        scope: str = "",
        *,
        name: str = "",
        **attrs: Attr,
    ) -> Node:
        """A new node with inferred result types. Raises ValueError if the operands do not fit."""
        node = Node(op, list(operands), dict(attrs), [], scope)
        op_of(node)
        node.results = [Value(self.fresh(name), t, node) for t in infer(node)]
        return node

    def emit(
        self,
        op: str,
        operands: Sequence[Operand],
        scope: str = "",
        *,
        name: str = "",
        **attrs: Attr,
    ) -> Value:
        """Appends a node with one result and returns the result."""
        node = self.node(op, operands, scope, name=name, **attrs)
        self.graph.nodes.append(node)
        return node.result

    def input(self, name: str, kind: TensorType) -> Value:
        """Adds a graph input."""
        value = Value(self.fresh(name), kind)
        self.graph.inputs.append(value)
        return value

    def parameter(self, name: str, kind: TensorType) -> Constant:
        """The constant for a traced parameter; one per parameter name."""
        found = self.graph.constants.get(name)
        if found is None:
            found = self.graph.constants[name] = Constant(name, kind, parameter=name)
        return found

    def data(self, name: str, array: npt.NDArray[np.generic]) -> Constant:
        """A small constant kept in the graph; a number is put behind the name if it is taken."""
        unique = name
        while unique in self.graph.constants:
            unique, self._next = f"{name}_{self._next}", self._next + 1
        kind = TensorType(_DTYPES[array.dtype.name], tuple(array.shape))
        const = Constant(unique, kind, data=np.ascontiguousarray(array))
        self.graph.constants[unique] = const
        return const


_DTYPES = {
    "float32": DType.F32,
    "float16": DType.F16,
    "float64": DType.F64,
    "int64": DType.I64,
    "int32": DType.I32,
    "uint8": DType.U8,
    "bool": DType.BOOL,
}
