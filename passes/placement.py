"""Rules for what a pass decides about storage and kernels, which the interpreter cannot see.

A wrong storage format, role or kernel changes no number of the reference interpreter: there is one
meaning for all of them. These rules read the decisions from the other side, from the graph that is
left, not from how the passes came to them:

- a constant with a role stands where that role is read; q, k and v are told by which operand of an
  attention their product flows into;
- a packed matrix is read by matrix operands only, and a twin that is stored plain keeps the rows,
  transposition and offset of its parameter;
- every node of a placed graph has a kernel for its own op.

What a *legal* format costs in accuracy is no error of a pass: the golden gate measures it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..compiler.ir import Constant, Graph, Kind, Level, Node, Users, Value, op_of, print_node
from .assign_storage import MATRIX_OPERANDS

PLAIN = frozenset(("array", "f32", "f16", "bf16", "f64", "i64", "i32", "u8", "bool"))
ATTENTION = ("attention", "paged_attention")
_PLACES: dict[str, tuple[tuple[str, int], ...]] = {
    "token_embd": (("embedding", 0),),
    "position_embd": (("embedding", 0),),
    "norm": (("rms_norm", 1), ("layer_norm", 1)),
    "ffn_gate": (("gated_mlp", 1), ("moe", 3)),
    "ffn_up": (("gated_mlp", 2), ("moe", 4), ("linear", 1)),
    "ffn_down": (("gated_mlp", 3), ("moe", 5), ("linear", 1), ("linear_residual", 1)),
    "attn_q": (("linear", 1), ("qkv", 1)),
    "attn_k": (("linear", 1), ("qkv", 2)),
    "attn_v": (("linear", 1), ("qkv", 3)),
    "attn_qkv": (("linear", 1), ("qkv", 1), ("qkv", 2), ("qkv", 3)),
    "attn_output": (("linear", 1), ("linear_residual", 1)),
    "output": (("linear", 1), ("embedding", 0)),
}
_OPERAND = {"attn_q": 0, "attn_k": 1, "attn_v": 2}


def misplaced(graph: Graph) -> Iterator[str]:
    """Every broken rule, as a sentence that names the constant, state or node."""
    users = Users(graph)
    for node in graph.nodes:
        for index, operand in enumerate(node.operands):
            if isinstance(operand, Constant):
                yield from _constant(users, node, index, operand)
        if graph.level is Level.PLACED and node.kernel.rpartition(".")[2] != node.op:
            yield f"{print_node(node)}: the kernel is for another op."


def _constant(users: Users, node: Node, index: int, const: Constant) -> Iterator[str]:
    where = f"@{const.name}, operand {index} of {node.op} in {node.scope or 'the model'}"
    places = _PLACES.get(const.role)
    if places is not None and (node.op, index) not in places:
        yield f"{where}, has the role {const.role}."
    if const.role in _OPERAND and node.results:
        found = attended(users, node.results[index - 1 if node.op == "qkv" else 0])
        if found and _OPERAND[const.role] not in found:
            yield f"{where}, has the role {const.role} but is operand {min(found)} of attention."
    matrix = index in MATRIX_OPERANDS.get(node.op, ())
    if const.format and const.format not in PLAIN and not matrix:
        yield f"{where}, is stored as {const.format}, but only matrices may be."
    if const.format == "array" and matrix:
        yield f"{where}, is a matrix without a storage format of its own."


def attended(users: Users, value: Value) -> frozenset[int]:
    """Which of an attention's q, k, v the value flows into, through everything token-wise."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [value]
    while stack:
        here = stack.pop()
        for node in users.of(here):
            if node.op in ATTENTION:
                found.update(i for i, o in enumerate(node.operands[:3]) if o is here)
            elif id(node) not in seen and _passes_through(node):
                seen.add(id(node))
                stack += node.results
    return frozenset(found)


def _passes_through(node: Node) -> bool:
    if node.op in ("linear", "linear_residual", "gated_mlp"):
        return False
    tokenwise = (Kind.ELEMENTWISE, Kind.LAST_AXIS, Kind.SHAPE)
    return node.op in ("concat", "kv_append", "slice") or op_of(node).kind in tokenwise
