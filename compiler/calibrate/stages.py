"""Cuts a graph where a matrix waits for its input: all tokens must be known before it is visited.

    stage 0: embedding, norm               visits nothing
    stage 1: q, k, v, rope, attention      visits q, k, v: their input is known
    stage 2: output, residual, norm        visits the output projection
    stage 3: gated MLP, norm               visits gate and up, then down
    ...

Inside a stage a window goes from its first node to its last without waiting for the others, so that
only what a later stage reads is kept for all windows: in a llama the stream and one normed copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Constant, Graph, Node, Value


@dataclass(frozen=True)
class Places:
    """Where an op has its matrices.

    Args:
        inner: operands that multiply the op's input.
        outer: operands that multiply act(gate(x)) * up(x).
        needs: operands that decide what the matrices see, biases of gate and up included if they
            are computed.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...] = ()
    needs: tuple[int, ...] = (0,)


PLACES: Mapping[str, Places] = {
    "linear": Places((1,)),
    "linear_residual": Places((1,)),
    "qkv": Places((1, 2, 3)),
    "gated_mlp": Places((1, 2), (3,)),
    "moe": Places((3, 4), (5,), (0, 2, 6, 7)),
}


@dataclass
class Stage:
    """Nodes that are computed together.

    Args:
        visits: nodes whose matrices are visited first, with those that no earlier node had.
        nodes: what is computed then, in order; a visited node whose result nobody needs is not.
        reads: values from earlier stages.
        gives: values that later stages read, or outputs.
        keeps: every value that must survive the stage, its own or older.
        rereads: constants that later stages use as well.
    """

    visits: list[tuple[Node, list[Constant]]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)
    gives: list[Value] = field(default_factory=list)
    keeps: frozenset[int] = frozenset()
    rereads: frozenset[str] = frozenset()


def needs(node: Node) -> list[Value]:
    """What must be known of all tokens before the node's matrices can be visited."""
    operands = (node.operands[i] for i in PLACES[node.op].needs if i < len(node.operands))
    return [o for o in operands if isinstance(o, Value)]


def plan(graph: Graph, outputs: bool) -> list[Stage]:
    """The stages of a graph, in order; what neither a visit nor (if wanted) an output needs is out.

    A constant that several nodes multiply by is visited at the first of them.
    """
    first = _first_uses(graph)
    computed = _needed(graph, first, outputs)
    stages, made = [Stage()], set[int]()
    for node in graph.nodes:
        new = first.get(id(node))
        if new and any(id(v) in made for v in needs(node)):
            stages.append(Stage())
            made = set()
        if new:
            stages[-1].visits.append((node, new))
        if id(node) in computed:
            stages[-1].nodes.append(node)
            made.update(map(id, node.results))
    _connect(stages, graph.outputs if outputs else [])
    return stages


def _first_uses(graph: Graph) -> dict[int, list[Constant]]:
    """By node: stored matrices that no node before it multiplies by."""
    seen: set[str] = set()
    first: dict[int, list[Constant]] = {}
    for node in graph.nodes:
        places = PLACES.get(node.op)
        if places is None or not isinstance(node.operands[0], Value):
            continue
        for index in places.inner + places.outer:
            const = node.operands[index]
            if isinstance(const, Constant) and const.parameter and const.name not in seen:
                seen.add(const.name)
                first.setdefault(id(node), []).append(const)
    return first


def _needed(graph: Graph, first: Mapping[int, object], outputs: bool) -> set[int]:
    """Nodes that have to be computed."""
    live = set(map(id, graph.outputs)) if outputs else set()
    computed: set[int] = set()
    for node in reversed(graph.nodes):
        if any(id(v) in live for v in node.results):
            computed.add(id(node))
            live.update(id(o) for o in node.operands if isinstance(o, Value))
        if id(node) in first:
            live.update(map(id, needs(node)))
    return computed


def _connect(stages: list[Stage], outputs: list[Value]) -> None:
    """Fills in what each stage reads, gives and keeps, from the last one to the first."""
    later, constants = {id(v) for v in outputs}, set[str]()
    for stage in reversed(stages):
        stage.keeps, stage.rereads = frozenset(later), frozenset(constants)
        constants |= {o.name for n in stage.nodes for o in n.operands if isinstance(o, Constant)}
        made = {id(v) for node in stage.nodes for v in node.results}
        read = {id(o): o for n in stage.nodes for o in n.operands if isinstance(o, Value)}
        stage.reads = [v for key, v in read.items() if key not in made]
        results = [v for node in stage.nodes for v in node.results]
        stage.gives = [v for v in results if id(v) in later]
        later |= {id(v) for v in stage.reads}
        later |= {id(v) for node, _ in stage.visits for v in needs(node)}
