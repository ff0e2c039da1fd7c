"""Find out what each weight is for, from where its product goes; storage formats depend on it.

before:
    graph head fused {
      input %ids : i32[T]
      const @embed : f32[32, 8] = parameter "wte"
      const @norm : f32[8] = parameter "ln_f"
      const @head : f32[32, 8] = parameter "lm_head"
      %x = embedding(@embed, %ids) : f32[T, 8]
      %n = rms_norm(%x, @norm, eps=1e-05) : f32[T, 8]
      %l = linear(%n, @head) : f32[T, 32]
      output %l
    }
after:
    graph head fused {
      input %ids : i32[T]
      const @embed : f32[32, 8] = parameter "wte" role=token_embd
      const @norm : f32[8] = parameter "ln_f" role=norm
      const @head : f32[32, 8] = parameter "lm_head" role=output
      %x = embedding(@embed, %ids) : f32[T, 8]
      %n = rms_norm(%x, @norm, eps=1e-05) : f32[T, 8]
      %l = linear(%n, @head) : f32[T, 32]
      output %l
    }

Names are never looked at: q, k and v are the products that reach an attention's operands, the
output projection the first product behind it, and so on. A tied embedding has the role `output`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Kind, Level, Node, Users, Value, op_of
from ..compiler.ir.rules import shape_of
from .base import Pass, PassReport

PRODUCTS = ("linear", "linear_residual")
PASS_THROUGH = (Kind.ELEMENTWISE, Kind.LAST_AXIS, Kind.SHAPE)


@dataclass(frozen=True)
class AssignRoles(Pass):
    """Sets `Constant.role` of every constant."""

    name: ClassVar[str] = "assign-roles"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)

    def run(self, graph: Graph) -> PassReport:
        """First come, first served: the head, attention, routers, MLPs, then the rest."""
        for const in graph.constants.values():
            const.role = ""
        users = Users(graph)
        _head(graph)
        for node in graph.nodes:
            if node.op in ("attention", "paged_attention"):
                _attention(node, users)
        for node in graph.nodes:
            if node.op == "moe":
                _routers(node)
        for node in graph.nodes:
            _mlp(node)
        for node in graph.nodes:
            _rest(node)
        counts = Counter(c.role for c in graph.constants.values())
        report = PassReport(self.name, fired=sorted(r for r in counts if r))
        report.facts.update(sorted(counts.items()))
        return report


def _mark(operand: object, role: str) -> None:
    if isinstance(operand, Constant) and not operand.role:
        operand.role = role


def _producer(value: object, stop: tuple[str, ...] = ()) -> Node | None:
    """The product a value comes from, through everything that works per token but `stop`."""
    while isinstance(value, Value) and value.node is not None:
        node = value.node
        if node.op in PRODUCTS:
            return node
        if node.op in stop:
            return None
        if node.op in ("concat", "kv_append", "index_select"):
            value = node.operands[1] if node.op == "concat" else node.operands[0]
        elif op_of(node).kind in PASS_THROUGH and node.operands:
            value = node.operands[0]
        else:
            return None
    return None


def _head(graph: Graph) -> None:
    head = _producer(graph.outputs[0])
    if head is not None:
        _mark(head.operands[1], "output")
    tokens = graph.inputs[0]
    for node in graph.nodes:
        if node.op == "embedding":
            _mark(node.operands[0], "token_embd" if _reads(node, tokens) else "position_embd")


def _reads(node: Node, value: Value) -> bool:
    """Whether the ids are the value, perhaps cast."""
    ids = node.operands[1]
    while isinstance(ids, Value) and ids.node is not None and ids.node.op == "cast":
        ids = ids.node.operands[0]
    return ids is value


def _attention(node: Node, users: Users) -> None:
    products = [_producer(o) for o in node.operands[:3]]
    weights = [p.operands[1] if p else None for p in products]
    if len({id(w) for w in weights}) == 1:
        _mark(weights[0], "attn_qkv")
    for weight, role in zip(weights, ("attn_q", "attn_k", "attn_v"), strict=True):
        _mark(weight, role)
    behind = node.result
    while (reader := next(iter(users.of(behind)), None)) is not None:
        if reader.op in PRODUCTS:
            _mark(reader.operands[1], "attn_output")
        through = reader.op == "index_select" or op_of(reader).kind in PASS_THROUGH
        if reader.op in PRODUCTS or not through:
            return
        behind = reader.results[0]


def _mlp(node: Node) -> None:
    start = {"gated_mlp": 1, "moe": 3}.get(node.op)
    if start is not None:
        weights = node.operands[start : start + 3]
        for operand, role in zip(weights, ("ffn_gate", "ffn_up", "ffn_down"), strict=True):
            _mark(operand, role)
        return
    if node.op not in PRODUCTS or not isinstance(node.operands[1], Constant):
        return
    first = _producer(node.operands[0], stop=("add", "sub", "rms_norm", "layer_norm"))
    if first is not None and first.op == "linear" and not node.operands[1].role:
        _mark(first.operands[1], "ffn_up")
        _mark(node.operands[1], "ffn_down")


def _routers(node: Node) -> None:
    """The products that the choice of experts depends on, up to the norm in front of them."""
    pending = [o for o in node.operands[1:3] if isinstance(o, Value)]
    seen: set[int] = set()
    while pending:
        source = pending.pop().node
        if source is None or id(source) in seen or source.op in ("rms_norm", "layer_norm"):
            continue
        seen.add(id(source))
        if source.op in PRODUCTS:
            _mark(source.operands[1], "ffn_gate_inp")
        else:
            pending += [o for o in source.operands if isinstance(o, Value)]


def _rest(node: Node) -> None:
    weighted = node.op in ("rms_norm", "layer_norm")
    for index, operand in enumerate(node.operands):
        if weighted and index == 1:
            _mark(operand, "norm")
        elif index == 1 and node.op in PRODUCTS and shape_of(operand)[:1] == (1,):
            _mark(operand, "ffn_gate_inp")  # one number a token, as a shared expert's gate
        elif index >= 2 and (weighted or node.op in PRODUCTS):
            _mark(operand, "bias")
        else:
            _mark(operand, "other")
