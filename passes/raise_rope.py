"""Raise x * cos + rotate(x) * sin to rope, on token-major heads.

before:
    input %x : f32[B, S, 4, 16]
    input %cos : f32[B, S, 16]
    input %sin : f32[B, S, 16]
    %t = transpose(%x, perm=[0, 2, 1, 3]) : f32[B, 4, S, 16] in attn
    %c = reshape(%cos, shape=[B, 1, S, 16]) : f32[B, 1, S, 16] in attn
    %s = reshape(%sin, shape=[B, 1, S, 16]) : f32[B, 1, S, 16] in attn
    %xc = mul(%t, %c) : f32[B, 4, S, 16] in attn
    %low = slice(%t, axis=3, start=0, end=8) : f32[B, 4, S, 8] in attn
    %high = slice(%t, axis=3, start=8, end=16) : f32[B, 4, S, 8] in attn
    %minus = neg(%high) : f32[B, 4, S, 8] in attn
    %rot = concat(%minus, %low, axis=3) : f32[B, 4, S, 16] in attn
    %rs = mul(%rot, %s) : f32[B, 4, S, 16] in attn
    %y = add(%xc, %rs) : f32[B, 4, S, 16] in attn
    output %y
after:
    input %x : f32[B, S, 4, 16]
    input %cos : f32[B, S, 16]
    input %sin : f32[B, S, 16]
    %t = transpose(%x, perm=[0, 2, 1, 3]) : f32[B, 4, S, 16] in attn
    %c = reshape(%cos, shape=[B, 1, S, 16]) : f32[B, 1, S, 16] in attn
    %s = reshape(%sin, shape=[B, 1, S, 16]) : f32[B, 1, S, 16] in attn
    %13 = reshape(%c, shape=[B, S, 1, 16]) : f32[B, S, 1, 16] in attn
    %14 = reshape(%s, shape=[B, S, 1, 16]) : f32[B, S, 1, 16] in attn
    %15 = transpose(%t, perm=[0, 2, 1, 3]) : f32[B, S, 4, 16] in attn
    %16 = rope(%15, %13, %14) : f32[B, S, 4, 16] in attn
    %y = transpose(%16, perm=[0, 2, 1, 3]) : f32[B, 4, S, 16] in attn
    output %y

The transposes outside cancel in the next clean-up. What rotate(x) is, half-split or interleaved, is
found by running it on numbered elements, so its spelling does not matter; cos and sin may come from
anywhere. A rotation of the first R elements joined with the untouched rest becomes one rope.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..compiler.ir import (
    OPS,
    Graph,
    Level,
    Node,
    Operand,
    Shape,
    Value,
    attribute,
    evaluate_dim,
)
from .base import NearMiss, Pass, PassReport
from .match import LAST, matches, op, orders, producer, var
from .probe import MOVES, cone, evaluate, signature, symbols_of
from .rewrite import Rewriter

HEAD_MAJOR = (0, 2, 1, 3)
_X1, _X2, _COS, _SIN = (var(n) for n in ("x1", "x2", "cos", "sin"))
_HALVES = op(
    "concat",
    op("sub", op("mul", _X1, _COS), op("mul", _X2, _SIN)),
    op("add", op("mul", _X2, _COS), op("mul", _X1, _SIN)),
    axis=LAST,
)


@dataclass(frozen=True)
class Rotation:
    """A rotation found in the graph.

    Args:
        root: node whose result is the rotated tensor.
        x: what is rotated; `width` elements of its last axis.
        cos: factors for x, broadcast to it; of half the width if `halves`.
        sin: factors for the rotated x, likewise.
    """

    root: Node
    x: Value
    cos: Value
    sin: Value
    style: str
    halves: bool = False


@dataclass(frozen=True)
class RaiseRope(Pass):
    """Finds rotary position embeddings, half-split or interleaved, whole or partial."""

    name: ClassVar[str] = "raise-rope"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 1e-5  # the same roundings; a negated sine may round otherwise

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every rotation; products with a neighbour that no rotation has are misses."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        found: dict[Value, Rotation] = {}
        styles: dict[Hashable, str] = {}
        for node in graph.nodes:
            result = _rotation(rewriter, node, styles)
            if isinstance(result, Rotation):
                found[node.result] = result
            elif result is not None:
                report.missed.append(NearMiss(node.scope, result))
        for node in graph.nodes:
            _extend(rewriter, node, found)
        for rotation in found.values():
            reason = _emit(rewriter, rotation)
            if reason:
                report.missed.append(NearMiss(rotation.root.scope, reason))
            else:
                report.fired.append(rotation.root.scope)
        rewriter.apply()
        return report


def _rotation(rewriter: Rewriter, node: Node, styles: dict[Hashable, str]) -> Rotation | str | None:
    if node.op in ("add", "sub"):
        return _sum(node, styles)
    return _two_halves(rewriter, node) if node.op == "concat" else None


def _sum(root: Node, styles: dict[Hashable, str]) -> Rotation | str | None:
    """x * cos + rotate(x) * sin, or x * cos - (-rotate(x)) * sin."""
    reason = None
    for x, cos, rotated, sin in _readings(root):
        if root.result.type != x.type or cos.shape[-1:] != x.shape[-1:] != sin.shape[-1:]:
            continue
        style = _style(x, rotated, -1.0 if root.op == "sub" else 1.0, styles)
        if style in ("half", "interleaved"):
            return Rotation(root, x, cos, sin, style)
        reason = style or reason
    return reason


def _readings(root: Node) -> Iterator[tuple[Value, Value, Value, Value]]:
    """x, cos, rotated, sin: every order of the two products and of their factors."""
    for first, second in orders(root):
        left, right = producer(first), producer(second)
        if left is None or right is None or left.op != "mul" or right.op != "mul":
            continue
        for x, cos in orders(left):
            for rotated, sin in orders(right):
                if (
                    isinstance(x, Value)
                    and isinstance(cos, Value)
                    and isinstance(rotated, Value)
                    and isinstance(sin, Value)
                ):
                    yield x, cos, rotated, sin


def _style(x: Value, rotated: Value, sign: float, known: dict[Hashable, str]) -> str | None:
    """half, interleaved, the reason why it is neither, or None if it moves nothing of x."""
    moved, sources = cone([rotated], lambda n: n.op in MOVES)
    if len(sources) != 1 or not any(n.op == "neg" for n in moved):
        return None
    nodes, leaves = cone([x, rotated], lambda n: n.op in MOVES)
    width = x.shape[-1]
    if len(leaves) != 1 or rotated.type != x.type or not isinstance(width, int) or width % 2:
        return None
    key = (signature([*leaves, x, rotated], nodes), sign)
    if key not in known:
        known[key] = _movement(x, rotated, sign, nodes, leaves[0])
    return known[key]


def _movement(x: Value, rotated: Value, sign: float, nodes: list[Node], leaf: Value) -> str:
    """The style that moves numbered elements as `nodes` do, or the reason if none does."""
    sizes = dict.fromkeys(sorted(symbols_of([leaf], nodes)), 2)
    shape = tuple(evaluate_dim(d, sizes) for d in leaf.shape)
    numbers = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    before, after = evaluate([x, rotated], nodes, {leaf: numbers}, sizes)
    width = before.shape[-1]
    zeros, ones = torch.zeros(width), torch.full((width,), sign)
    for style in ("half", "interleaved"):
        if torch.equal(OPS["rope"].reference(before, zeros, ones, style), after):
            return style
    return "the elements beside cos and sin are moved in a way that is no known rotation"


def _two_halves(rewriter: Rewriter, root: Node) -> Rotation | None:
    """concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin) with x1, x2 the halves of x."""
    for found in matches(_HALVES, root.result):
        x1, x2, cos, sin = (found.bound[n] for n in ("x1", "x2", "cos", "sin"))
        if not (isinstance(cos, Value) and isinstance(sin, Value)):
            continue
        x = _joined(rewriter, root, x1, x2) or _concatenated(rewriter, root, x1, x2)
        if x is not None and x.shape == root.result.shape and cos.shape[-1] == _half(x):
            return Rotation(root, x, cos, sin, "half", halves=True)
    return None


def _concatenated(rewriter: Rewriter, root: Node, x1: Operand, x2: Operand) -> Value | None:
    """The halves in a row, wherever they come from (DeepSeek: even and odd elements)."""
    if not (isinstance(x1, Value) and isinstance(x2, Value)) or x1.type != x2.type:
        return None
    return rewriter.emit(root, "concat", [x1, x2], {"axis": x1.type.rank - 1})


def _half(x: Value) -> int | None:
    width = x.shape[-1]
    return width // 2 if isinstance(width, int) else None


def _joined(rewriter: Rewriter, root: Node, first: object, second: object) -> Value | None:
    """What two neighbouring slices of the last axis are slices of, cut to the two."""
    low = first.node if isinstance(first, Value) else None
    high = second.node if isinstance(second, Value) else None
    if low is None or high is None or (low.op, high.op) != ("slice", "slice"):
        return None
    source, rank = low.operands[0], low.result.type.rank
    plain = all(
        attribute(n, "step") == 1 and attribute(n, "axis") in (-1, rank - 1) for n in (low, high)
    )
    if not plain or high.operands[0] is not source or not isinstance(source, Value):
        return None
    start, end = attribute(low, "start"), attribute(high, "end")
    if attribute(low, "end") != attribute(high, "start"):
        return None
    if (start, end) == (0, source.shape[-1]):
        return source
    return rewriter.emit(low, "slice", [source], {"axis": rank - 1, "start": start, "end": end})


def _extend(rewriter: Rewriter, node: Node, found: dict[Value, Rotation]) -> None:
    """concat(rope(x[:R]), x[R:]) is a partial rope of x."""
    if node.op != "concat" or len(node.operands) != 2 or node.result in found:
        return
    head, rest = node.operands
    rotation = found.get(head) if isinstance(head, Value) else None
    if rotation is None or rewriter.users.only(rotation.root.result) is not node:
        return
    if attribute(node, "axis") not in (-1, node.result.type.rank - 1):
        return
    whole = _joined(rewriter, node, rotation.x, rest)
    if whole is not None and whole.type == node.result.type:
        del found[rotation.root.result]
        found[node.result] = replace(rotation, root=node, x=whole)


def _emit(rewriter: Rewriter, found: Rotation) -> str:
    """Puts the rope into the graph; the reason if its operands have no canonical layout."""
    rank = found.x.type.rank
    shapes = [(1,) * (rank - v.type.rank) + v.shape for v in (found.cos, found.sin)]
    head_axis = _head_axis(found.x.shape, shapes)
    if isinstance(head_axis, str):
        return head_axis
    root, x = found.root, found.x
    swap = head_axis == 1
    trig = []
    for value, shape in zip((found.cos, found.sin), shapes, strict=True):
        if found.halves:
            value = rewriter.emit(root, "concat", [value, value], {"axis": value.type.rank - 1})
        shape = (*shape[:-1], value.shape[-1])
        shape = (shape[0], shape[2], 1, shape[3]) if swap else shape
        trig.append(rewriter.emit(root, "reshape", [value], {"shape": shape}))
    attrs = {} if found.style == "half" else {"style": found.style}
    if not swap:
        rewriter.replace(root, "rope", [x, *trig], attrs)
        return ""
    x = rewriter.emit(root, "transpose", [x], {"perm": HEAD_MAJOR})
    y = rewriter.emit(root, "rope", [x, *trig], attrs)
    rewriter.replace(root, "transpose", [y], {"perm": HEAD_MAJOR})
    return ""


def _head_axis(shape: Shape, trig: list[Shape]) -> int | str:
    """The axis of x that holds the heads: cos and sin have one element there."""
    if len(shape) == 3:
        return 1
    if len(shape) != 4:
        return f"the rotated tensor has rank {len(shape)}"
    for axis, tokens in ((2, 1), (1, 2)):
        if all(t[axis] == 1 and t[tokens] == shape[tokens] for t in trig):
            return axis
    return "cos and sin are not the same for all heads"
