"""Raise experts that are gathered for each token and run one by one to moe.

before:
    input %x : f32[T, 8]
    input %w : f32[T, 2]
    input %i : i64[T, 2]
    const @gate_up : f32[4, 32, 8] = parameter "experts.gate_up_proj"
    const @down : f32[4, 8, 16] = parameter "experts.down_proj"
    %x1 = reshape(%x, shape=[T, 1, 8]) : f32[T, 1, 8] in mlp.experts
    %x2 = expand(%x1, shape=[T, 2, 8]) : f32[T, 2, 8] in mlp.experts
    %x3 = reshape(%x2, shape=[2*T, 8, 1]) : f32[2*T, 8, 1] in mlp.experts
    %ids = reshape(%i, shape=[2*T]) : i64[2*T] in mlp.experts
    %gu1 = index_select(@gate_up, %ids, axis=0) : f32[2*T, 32, 8] in mlp.experts
    %gu2 = matmul(%gu1, %x3) : f32[2*T, 32, 1] in mlp.experts
    %gu = reshape(%gu2, shape=[2*T, 32]) : f32[2*T, 32] in mlp.experts
    %g = slice(%gu, axis=1, start=0, end=16) : f32[2*T, 16] in mlp.experts
    %u = slice(%gu, axis=1, start=16, end=32) : f32[2*T, 16] in mlp.experts
    %a = silu(%g) : f32[2*T, 16] in mlp.experts.act_fn
    %h = mul(%a, %u) : f32[2*T, 16] in mlp.experts
    %d1 = index_select(@down, %ids, axis=0) : f32[2*T, 8, 16] in mlp.experts
    %h1 = reshape(%h, shape=[2*T, 16, 1]) : f32[2*T, 16, 1] in mlp.experts
    %d2 = matmul(%d1, %h1) : f32[2*T, 8, 1] in mlp.experts
    %d = reshape(%d2, shape=[2*T, 8]) : f32[2*T, 8] in mlp.experts
    %w1 = reshape(%w, shape=[2*T, 1]) : f32[2*T, 1] in mlp.experts
    %dw = mul(%d, %w1) : f32[2*T, 8] in mlp.experts
    %s = reshape(%dw, shape=[T, 2, 8]) : f32[T, 2, 8] in mlp.experts
    %y = sum(%s, axis=1) : f32[T, 8] in mlp.experts
    output %y
after:
    input %x : f32[T, 8]
    input %w : f32[T, 2]
    input %i : i64[T, 2]
    const @down : f32[4, 8, 16] = parameter "experts.down_proj"
    const @gate_up.0 : f32[4, 16, 8] = parameter "experts.gate_up_proj" rows=0:16
    const @gate_up.16 : f32[4, 16, 8] = parameter "experts.gate_up_proj" rows=16:32
    %y = moe(%x, %w, %i, @gate_up.0, @gate_up.16, @down) : f32[T, 8] in mlp.experts
    output %y

The traced form copies the chosen experts' weights for every token; the op reads them in place.
Stacks may be [e, n, k] or [e, k, n], gate and up apart, packed or interleaved, with or without
biases. How experts are chosen does not matter here (see raise-route).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import (
    Attr,
    Constant,
    Dim,
    Graph,
    Level,
    Node,
    Operand,
    Shape,
    Tensor,
    TensorType,
    Value,
    attribute,
)
from .base import NearMiss, Pass, PassReport, Refusal
from .match import Match, is_last_axis, match, number, op, orders, producer, same, show, var
from .raise_gated_mlp import ACTIVATIONS
from .rewrite import Rewriter, common_scope

_G, _U = op("clamp", var("gate")), op("clamp", var("up"))
_CLAMPED = op(
    "mul",
    op("add", _U, 1),
    op("mul", _G, op("sigmoid", op("mul", _G, number("alpha")))),
)


@dataclass(frozen=True)
class RaiseMoe(Pass):
    """Finds weighted sums over gathered experts that are gated MLPs."""

    name: ClassVar[str] = "raise-moe"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 1e-5  # products and the sum over experts add in another order

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every mixture; other products with gathered matrices are misses."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        for node in [n for n in graph.nodes if n.op == "sum"]:
            try:
                parts = _mixture(node)
                if parts is None:
                    continue
                _emit(rewriter, node, *parts)
                report.fired.append(node.scope)
            except Refusal as reason:
                report.missed.append(NearMiss(node.scope, str(reason)))
        rewriter.apply()
        return report


@dataclass(frozen=True)
class Projection:
    """x times the matrices [e, n, k] (or their transposes) of the experts `ids`, plus biases."""

    stack: Constant
    transposed: bool
    biases: Constant | None
    ids: Operand
    x: Operand
    scope: str

    @property
    def rows(self) -> Dim:
        """Of one matrix: n."""
        return self.stack.shape[2 if self.transposed else 1]


@dataclass(frozen=True)
class Part:
    """Some columns of a projection's result: start, end and step; None are all."""

    of: Projection
    rows: tuple[int, ...] | None


def _mixture(total: Node) -> tuple[Projection, Operand] | None:
    """The down projection and its weights, if `total` sums over the experts of each token."""
    product = producer(unshaped(total.operands[0]))
    if product is None or product.op != "mul":
        return None
    for value, weights in orders(product):
        down = _projection(value)
        if down is not None:
            return down, weights
    return None


def _emit(rewriter: Rewriter, total: Node, down: Projection, weights: Operand) -> None:
    count, (tokens, *_) = _experts_per_token(total), total.result.shape
    activation, clamp, parts = _gated(down.x)
    gate, up = parts
    if not all(same(unshaped(p.of.ids), unshaped(down.ids)) for p in parts):
        raise Refusal("its projections belong to different choices of experts")
    if not same(gate.of.x, up.of.x):
        raise Refusal("gate and up are projections of different values")
    x = _token_rows(gate.of.x, tokens, count)
    chosen: Shape = (tokens, count)
    operands = [
        _shaped(rewriter, total, x, (tokens, x.shape[-1])),
        _shaped(rewriter, total, unshaped(weights), chosen),
        _shaped(rewriter, total, unshaped(down.ids), chosen),
        *(_matrices(rewriter.graph, p) for p in (gate, up, Part(down, None))),
    ]
    biases = [p.of.biases for p in (gate, up, Part(down, None))]
    if any(b is not None for b in biases):
        if any(b is None for b in biases):
            raise Refusal("only some of its projections have biases")
        operands += [_bias(rewriter, total, p) for p in (gate, up, Part(down, None))]
    attrs: dict[str, Attr] = {} if activation == "silu" else {"activation": activation}
    scope = common_scope(gate.of.scope, up.of.scope, down.scope, total.scope)
    rewriter.replace(total, "moe", operands, {**attrs, **clamp}, scope)


def _experts_per_token(total: Node) -> int:
    x = total.tensor(0)
    count = x.shape[1] if x.type.rank == 3 else None
    if not isinstance(count, int) or attribute(total, "keepdim"):
        raise Refusal(f"{x.type} is not summed over a fixed number of experts")
    if int(attribute(total, "axis")) not in (1, -2):
        raise Refusal("it sums over another axis than the experts'")
    return count


def _projection(operand: Operand) -> Projection | None:
    """A product with gathered matrices, perhaps plus gathered biases."""
    node, biases, ids = producer(operand), None, None
    if node is not None and node.op == "add":
        for left, right in orders(node):
            gathered = producer(right)
            if gathered is not None and _gathers(gathered, 2):
                biases, ids = gathered.operands[0], gathered.operands[1]
                node = producer(left)
                break
    node = producer(unshaped(node.result)) if node is not None and node.results else None
    if node is None or node.op != "matmul":
        return None
    for side, other in ((0, 1), (1, 0)):
        gathered = producer(node.operands[side])
        if gathered is None or not _gathers(gathered, 3):
            continue
        stack, index = gathered.operands
        assert isinstance(stack, Constant)
        if node.tensor(other).shape[2 if side == 0 else 1] != 1:
            raise Refusal(f"%{node.result.name} is no product of matrices and vectors")
        if ids is not None and not same(unshaped(ids), unshaped(index)):
            raise Refusal("a bias belongs to another choice of experts")
        bias = biases if isinstance(biases, Constant) else None
        return Projection(stack, side == 1, bias, index, node.operands[other], node.scope)
    return None


def _gathers(node: Node, rank: int) -> bool:
    """Whether it takes whole experts of a stored stack."""
    stack = node.operands[0]
    return (
        node.op == "index_select"
        and int(attribute(node, "axis")) == 0
        and isinstance(stack, Constant)
        and stack.parameter is not None
        and stack.rows is None
        and not stack.transposed
        and stack.type.rank == rank
    )


def _gated(x: Operand) -> tuple[str, dict[str, Attr], tuple[Part, Part]]:
    """Activation, clamping attributes, and the gate and up parts behind the hidden state."""
    hidden = unshaped(x)
    clamped = match(_CLAMPED, hidden)
    if isinstance(clamped, Match):
        gate, up = (_part(clamped.bound[name]) for name in ("gate", "up"))
        return "silu", _clamp(hidden, clamped), (gate, up)
    product = producer(hidden)
    if product is not None and product.op == "mul":
        for gate_side, up_side in orders(product):
            for pattern, name in ACTIVATIONS:
                found = match(pattern, gate_side)
                if isinstance(found, Match):
                    return name, {}, (_part(found.bound["gate"]), _part(up_side))
    raise Refusal(f"{show(hidden)} is no gated product")


def _clamp(hidden: Operand, found: Match) -> dict[str, Attr]:
    """limit and alpha, if the gate is clamped above and up on both sides by one limit."""
    limits: dict[int, tuple[float | None, float | None]] = {}
    pending = [hidden]
    while pending:
        node = producer(pending.pop())
        if node is None or any(v is found.bound[n] for v in node.results for n in ("gate", "up")):
            continue
        if node.op == "clamp":
            limits[id(node.operands[0])] = (attribute(node, "low"), attribute(node, "high"))
        else:
            pending += node.operands
    gate, up = (limits.get(id(found.bound[n]), (None, None)) for n in ("gate", "up"))
    high = gate[1]
    if high is None or gate[0] is not None or up != (-high, high):
        raise Refusal(f"gate and up are clamped to {gate} and {up}, not by one limit")
    alpha = found.number("alpha")
    if high <= 0 or alpha <= 0:
        raise Refusal(f"limit {high} and alpha {alpha} must be positive")
    return {"limit": float(high), "alpha": alpha}


def _part(operand: Operand) -> Part:
    """A projection or a slice of one."""
    node, rows = producer(operand), None
    if node is not None and node.op == "slice" and is_last_axis(node):
        start, end, step = (int(attribute(node, n)) for n in ("start", "end", "step"))
        rows = (start, end) if step == 1 else (start, end, step)
        operand = node.operands[0]
    projection = _projection(operand)
    if projection is None:
        raise Refusal(f"{show(operand)} is no product with an expert's matrix")
    return Part(projection, rows)


def unshaped(operand: Operand) -> Operand:
    """What a chain of reshapes starts from: the same elements in the same order."""
    node = producer(operand)
    while node is not None and node.op == "reshape":
        operand = node.operands[0]
        node = producer(operand)
    return operand


def _token_rows(x: Operand, tokens: Dim, count: int) -> Tensor:
    """The value [..., K] whose rows are the tokens that `x` repeats `count` times each."""
    source = unshaped(x)
    node = producer(source)
    if count > 1:
        if node is None or node.op != "expand":
            raise Refusal(f"{show(source)} does not repeat each token for its experts")
        before, after = node.tensor(0).shape, node.result.shape
        if before[:-1] != (tokens, 1) or after[:-1] != (tokens, count) or before[-1] != after[-1]:
            raise Refusal(f"{show(source)} does not repeat each token for its experts")
        source = unshaped(node.operands[0])
        width = before[-1]
    else:
        width = x.shape[1] * x.shape[2] if isinstance(x, Value | Constant) else 0
    if not isinstance(source, Value | Constant) or source.shape[-1] != width:
        raise Refusal(f"{show(source)} has no row for each token")
    return source


def _shaped(rewriter: Rewriter, root: Node, operand: Operand, shape: Shape) -> Operand:
    assert isinstance(operand, Value | Constant)
    if operand.shape == shape:
        return operand
    return rewriter.emit(root, "reshape", [operand], {"shape": shape})


def _matrices(graph: Graph, part: Part) -> Constant:
    """The stack [e, n, k] of a part's matrices: the checkpoint's, or a view of it."""
    stack, flipped = part.of.stack, part.of.transposed
    if part.rows is None and not flipped:
        return stack
    experts, n, k = stack.shape if not flipped else (stack.shape[0], *stack.shape[:0:-1])
    name = stack.name + (".T" if flipped else "")
    if part.rows is not None:
        name, n = f"{name}.{part.rows[0]}", len(range(*part.rows))
    view = Constant(name, TensorType(stack.dtype, (experts, n, k)), stack.parameter)
    view.transposed, view.rows, view.plus = flipped, part.rows, stack.plus
    return graph.constants.setdefault(name, view)


def _bias(rewriter: Rewriter, root: Node, part: Part) -> Operand:
    biases = part.of.biases
    assert biases is not None
    if part.rows is None:
        return biases
    attrs: dict[str, Attr] = dict(zip(("start", "end", "step"), part.rows, strict=False))
    return rewriter.emit(root, "slice", [biases], {"axis": 1, **attrs})
