"""Finding out what a subgraph does by running it, instead of by knowing its spellings.

Masks depend on dimensions only and rotations only move and negate elements: both are small, so a
pass evaluates them with the reference interpreter on inputs that tell the candidates apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from ..compiler.ir import (
    Attr,
    Constant,
    DType,
    Graph,
    Interpreter,
    Level,
    Node,
    Operand,
    SymDim,
    TensorType,
    Value,
    symbol,
)

MOVES = frozenset(("reshape", "transpose", "expand", "slice", "concat", "neg"))


def dims_only(graph: Graph) -> frozenset[int]:
    """ids of the values that depend on dimensions and in-graph constants alone."""
    known: set[int] = set()
    for node in graph.nodes:
        if all(
            id(o) in known
            if isinstance(o, Value)
            else not isinstance(o, Constant) or o.data is not None
            for o in node.operands
        ):
            known.update(id(v) for v in node.results)
    return frozenset(known)


def cone(values: Iterable[Value], inside: Callable[[Node], bool]) -> tuple[list[Node], list[Value]]:
    """The nodes that compute `values`, in order, and the values where `inside` ends."""
    nodes: list[Node] = []
    leaves: dict[Value, None] = {}
    done: set[int] = set()
    stack: list[tuple[Value, bool]] = [(v, False) for v in values]
    while stack:
        value, ready = stack.pop()
        node = value.node
        if node is None or not inside(node):
            leaves[value] = None
        elif ready:
            nodes.append(node)
        elif id(node) not in done:
            done.add(id(node))
            stack.append((value, True))
            stack += [(o, False) for o in node.operands if isinstance(o, Value)]
    return nodes, list(leaves)


def evaluate(
    values: Sequence[Value],
    nodes: Sequence[Node],
    given: Mapping[Value, torch.Tensor],
    sizes: Mapping[str, int],
) -> list[torch.Tensor]:
    """Runs a cone: `values` from `given` leaves, with a size for every symbol in `sizes`.

    KeyError if a parameter of the checkpoint is needed.
    """
    carrier = Value("sizes", TensorType(DType.F32, tuple(map(symbol, sizes))))
    graph = Graph("probe", Level.FUSED, [carrier, *given], nodes=list(nodes), outputs=list(values))
    inputs = {value.name: tensor for value, tensor in given.items()}
    inputs["sizes"] = torch.empty(tuple(sizes.values()), device="meta")
    return Interpreter(graph, _no_parameter).run(inputs)


def _no_parameter(name: str) -> torch.Tensor:
    raise KeyError(name)


def signature(values: Iterable[Value], nodes: Sequence[Node]) -> Hashable:
    """Equal for two cones that compute the same: layers repeat, so one run answers for all."""
    index: dict[int, Hashable] = {}

    def name(operand: Operand) -> Hashable:
        if isinstance(operand, Value):
            return index.setdefault(id(operand), (len(index), str(operand.type)))
        return id(operand) if isinstance(operand, Constant) else repr(operand)

    steps = tuple(
        (
            node.op,
            tuple(map(name, node.operands)),
            tuple(sorted((k, repr(v)) for k, v in node.attrs.items())),
            tuple(map(name, node.results)),
        )
        for node in nodes
    )
    return steps, tuple(map(name, values))


def symbols_of(values: Iterable[Value], nodes: Iterable[Node]) -> frozenset[str]:
    """Every symbol in the types and attributes of a cone."""
    dims = [d for v in values for d in v.shape]
    for node in nodes:
        dims += [d for r in node.results for d in r.shape]
        for attr in node.attrs.values():
            dims += _dims(attr)
    return frozenset(s for d in dims if isinstance(d, SymDim) for s in d.symbols)


def integers_of(nodes: Iterable[Node]) -> frozenset[int]:
    """Every integer that a cone mentions: literal operands, attributes, one-element constants."""
    found: set[int] = set()
    for node in nodes:
        for operand in node.operands:
            if isinstance(operand, Constant) and operand.data is not None:
                data = operand.data
                found.update([int(data.reshape(-1)[0])] if data.size == 1 else [])
            elif isinstance(operand, int) and not isinstance(operand, bool):
                found.add(operand)
        for attr in node.attrs.values():
            found.update(_integers(attr))
    return frozenset(found)


def _dims(attr: Attr) -> list[SymDim]:
    if isinstance(attr, SymDim):
        return [attr]
    return [a for a in attr if isinstance(a, SymDim)] if isinstance(attr, tuple) else []


def _integers(attr: Attr) -> list[int]:
    if isinstance(attr, SymDim):
        return [c for m, c in attr.terms if m == ()]
    if isinstance(attr, tuple):
        return [i for a in attr for i in _integers(a)]
    return [attr] if isinstance(attr, int) and not isinstance(attr, bool) else []
