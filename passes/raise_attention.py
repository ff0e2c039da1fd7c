"""Raise softmax(scale q k^T + mask) v to attention, with grouped heads and masks understood.

before:
    input %q : f32[B, 4, S, 16]
    input %k : f32[B, 2, P+S, 16]
    input %v : f32[B, 2, P+S, 16]
    %i = arange(start=P, end=P+S, dtype=i64) : i64[S] in model
    %rows = reshape(%i, shape=[S, 1]) : i64[S, 1] in model
    %j = arange(end=P+S, dtype=i64) : i64[P+S] in model
    %causal = le(%j, %rows) : bool[S, P+S] in model
    %mask = where(%causal, 0.0, -3e+38) : f32[S, P+S] in model
    %k1 = reshape(%k, shape=[B, 2, 1, P+S, 16]) : f32[B, 2, 1, P+S, 16] in attn
    %k2 = expand(%k1, shape=[B, 2, 2, P+S, 16]) : f32[B, 2, 2, P+S, 16] in attn
    %k4 = reshape(%k2, shape=[B, 4, P+S, 16]) : f32[B, 4, P+S, 16] in attn
    %kt = transpose(%k4, perm=[0, 1, 3, 2]) : f32[B, 4, 16, P+S] in attn
    %v1 = reshape(%v, shape=[B, 2, 1, P+S, 16]) : f32[B, 2, 1, P+S, 16] in attn
    %v2 = expand(%v1, shape=[B, 2, 2, P+S, 16]) : f32[B, 2, 2, P+S, 16] in attn
    %v4 = reshape(%v2, shape=[B, 4, P+S, 16]) : f32[B, 4, P+S, 16] in attn
    %qk = matmul(%q, %kt) : f32[B, 4, S, P+S] in attn
    %scaled = mul(%qk, 0.25) : f32[B, 4, S, P+S] in attn
    %masked = add(%scaled, %mask) : f32[B, 4, S, P+S] in attn
    %p = softmax(%masked, axis=-1) : f32[B, 4, S, P+S] in attn
    %y = matmul(%p, %v4) : f32[B, 4, S, 16] in attn
    output %y
after:
    input %q : f32[B, 4, S, 16]
    input %k : f32[B, 2, P+S, 16]
    input %v : f32[B, 2, P+S, 16]
    %y = attention(%q, %k, %v, scale=0.25) : f32[B, 4, S, 16] in attn
    output %y

The mask and the repetition of key heads are understood by running them, not by their spelling.
Anything that attention cannot say stays as it is, with the reason as a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..compiler.ir import Attr, Graph, Level, Node, Operand, Shape, Value, attribute, evaluate_dim
from ..compiler.ir.rules import shape_of
from .attention_mask import MaskTerm, UnknownMaskError, Visibility, classify
from .base import NearMiss, Pass, PassReport, Refusal
from .match import (
    Match,
    is_last_axis,
    match,
    number,
    number_of,
    op,
    orders,
    producer,
    show,
    var,
)
from .probe import cone, dims_only, evaluate, signature, symbols_of
from .rewrite import Rewriter

_CAPPED = op("tanh", op("div", var("scores"), number("cap")))
_CAPPED_BY_FACTOR = op("tanh", op("mul", var("scores"), number("factor")))
_SOFTCAPS = (op("mul", _CAPPED, number("cap")), op("mul", _CAPPED_BY_FACTOR, number("cap")))
_LAYOUT = frozenset(("reshape", "transpose", "expand", "cast"))


@dataclass
class Reading:
    """What is understood of one attention so far; `scores` moves towards q k^T."""

    softmax: Node
    root: Node
    scores: Value
    v: Value
    masks: list[MaskTerm] = field(default_factory=list)
    sinks: Operand | None = None
    softcap: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class RaiseAttention(Pass):
    """Finds scaled dot-product attention over keys and values of any origin."""

    name: ClassVar[str] = "raise-attention"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    ensures: ClassVar[Level | None] = Level.FUSED
    tolerance: ClassVar[float] = 1e-5  # the scale is applied at another place

    def run(self, graph: Graph) -> PassReport:
        """Rewrites every attention it understands; every other softmax is a near miss."""
        report = PassReport(self.name)
        rewriter = Rewriter(graph)
        known = dims_only(graph)
        masks: dict[tuple[object, ...], Visibility | UnknownMaskError] = {}
        repeats: dict[Hashable, bool] = {}
        for node in [n for n in graph.nodes if n.op == "softmax" and n.result.type.rank > 2]:
            try:
                reading = _read(rewriter, node, known)
                _emit(rewriter, reading, _visibility(reading, masks), repeats)
                report.fired.append(reading.root.scope)
            except (Refusal, UnknownMaskError) as reason:
                report.missed.append(NearMiss(node.scope, str(reason)))
        rewriter.apply()
        return report


def _read(rewriter: Rewriter, softmax: Node, known: frozenset[int]) -> Reading:
    """Everything around a softmax (of rank 3 or more: routers are no attention)."""
    if not is_last_axis(softmax) or softmax.result.type.rank != 4:
        raise Refusal(f"its softmax is not over the last of four axes: {softmax.result.type}")
    sliced, root = _consumer(rewriter, softmax)
    reading = Reading(softmax, root, softmax.value(0), root.value(1))
    _take_sinks(reading, sliced)
    _take_masks(reading, known)
    _take_softcap(reading)
    while (scaled := _scaled(reading.scores)) is not None:
        reading.scores, factor = scaled
        reading.scale *= factor
    return reading


def _consumer(rewriter: Rewriter, softmax: Node) -> tuple[Node | None, Node]:
    """The slice that drops sink columns, if any, and the product with the values."""
    sliced, node, value = None, rewriter.users.only(softmax.result), softmax.result
    while node is not None and node.op in ("cast", "slice"):
        sliced, value = (node if node.op == "slice" else sliced), node.result
        node = rewriter.users.only(value)
    if node is None or node.op != "matmul" or node.operands[0] is not value:
        raise Refusal("its softmax has another user than one product with values")
    if not isinstance(node.operands[1], Value):
        raise Refusal(f"its values are the constant {show(node.operands[1])}")
    return sliced, node


def _take_sinks(reading: Reading, sliced: Node | None) -> None:
    node = _behind_maximum(reading.scores)
    if node is None or node.op != "concat" or not is_last_axis(node):
        if sliced is not None:
            raise Refusal("a part of its softmax is cut off, but there are no sinks")
        return
    keys = shape_of(node.operands[0])[-1]
    if sliced is None or len(node.operands) != 2 or shape_of(node.operands[1])[-1] != 1:
        raise Refusal("its scores are joined with something that is no column of sinks")
    if attribute(sliced, "start") != 0 or attribute(sliced, "end") != keys:
        raise Refusal("its sinks do not stand behind the scores")
    sink: Operand = node.operands[1]
    heads = reading.softmax.result.shape[1]
    while isinstance(sink, Value) and sink.node is not None and sink.node.op in _LAYOUT:
        sink = sink.node.operands[0]
    if shape_of(sink) != (heads,):
        raise Refusal(f"its sinks {show(sink)} are not one number for each head")
    reading.sinks, reading.scores = sink, node.value(0)


def _behind_maximum(scores: Value) -> Node | None:
    """The node behind x - max(x), which softmax does not notice."""
    node = producer(scores)
    if node is not None and node.op == "sub":
        top = producer(node.operands[1])
        if top is not None and top.op == "amax" and top.operands[0] is node.operands[0]:
            return producer(node.operands[0])
    return node


def _take_masks(reading: Reading, known: frozenset[int]) -> None:
    """Additive masks and conditions, outermost first."""
    while (node := producer(reading.scores)) is not None and node.op in ("add", "where"):
        term, scores = _mask(node, known)
        if not isinstance(scores, Value):
            raise Refusal(f"its scores are {show(scores)}")
        reading.masks.append(term)
        reading.scores = scores


def _mask(node: Node, known: frozenset[int]) -> tuple[MaskTerm, Operand]:
    if node.op == "add":
        for scores, mask in orders(node):
            if isinstance(mask, Value) and id(mask) in known:
                return MaskTerm(mask, "add"), scores
        raise Refusal(f"neither summand of %{node.result.name} is a mask that lengths decide")
    condition, kept, other = node.operands
    if not isinstance(condition, Value) or id(condition) not in known:
        raise Refusal(f"its mask {show(condition)} is not decided by lengths alone")
    for kind, scores, low in (("keep", kept, other), ("drop", other, kept)):
        bound = number_of(low)
        if bound is not None and bound <= -1e4:
            return MaskTerm(condition, kind), scores
    raise Refusal(f"%{node.result.name} hides scores by no large negative number")


def _take_softcap(reading: Reading) -> None:
    for pattern in _SOFTCAPS:
        found = match(pattern, reading.scores)
        if isinstance(found, Match):
            cap, factor = found.number("cap"), found.number("factor")
            if factor and abs(cap * factor - 1) > 1e-5:
                raise Refusal(f"its soft-cap multiplies by {cap:g} and {factor:g}")
            reading.scores, reading.softcap = found.value("scores"), cap
            return


def _scaled(value: Value) -> tuple[Value, float] | None:
    """x and the factor if the value is x times or divided by a number."""
    node = producer(value)
    if node is None or node.op not in ("mul", "div"):
        return None
    for x, factor in orders(node):
        known = number_of(factor)
        if known and isinstance(x, Value):
            return x, known if node.op == "mul" else 1 / known
    return None


def _visibility(
    reading: Reading, masks: dict[tuple[object, ...], Visibility | UnknownMaskError]
) -> Visibility:
    """The meaning of the masks, found once for each combination: layers share masks."""
    shape = reading.scores.shape
    key = (shape[2:], *((id(t.value), t.kind) for t in reading.masks))
    if key not in masks:
        try:
            masks[key] = classify(reading.masks, shape)
        except UnknownMaskError as reason:
            masks[key] = reason
    meaning = masks[key]
    if isinstance(meaning, UnknownMaskError):
        raise meaning
    return meaning


def _emit(
    rewriter: Rewriter, reading: Reading, seen: Visibility, repeats: dict[Hashable, bool]
) -> None:
    product = producer(reading.scores)
    if product is None or product.op != "matmul":
        found = product.op if product else "no node"
        raise Refusal(f"its scores are no product: {found} at %{reading.scores.name}")
    if not all(isinstance(o, Value) for o in product.operands):
        raise Refusal("its queries or keys are constants")
    k, k_factor = _grouped(product.value(1), product.result.shape, repeats, keys=True)
    v, v_factor = _grouped(reading.v, product.result.shape, repeats, keys=False)
    if v_factor != 1.0 or k.shape[:3] != v.shape[:3]:
        raise Refusal(f"its keys {k.type} and values {v.type} do not go together")
    q, q_factor = product.value(0), 1.0
    while (scaled := _scaled(q)) is not None and scaled[0].type == q.type:
        q, q_factor = scaled[0], q_factor * scaled[1]
    attrs: dict[str, Attr] = {"scale": reading.scale * k_factor * q_factor}
    attrs |= {} if seen.causal else {"causal": False}
    optional = {"window": seen.window, "chunk": seen.chunk, "softcap": reading.softcap}
    attrs |= {name: value for name, value in optional.items() if value}
    if seen.slopes:
        attrs["slopes"] = seen.slopes
    sinks = [] if reading.sinks is None else [reading.sinks]
    rewriter.replace(reading.root, "attention", [q, k, v, *sinks], attrs)


def _grouped(
    operand: Value, scores: Shape, repeats: dict[Hashable, bool], *, keys: bool
) -> tuple[Value, float]:
    """k or v [B, Hkv, L, D] behind what repeats its heads, and a factor on the way.

    The way back is taken as far as running it shows that head h is head h // (H / Hkv).
    """
    chain, factor, factors = [operand], 1.0, [1.0]
    while (node := chain[-1].node) is not None:
        scaled = _scaled(chain[-1])
        if node.op not in _LAYOUT and scaled is None:
            break
        step = scaled[0] if scaled else node.value(0)
        factor *= scaled[1] if scaled else 1.0
        chain.append(step)
        factors.append(factor)
    for base, product in zip(reversed(chain), reversed(factors), strict=True):
        fits = base.type.rank == 4 and base.shape[2] == scores[3]
        if not fits:
            continue
        nodes, leaves = cone([operand], _above(base))
        key = (signature([base, operand], nodes), keys)
        if key not in repeats:
            repeats[key] = leaves in ([base], []) and _repeats(base, operand, nodes, product, keys)
        if repeats[key]:
            return base, product
    side = "keys" if keys else "values"
    raise Refusal(f"its {side} %{operand.name} {operand.type} are no repeated [B, Hkv, L, D]")


def _above(base: Value) -> Callable[[Node], bool]:
    return lambda node: node is not base.node


def _repeats(base: Value, operand: Value, nodes: list[Node], factor: float, keys: bool) -> bool:
    """Whether the operand is the base with each head repeated, and transposed if `keys`."""
    heads = operand.shape[1] if operand.type.rank == 4 else None
    groups = base.shape[1]
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        return False
    sizes = {s: 2 + i for i, s in enumerate(sorted(symbols_of([base], nodes)))}
    shape = tuple(evaluate_dim(d, sizes) for d in base.shape)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    (got,) = evaluate([operand], nodes, {base: numbers}, sizes)
    want = numbers.repeat_interleave(heads // groups, 1)
    want = want.transpose(2, 3) if keys else want
    return got.shape == want.shape and bool(((got / factor).round() == want).all())
