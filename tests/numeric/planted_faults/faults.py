"""What a planted fault is, and the two ways to plant one.

A fault breaks one run of one pass: either the pass itself (`patch` replaces something it uses, as a
slip in its code would) or its output (`change` edits the graph that it leaves, as a wrong rewrite
would). Both must change the graph; a fault that does not is an error of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from spikeinfer.compiler.ir import Builder, Constant, DType, Graph, Node, Value
from spikeinfer.compiler.ir.graph import Attr
from spikeinfer.passes.base import Pass, PassReport
from spikeinfer.passes.manager import Phase

Change = Callable[[Graph], Node | Constant]
"""Edits a graph; the node that is wrong now (or the constant, for wrong storage)."""


@dataclass(frozen=True)
class Patch:
    """Replaces `owner.name` (which must exist) by `new(old)` while the pass runs."""

    owner: Any
    name: str
    new: Callable[[Any], Any]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The time in which the pass is broken."""
        old = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.new(old))
        try:
            yield
        finally:
            setattr(self.owner, self.name, old)


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Args:
        model: key of a tiny model.
        step: the pass that is broken; ``clean-up:2`` is its third run in the pipeline.
        how: a patch of the pass, or a change of the graph it leaves.
        at: regular expression for the scope of the rewrite to blame. Changed graphs need none: the
            blamed rewrite must hold the changed node.
    """

    name: str
    model: str
    step: str
    how: Patch | Change
    at: str = ""


@dataclass
class Broken:
    """Stands in for a pass in a pipeline and runs it with the fault planted."""

    inner: Pass
    fault: Fault
    name: str = ""
    culprit: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self.requires, self.ensures = self.inner.requires, self.inner.ensures
        self.allowed = self.inner.allowed

    def run(self, graph: Graph) -> PassReport:
        """The pass, broken; what was changed is in `culprit`."""
        if isinstance(self.fault.how, Patch):
            with self.fault.how.applied():
                return self.inner.run(graph)
        report = self.inner.run(graph)
        graph.sweep()
        culprit = self.fault.how(graph)
        self.culprit = culprit.name if isinstance(culprit, Constant) else culprit.results[0].name
        report.fired = report.fired or ["planted"]
        return report


def steps_of(phases: tuple[Phase, ...]) -> list[tuple[str, Pass]]:
    """Every run of a pass, with the name that faults know it by."""
    seen: dict[str, int] = {}
    found = []
    for step in (s for p in phases for s in p.passes):
        count = seen[step.name] = seen.get(step.name, -1) + 1
        found.append((f"{step.name}:{count}" if count else step.name, step))
    return found


def nth(graph: Graph, op: str, index: int = 0, where: str = "") -> Node:
    """The index-th node of an op whose scope contains `where`."""
    return [n for n in graph.nodes if n.op == op and where in n.scope][index]


def attr(
    op: str, name: str, edit: Callable[[Any], Attr], index: int = 0, where: str = ""
) -> Change:
    """Another value of an attribute."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index, where)
        node.attrs[name] = edit(node.attrs.get(name))
        return node

    return change


def no_attr(op: str, name: str, index: int = 0) -> Change:
    """An attribute forgotten."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index)
        del node.attrs[name]
        return node

    return change


def swap(op: str, left: int, right: int, index: int = 0, where: str = "") -> Change:
    """Two operands in each other's place."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index, where)
        node.operands[left], node.operands[right] = node.operands[right], node.operands[left]
        return node

    return change


def drop(op: str, operand: int, index: int = 0, where: str = "") -> Change:
    """An optional operand forgotten."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index, where)
        del node.operands[operand]
        return node

    return change


def become(op: str, other: str, index: int = 0, where: str = "", **attrs: Attr) -> Change:
    """Another op on the same operands."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index, where)
        node.op = other
        node.attrs = dict(attrs)
        return node

    return change


def literal(op: str, edit: Callable[[float], float], index: int = 0, where: str = "") -> Change:
    """Another literal operand, in the index-th node of the op that has one."""

    def change(graph: Graph) -> Node:
        found = [
            n
            for n in graph.nodes
            if n.op == op and where in n.scope and any(isinstance(o, float) for o in n.operands)
        ]
        node = found[index]
        node.operands = [edit(o) if isinstance(o, float) else o for o in node.operands]
        return node

    return change


def borrow(op: str, operand: int, source: int, index: int = 0, *, theirs: int = -1) -> Change:
    """The operand of another node of the same op."""

    def change(graph: Graph) -> Node:
        node, other = nth(graph, op, index), nth(graph, op, source)
        node.operands[operand] = other.operands[operand if theirs < 0 else theirs]
        return node

    return change


def read(op: str, operand: int, value: str, index: int = 0) -> Change:
    """An operand replaced by a value or graph input of that name."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index)
        node.operands[operand] = next(v for v in graph.values() if v.name == value)
        return node

    return change


def stream(op: str, operand: int, source: str, index: int = 0, source_index: int = 0) -> Change:
    """An operand replaced by the result of an earlier node."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index)
        node.operands[operand] = nth(graph, source, source_index).result
        return node

    return change


def constant(op: str, operand: int, index: int = 0, **fields: Any) -> Change:
    """A constant read otherwise: other rows, not transposed, another offset."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index)
        old = node.operands[operand]
        assert isinstance(old, Constant)
        new = Constant(f"{old.name}.planted", old.type, old.parameter, old.data)
        new.transposed, new.rows, new.plus = old.transposed, old.rows, old.plus
        for name, value in fields.items():
            setattr(new, name, value(getattr(old, name)) if callable(value) else value)
        node.operands[operand] = graph.constants[new.name] = new
        return node

    return change


def reversed_axis(op: str, operand: int, axis: int, index: int = 0) -> Change:
    """An operand whose two halves of an axis stand in each other's place (a wrong head group)."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index)
        old = node.operands[operand]
        assert isinstance(old, Value)
        builder, width = Builder(graph), old.shape[axis]
        assert isinstance(width, int)
        halves = [
            builder.node("slice", [old], node.scope, axis=axis, start=a, end=a + width // 2)
            for a in (width // 2, 0)
        ]
        joined = builder.node("concat", [h.result for h in halves], node.scope, axis=axis)
        place = graph.nodes.index(node)
        graph.nodes[place:place] = [*halves, joined]
        node.operands[operand] = joined.result
        return node

    return change


def previous_rows(index: int = 0) -> Change:
    """index_select of the row before the wanted one."""

    def change(graph: Graph) -> Node:
        node, builder = nth(graph, "index_select", index), Builder(graph)
        less = builder.node("sub", [node.operands[1], 1], node.scope)
        kept = builder.node("maximum", [less.result, 0], node.scope)
        place = graph.nodes.index(node)
        graph.nodes[place:place] = [less, kept]
        node.operands[1] = kept.result
        return node

    return change


def decided(of_role: str, /, **fields: Any) -> Change:
    """A wrong decision about the first constant of a role."""

    def change(graph: Graph) -> Constant:
        const = next(c for c in graph.constants.values() if c.role == of_role)
        for name, value in fields.items():
            setattr(const, name, value)
        return const

    return change


def roles_swapped(left: str, right: str) -> Change:
    """Two roles in each other's place."""

    def change(graph: Graph) -> Constant:
        first, second = (
            next(c for c in graph.constants.values() if c.role == role) for role in (left, right)
        )
        first.role, second.role = second.role, first.role
        return first

    return change


def rounded(op: str, dtype: DType) -> Change:
    """What the first node of an op reads is rounded to a lower precision."""

    def change(graph: Graph) -> Node:
        value = nth(graph, op).value(0)
        value.precision = dtype
        assert value.node is not None
        return value.node

    return change


def other_kernel(op: str, kernel: str) -> Change:
    """The kernel of another op."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op)
        node.kernel = kernel
        return node

    return change


def shared_by_shape(walk: Any) -> None:
    """Walk._share_constants that looks at shapes only."""
    first: dict[object, Constant] = {}
    for node in walk.graph.nodes:
        node.operands = [
            first.setdefault((o.dtype, o.shape), o)
            if isinstance(o, Constant) and isinstance(o.data, np.ndarray)
            else o
            for o in node.operands
        ]
