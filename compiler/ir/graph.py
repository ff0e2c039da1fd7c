"""The graph: values, nodes, constants and states in SSA form.

A node's operands are values, constants or literal scalars. Constants are named tensors that stay
in the checkpoint (`parameter`) or, when small, in the graph itself (`data`). States live across
steps: traced graphs read a state's `input` value and produce its `output` value; after KV aliasing
both are None and ops name the state in an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from .types import DType, Shape, SymDim, TensorType


class Level(Enum):
    """How far a graph has been lowered; each level has its own verifier table."""

    TRACED = "traced"
    FUSED = "fused"
    PLACED = "placed"


Scalar = bool | int | float
AttrItem = bool | int | float | str | SymDim | DType
Attr = AttrItem | tuple[AttrItem, ...]


@dataclass(eq=False)
class Value:
    """One SSA value: a graph input or a node's result. Compared by identity.

    `precision` is the narrower float that a result is rounded to after it was computed, printed
    ``f32[T, 8] as f16``; readers see the rounded value, in the value's own dtype. None: it is not
    rounded.
    """

    name: str
    type: TensorType
    node: Node | None = None
    precision: DType | None = None

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(eq=False)
class Constant:
    """A named constant tensor. Exactly one of `parameter` and `data` is set.

    Args:
        name: unique in the graph.
        type: shape and compute dtype.
        parameter: the traced parameter whose stored tensor it is.
        data: the tensor itself, for small buffers such as RoPE's inverse frequencies.
        transposed: the constant is the parameter's transpose (a [k, n] weight used as [n, k]); of
            a stack of matrices, each one's.
        rows: first and last + 1 row of the (transposed) parameter, and their distance if not 1, if
            not all (packed gate and up); of a stack [e, n, k], of each matrix.
        plus: added to the parameter's values (norms that scale by 1 + weight).
        format: storage format at the placed level, such as ``q4_k``; empty before.
        role: what the tensor is for at the placed level, such as ``ffn_down``; empty before.
    """

    name: str
    type: TensorType
    parameter: str | None = None
    data: npt.NDArray[np.generic] | None = None
    transposed: bool = False
    rows: tuple[int, ...] | None = None
    plus: float = 0.0
    format: str = ""
    role: str = ""

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def part_of(self, stored: Any) -> Any:
        """This constant's view of its parameter's tensor (without `plus`): transposed, its rows."""
        whole = stored.mT if self.transposed else stored
        if self.rows is None:
            return whole
        rows = slice(*self.rows)
        return whole[rows] if whole.ndim == 1 else whole[..., rows, :]

    def __repr__(self) -> str:
        return f"@{self.name}: {self.type}"


@dataclass(eq=False)
class State:
    """Memory that survives a step.

    Args:
        name: such as ``layers.0.key``.
        type: the past's type, such as ``f32[B, 3, P, 64]``.
        axis: the axis that grows.
        kind: ``kv`` (grows by concatenation) or ``fixed`` (replaced each step).
        input: value that holds the past; None once the state is written in place.
        output: value that holds past and new; None once the state is written in place.
        format: storage format of the buffer at the placed level (f32, f16, int8, int4).
    """

    name: str
    type: TensorType
    axis: int
    kind: str = "kv"
    input: Value | None = None
    output: Value | None = None
    format: str = ""


Tensor = Value | Constant
Operand = Value | Constant | bool | int | float


@dataclass(eq=False)
class Node:
    """One operation; `scope` is the module path it came from, `kernel` is set when placed."""

    op: str
    operands: list[Operand]
    attrs: dict[str, Attr]
    results: list[Value]
    scope: str = ""
    kernel: str = ""

    @property
    def result(self) -> Value:
        """The only result; ValueError if there are several."""
        (value,) = self.results
        return value

    def tensor(self, index: int) -> Tensor:
        """Operand `index`, which must be a value or a constant (TypeError otherwise)."""
        operand = self.operands[index]
        if not isinstance(operand, Value | Constant):
            raise TypeError(f"operand {index} of {self.op} is the scalar {operand!r}")
        return operand

    def value(self, index: int) -> Value:
        """Operand `index`, which must be a value (TypeError otherwise)."""
        operand = self.operands[index]
        if not isinstance(operand, Value):
            raise TypeError(f"operand {index} of {self.op} is {operand!r}, not a value")
        return operand

    def __repr__(self) -> str:
        return f"{', '.join(v.name for v in self.results)} = {self.op}(...) in {self.scope}"


@dataclass
class Graph:
    """A function over tensors, in topological order."""

    name: str
    level: Level = Level.TRACED
    inputs: list[Value] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def roots(self) -> list[Value]:
        """Values that must stay alive: outputs and the states' outputs."""
        return self.outputs + [s.output for s in self.states.values() if s.output is not None]

    @property
    def is_ragged(self) -> bool:
        """Whether it has the streaming interface: flat tokens, paged states."""
        return any(v.name == "slots" for v in self.inputs)

    @property
    def is_stepwise(self) -> bool:
        """Whether a step is one token of each sequence."""
        return self.input("tokens").shape[-1] == 1

    def input(self, name: str) -> Value:
        """The graph input of that name; KeyError names it."""
        for value in self.inputs:
            if value.name == name:
                return value
        raise KeyError(name)

    def values(self) -> Iterator[Value]:
        """Inputs, then every result in order."""
        yield from self.inputs
        for node in self.nodes:
            yield from node.results

    def fresh(self, stem: str) -> str:
        """A value name that is not in use."""
        used = {v.name for v in self.values()}
        if stem not in used:
            return stem
        return next(f"{stem}_{i}" for i in range(1, len(used) + 2) if f"{stem}_{i}" not in used)

    def replace(self, changes: Mapping[Value, Value]) -> None:
        """Every use of a key (operands, outputs, states) becomes a use of its replacement."""

        def final(value: Value) -> Value:
            while value in changes:
                value = changes[value]
            return value

        for node in self.nodes:
            node.operands = [final(o) if isinstance(o, Value) else o for o in node.operands]
        self.outputs = [final(v) for v in self.outputs]
        for state in self.states.values():
            state.output = final(state.output) if state.output is not None else None

    def sweep(self) -> int:
        """Drops nodes and constants that nothing needs; the number of nodes dropped."""
        from .ops import has_effect

        live = set(map(id, self.roots()))
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if has_effect(node) or any(id(v) in live for v in node.results):
                kept.append(node)
                live.update(id(o) for o in node.operands if isinstance(o, Value))
        dropped = len(self.nodes) - len(kept)
        self.nodes = kept[::-1]
        used = {id(o) for n in self.nodes for o in n.operands if isinstance(o, Constant)}
        self.constants = {k: c for k, c in self.constants.items() if id(c) in used}
        return dropped


class Users:
    """Who uses each value; a snapshot that a pass takes once."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for operand in node.operands:
                if isinstance(operand, Value):
                    self._nodes.setdefault(id(operand), []).append(node)
        self._roots = set(map(id, graph.roots()))

    def of(self, value: Value) -> list[Node]:
        """Nodes that read the value, once per operand."""
        return self._nodes.get(id(value), [])

    def is_root(self, value: Value) -> bool:
        """Whether the value leaves the graph."""
        return id(value) in self._roots

    def only(self, value: Value) -> Node | None:
        """The single node that reads the value, or None if there are others or it is a root."""
        users = self.of(value)
        return users[0] if len(users) == 1 and not self.is_root(value) else None


def topological(nodes: Iterable[Node]) -> list[Node]:
    """The nodes reordered so that each follows its operands; otherwise in the given order.

    Raises ValueError on a cycle.
    """
    pending = list(nodes)
    own = {id(v) for n in pending for v in n.results}
    done: set[int] = set()
    ordered: list[Node] = []
    while pending:
        waiting: list[Node] = []
        for node in pending:
            needs = (id(o) for o in node.operands if isinstance(o, Value) and id(o) in own)
            if all(n in done for n in needs):
                ordered.append(node)
                done.update(id(v) for v in node.results)
            else:
                waiting.append(node)
        if len(waiting) == len(pending):
            raise ValueError(f"cycle through {waiting[0]!r}")
        pending = waiting
    return ordered
