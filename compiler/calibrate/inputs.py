"""What the matrices of a node see of one chunk of tokens, by expert (0 for a plain matrix)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from ..ir import Node, Operand, Value, attribute, op_of
from ..ir.fused import gated
from .moments import Rows

Env: TypeAlias = Mapping[int, Tensor]
"""Values of one chunk of windows, by id."""

Weight: TypeAlias = Callable[[Operand], Tensor]
"""A constant's values as f32."""


def direct(node: Node, env: Env) -> Rows:
    """What the inner matrices see: the node's input, of experts what is routed to them."""
    x = env[id(node.operands[0])]
    tokens = x.reshape(-1, x.shape[-1])
    if node.op != "moe":
        return {0: tokens}
    ids = env[id(node.operands[2])]
    chosen = ids.reshape(len(tokens), -1)
    return {e: tokens[(chosen == e).any(-1)] for e in chosen.unique().tolist()}


def hidden(node: Node, env: Env, weight: Weight) -> Rows:
    """What the down projection of a gated MLP or of experts sees: act(gate(x)) * up(x)."""
    names = op_of(node).attrs.keys() & {"activation", "limit", "alpha"}
    attrs = {name: attribute(node, name) for name in names}
    first = 3 if node.op == "moe" else 1
    gate, up = (weight(node.operands[first + i]) for i in range(2))
    has_biases = len(node.operands) > 6 if node.op == "moe" else attribute(node, "biases")
    operands = node.operands[first + 3 : first + 5] if has_biases else []
    biases = [env[id(o)] if isinstance(o, Value) else weight(o) for o in operands]
    if node.op != "moe":
        return {0: gated(direct(node, env)[0], gate, up, *biases, **attrs)}
    return {
        e: gated(x, gate[e], up[e], *(b[e] for b in biases), **attrs)
        for e, x in direct(node, env).items()
    }
