"""Turn a functional KV cache into an in-place write, where liveness proves that it is safe.

before:
    graph cache fused {
      input %past : f32[B, 2, P, 8]
      input %new : f32[B, 2, S, 8]
      state layers.0.key : f32[B, 2, P, 8] axis=2 kind=kv input=%past output=%all
      %all = concat(%past, %new, axis=2) : f32[B, 2, P+S, 8]
      %y = neg(%all) : f32[B, 2, P+S, 8]
      output %y
    }
after:
    graph cache fused {
      input %new : f32[B, 2, S, 8]
      state layers.0.key : f32[B, 2, P, 8] axis=2 kind=kv
      %all = kv_append(%new, state="layers.0.key", axis=2, past=P) : f32[B, 2, P+S, 8]
      %y = neg(%all) : f32[B, 2, P+S, 8]
      output %y
    }

The proof, per state: the past is its own, and its new value is exactly concat(past, rows) along its
axis, so that it is written once; nothing else reads the past or a view of it, so nothing reads the
old content after the write, in whatever order nodes run; and neither the new value nor a view of it
leaves the graph, so nothing else aliases the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Level, Node, State, Users, Value, attribute, print_node
from .base import NearMiss, Pass, PassReport

VIEWS = ("reshape", "transpose", "slice", "expand")
"""Ops whose result may lie in their operand's bytes."""


@dataclass(frozen=True)
class AliasKv(Pass):
    """Rewrites every state that passes the proof; refusals name the blocking node."""

    name: ClassVar[str] = "alias-kv"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)

    def run(self, graph: Graph) -> PassReport:
        """Fires once per state."""
        report = PassReport(self.name)
        users = Users(graph)
        for state in graph.states.values():
            if state.input is None or state.kind != "kv":
                continue
            reason = blocker(graph, state, users)
            if reason:
                report.missed.append(NearMiss(state.name, reason))
            else:
                _write_in_place(graph, state)
                report.fired.append(state.name)
        return report


def blocker(graph: Graph, state: State, users: Users) -> str:
    """Why the state may not be written in place, naming the node in the way; empty if it may."""
    past, new = state.input, state.output
    assert past is not None
    assert new is not None
    write = new.node
    if write is None:
        return f"its new value is the graph input %{new.name}: nothing is appended"
    return (
        _shared(graph, state, past, write)
        or _not_appended(state, past, write)
        or _read_elsewhere(graph, past, write, users)
        or _escapes(graph, new, users)
    )


def _shared(graph: Graph, state: State, past: Value, write: Node) -> str:
    """Another state has the same past or new value, or takes this one's past over."""
    for other in graph.states.values():
        if other is not state and other.input is past:
            return f"state {other.name} has the same past %{past.name}"
        if other is not state and other.output is state.output:
            return f"state {other.name} has the same new value of {print_node(write)}"
        if other.output is past:
            return f"its past %{past.name} is the new value of state {other.name}"
    return ""


def _not_appended(state: State, past: Value, write: Node) -> str:
    """The new value is not the past with new rows behind it, written once."""
    if write.op != "concat":
        return f"its new value is not concat(past, new rows) but {print_node(write)}"
    first = write.operands[0]
    if first is not past and past in write.operands:
        return f"{print_node(write)} puts the past behind the new rows"
    if isinstance(first, Value) and _joins(first.node, past):
        assert first.node is not None
        return f"it is written twice: by {print_node(first.node)} and by {print_node(write)}"
    if first is not past:
        return f"{print_node(write)} does not start with the past %{past.name}"
    if len(write.operands) != 2 or write.operands[1] is past:
        return f"{print_node(write)} joins more than the past and the new rows"
    if int(attribute(write, "axis")) % state.type.rank != state.axis:
        return f"{print_node(write)} grows another axis than {state.axis}"
    return ""


def _joins(node: Node | None, past: Value) -> bool:
    return node is not None and node.op == "concat" and past in node.operands


def _read_elsewhere(graph: Graph, past: Value, write: Node, users: Users) -> str:
    """Something but the write reads the past or a view of it, or it leaves the graph."""
    for alias in _aliases(past, users):
        through = "" if alias is past else f", of which {_view(alias)} is a view,"
        if users.is_root(alias):
            return f"the past %{past.name}{through} leaves the graph"
        for reader in users.of(alias):
            if reader is not write and (reader.op not in VIEWS or not _used(reader, users)):
                when = "after" if _follows(graph, reader, write) else "before"
                how = f"is read {when} the write by {print_node(reader)}"
                return f"the past %{past.name}{through} {how}"
    return ""


def _escapes(graph: Graph, new: Value, users: Users) -> str:
    """The new value or a view of it leaves the graph besides as the state, which needs a copy."""
    outside = [*graph.outputs, *(s.output for s in graph.states.values() if s.output is not new)]
    for alias in _aliases(new, users):
        if alias in outside:
            view = "" if alias is new else f" as its view {_view(alias)}"
            return f"the new value %{new.name} also leaves the graph{view}, which would need a copy"
    return ""


def _aliases(value: Value, users: Users) -> Iterator[Value]:
    """The value and all its views."""
    yield value
    for node in users.of(value):
        if node.op in VIEWS:
            yield from _aliases(node.result, users)


def _view(value: Value) -> str:
    assert value.node is not None
    return print_node(value.node)


def _used(node: Node, users: Users) -> bool:
    return bool(users.of(node.result)) or users.is_root(node.result)


def _follows(graph: Graph, node: Node, write: Node) -> bool:
    return graph.nodes.index(node) > graph.nodes.index(write)


def _write_in_place(graph: Graph, state: State) -> None:
    assert state.output is not None
    write = state.output.node
    assert write is not None
    past = state.type.shape[state.axis]
    write.op, write.operands = "kv_append", [write.operands[1]]
    write.attrs = {"state": state.name, "axis": state.axis, "past": past}
    graph.inputs = [v for v in graph.inputs if v is not state.input]
    state.input = state.output = None
