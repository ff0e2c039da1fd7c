"""A graph cut into pieces that run one after the other, so that few weights are alive at a time.

Every piece is a graph of its own: it reads the whole graph's inputs (they are small, and give the
symbols their sizes) and values of earlier pieces, and gives what later pieces read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ..ir import Constant, Graph, Node, Value

WEIGHT_BYTES = 2 << 30
"""Of one piece's parameters as f32; a single op may have more."""


@dataclass(frozen=True)
class Segment:
    """One piece.

    Args:
        graph: its inputs are the whole graph's, then `reads`; its outputs are `gives`.
        reads: values of earlier pieces.
        gives: values that later pieces read, and the whole graph's first output.
    """

    graph: Graph
    reads: tuple[Value, ...]
    gives: tuple[Value, ...]

    @property
    def parameters(self) -> set[str]:
        """Names of the checkpoint's parameters that the piece reads."""
        return {c.parameter for c in self.graph.constants.values() if c.parameter is not None}


def segments(graph: Graph, weight_bytes: int = WEIGHT_BYTES) -> list[Segment]:
    """The pieces in order; one, if all parameters fit."""
    pieces = _cut(graph.nodes, weight_bytes)
    later: dict[int, Value] = {id(graph.outputs[0]): graph.outputs[0]}
    known = {id(v) for v in graph.inputs}
    found = []
    for nodes in reversed(pieces):
        made = {id(v): v for node in nodes for v in node.results}
        read = {id(o): o for n in nodes for o in n.operands if isinstance(o, Value)}
        reads = tuple(v for key, v in read.items() if key not in made and key not in known)
        gives = tuple(v for key, v in made.items() if key in later)
        found.append(Segment(_part(graph, nodes, reads, gives), reads, gives))
        later.update((id(v), v) for v in reads)
    return found[::-1]


def _cut(nodes: Iterable[Node], weight_bytes: int) -> list[list[Node]]:
    """Where the next op's new parameters would be too many."""
    pieces: list[list[Node]] = [[]]
    size, seen = 0, set[str]()
    for node in nodes:
        new = {c.name: c for c in node.operands if isinstance(c, Constant) and c.name not in seen}
        added = sum(_bytes(const) for const in new.values())
        if pieces[-1] and size + added > weight_bytes:
            pieces.append([])
            size, seen = 0, set()
        size += added
        seen.update(new)
        pieces[-1].append(node)
    return pieces


def _bytes(const: Constant) -> int:
    return 4 * prod(d for d in const.shape if isinstance(d, int)) if const.parameter else 0


def _part(
    graph: Graph, nodes: list[Node], reads: tuple[Value, ...], gives: tuple[Value, ...]
) -> Graph:
    """States written in place belong to the piece whose ops name them; pasts are inputs."""
    constants = {o.name: o for n in nodes for o in n.operands if isinstance(o, Constant)}
    named = {value for node in nodes for value in node.attrs.values() if isinstance(value, str)}
    states = {name: s for name, s in graph.states.items() if name in named and s.input is None}
    return Graph(
        graph.name, graph.level, [*graph.inputs, *reads], constants, states, nodes, list(gives)
    )
