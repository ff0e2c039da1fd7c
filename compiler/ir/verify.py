"""The verifier: what must hold of a graph at each level. Run after every pass."""

from __future__ import annotations

from collections.abc import Iterator

from .graph import Constant, Graph, Level, Node, Value
from .ops import OPS, infer
from .text import print_node
from .types import HALVES, DType, SymDim


class VerifyError(ValueError):
    """A graph that breaks a rule; the message names the node and the rule."""


def verify(graph: Graph) -> None:
    """Raises VerifyError with every violation found, one a line."""
    problems = list(violations(graph))
    if problems:
        raise VerifyError(f"graph {graph.name}:\n  " + "\n  ".join(problems))


def violations(graph: Graph) -> Iterator[str]:
    """Every broken rule, as a sentence."""
    defined = {id(v) for v in graph.inputs}
    names: set[str] = {v.name for v in graph.inputs}
    for node in graph.nodes:
        yield from (f"{print_node(node)}: {p}" for p in _node(graph, node, defined))
        for value in node.results:
            if value.name in names:
                yield f"%{value.name} is defined twice"
            names.add(value.name)
            defined.add(id(value))
    for root in graph.roots():
        if id(root) not in defined:
            yield f"%{root.name} leaves the graph but is not defined in it"
        if root.precision:
            yield f"%{root.name} leaves the graph: its precision is its type's"
    yield from _states(graph)
    if graph.level is Level.PLACED:
        yield from _placed(graph)


def _node(graph: Graph, node: Node, defined: set[int]) -> Iterator[str]:
    for operand in node.operands:
        if isinstance(operand, Value) and id(operand) not in defined:
            yield f"%{operand.name} is used before it is defined"
        if isinstance(operand, Constant) and graph.constants.get(operand.name) is not operand:
            yield f"@{operand.name} is not a constant of this graph"
    if node.op not in OPS or graph.level not in OPS[node.op].levels:
        yield f"{node.op} is not allowed at level {graph.level.value}"
        return
    for value in node.results:
        if value.precision and (value.dtype is not DType.F32 or value.precision not in HALVES):
            yield f"%{value.name} : {value.type} cannot have precision {value.precision.value}"
    if any(v.node is not node for v in node.results):
        yield "a result does not point back to its node"
    try:
        expected = infer(node)
    except (ValueError, TypeError) as error:
        yield str(error)
        return
    if [v.type for v in node.results] != expected:
        yield f"its operands give {', '.join(map(str, expected))}"


def _states(graph: Graph) -> Iterator[str]:
    for state in graph.states.values():
        if (state.input is None) != (state.output is None):
            yield f"state {state.name} has only one of input and output"
        if state.input is not None and state.input.type != state.type:
            yield f"state {state.name} is {state.type} but its input is {state.input.type}"
    for node in graph.nodes:
        for name in ("state", "key", "value"):
            named = node.attrs.get(name)  # `full` has a value as well: a number, not a state
            if isinstance(named, str) and named not in graph.states:
                yield f"{print_node(node)}: no state {named!r}"


def _placed(graph: Graph) -> Iterator[str]:
    for const in graph.constants.values():
        if not const.format:
            yield f"@{const.name} has no storage format"
        if any(isinstance(d, SymDim) for d in const.shape):
            yield f"@{const.name} has a symbolic dimension"
    for state in graph.states.values():
        if not state.format:
            yield f"state {state.name} has no storage format"
    for node in graph.nodes:
        if not node.kernel:
            yield f"{print_node(node)}: no kernel"
