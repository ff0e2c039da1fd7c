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

The proof, per state: its new value is exactly concat(past, rows) along its axis; nothing else reads
the past, so nothing reads the old content after the write; and the new value is neither a graph
output nor another state's, so nothing else aliases the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Level, State, Users, attribute, print_node
from .base import NearMiss, Pass, PassReport


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
    """Why the state may not be written in place; empty if it may."""
    assert state.input is not None
    assert state.output is not None
    write = state.output.node
    if write is None or write.op != "concat" or write.operands[0] is not state.input:
        return f"its new value %{state.output.name} is not concat(past, new rows)"
    if len(write.operands) != 2 or write.operands[1] is state.input:
        return f"{print_node(write)} joins more than the past and the new rows"
    if int(attribute(write, "axis")) % state.type.rank != state.axis:
        return f"{print_node(write)} grows another axis than {state.axis}"
    readers = [n for n in users.of(state.input) if n is not write]
    if readers:
        return f"the old content is also read by {print_node(readers[0])}"
    if users.is_root(state.input):
        return "the old content leaves the graph"
    owners = [s.name for s in graph.states.values() if s.output is state.output]
    if len(owners) > 1 or any(v is state.output for v in graph.outputs):
        return f"%{state.output.name} also leaves the graph elsewhere, which would need a copy"
    return ""


def _write_in_place(graph: Graph, state: State) -> None:
    assert state.output is not None
    write = state.output.node
    assert write is not None
    past = state.type.shape[state.axis]
    write.op, write.operands = "kv_append", [write.operands[1]]
    write.attrs = {"state": state.name, "axis": state.axis, "past": past}
    graph.inputs = [v for v in graph.inputs if v is not state.input]
    state.input = state.output = None
