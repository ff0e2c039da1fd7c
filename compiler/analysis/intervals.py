"""Interval analysis: what every element of every value is bound by, from op semantics and weights.

One sweep in topological order, one rule per op; an op without a rule bounds nothing. A row of an
RMS norm has length sqrt(n) whatever its input, a softmax lies in [0, 1], attention is a convex
combination of values, a rotation keeps lengths, and a linear layer stretches a row at most by its
matrix' Frobenius norm: from these, bounds hold through a whole model without running it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Constant, Graph, Node, Operand, Users, Value
from .bounds import EMPTY, Bound
from .interval_blocks import BLOCK_RULES, qkv
from .interval_elements import ELEMENT_RULES
from .interval_facts import Facts, Rule, row_width, sound
from .interval_rows import ROW_RULES, argmax
from .weights import Weights

RULES: dict[str, Rule] = {**ELEMENT_RULES, **ROW_RULES, **BLOCK_RULES}


def intervals(
    graph: Graph, weights: Weights, longest: int, inputs: Mapping[str, Bound]
) -> dict[int, Bound]:
    """Bounds of every value, by id.

    Args:
        longest: tokens of one sequence; no symbolic dimension is larger.
        inputs: bounds of graph inputs by name; others are unbounded, but a KV past: it holds what
            earlier steps wrote, so it adds nothing to the step's own rows.
    """
    facts = Facts(weights, longest)
    past = _appended_pasts(graph)
    found = {
        id(v): EMPTY if id(v) in past else inputs.get(v.name, Bound()).closed(row_width(v.shape))
        for v in graph.inputs
    }
    for node in graph.nodes:
        operands = [_operand(o, found, facts) for o in node.operands]
        rule = RULES.get(node.op)
        bound = rule(node, operands, facts) if rule else Bound()
        for index, value in enumerate(node.results):
            own = bound if index == 0 else _later_result(node, index, operands, facts)
            found[id(value)] = sound(own).closed(row_width(value.shape))
    return found


def _appended_pasts(graph: Graph) -> set[int]:
    """Pasts of states whose only use is the concatenation with the new rows."""
    users = Users(graph)
    return {
        id(s.input)
        for s in graph.states.values()
        if s.input is not None
        and s.kind == "kv"
        and (node := users.only(s.input)) is not None
        and node.op == "concat"
        and node.results[0] is s.output
    }


def _operand(operand: Operand, found: dict[int, Bound], facts: Facts) -> Bound:
    if isinstance(operand, Value):
        return found[id(operand)]
    if isinstance(operand, Constant):
        norms = facts.norms(operand)
        return norms.bound if norms else Bound()
    return Bound(float(operand), float(operand))


def _later_result(node: Node, index: int, xs: list[Bound], facts: Facts) -> Bound:
    """Of ops with several: topk's second is an index."""
    if node.op == "qkv":
        return qkv(node, xs, facts, index)
    return argmax(node, [], facts) if node.op == "topk" else Bound()
