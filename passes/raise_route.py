"""Raise the choice of experts in front of moe to route.

before:
    graph block fused {
      input %x : f32[T, 8]
      const @router : f32[4, 8] = parameter "mlp.gate.weight"
      const @correction : f32[4] = parameter "mlp.gate.e_score_correction_bias"
      const @gate : f32[4, 16, 8] = parameter "experts.gate_proj"
      const @up : f32[4, 16, 8] = parameter "experts.up_proj"
      const @down : f32[4, 8, 16] = parameter "experts.down_proj"
      %l = linear(%x, @router) : f32[T, 4] in mlp.gate
      %s = sigmoid(%l) : f32[T, 4] in mlp.gate
      %c = add(%s, @correction) : f32[T, 4] in mlp.gate
      %t, %i = topk(%c, k=2) : f32[T, 2], i64[T, 2] in mlp.gate
      %g = gather(%s, %i, axis=1) : f32[T, 2] in mlp.gate
      %n = sum(%g, axis=1, keepdim=true) : f32[T, 1] in mlp.gate
      %e = add(%n, 1e-20) : f32[T, 1] in mlp.gate
      %d = div(%g, %e) : f32[T, 2] in mlp.gate
      %w = mul(%d, 2.5) : f32[T, 2] in mlp.gate
      %y = moe(%x, %w, %i, @gate, @up, @down) : f32[T, 8] in mlp.experts
      output %y
    }
after:
    graph block fused {
      input %x : f32[T, 8]
      const @router : f32[4, 8] = parameter "mlp.gate.weight"
      const @correction : f32[4] = parameter "mlp.gate.e_score_correction_bias"
      const @gate : f32[4, 16, 8] = parameter "experts.gate_proj"
      const @up : f32[4, 16, 8] = parameter "experts.up_proj"
      const @down : f32[4, 8, 16] = parameter "experts.down_proj"
      %l = linear(%x, @router) : f32[T, 4] in mlp.gate
      %12, %13 = route(%l, @correction, k=2, scores="sigmoid", normalise=true, eps=1e-20, scale=2.5) : f32[T, 2], i64[T, 2] in mlp.gate
      %y = moe(%x, %12, %13, @gate, @up, @down) : f32[T, 8] in mlp.experts
      output %y
    }

Scores by softmax, by sigmoid or raw, with or without a correction that decides the choice only,
within the best groups of experts or among all; weights renormalised, softmaxed or as they are.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import (
    Attr,
    Builder,
    Constant,
    Graph,
    Level,
    Node,
    Operand,
    Shape,
    Value,
    attribute,
)
from .base import NearMiss, Pass, PassReport, Refusal
from .match import (
    LAST,
    Match,
    is_last_axis,
    match,
    number,
    number_of,
    op,
    producer,
    same,
    show,
    var,
)
from .raise_moe import unshaped
from .rewrite import create

_W = var("weights")
_SUM = op("sum", _W, axis=LAST, keepdim=True)
_CORRECTED = op("add", var("scores"), var("correction"))
_MASKED = op("where", op("logical_not", var("kept")), number("fill"), var("choice"))


@dataclass(frozen=True)
class RaiseRoute(Pass):
    """Finds how the weights and ids of a moe follow from its router's logits."""

    name: ClassVar[str] = "raise-route"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)
    tolerance: ClassVar[float] = 1e-6  # the same operations on a few values

    def run(self, graph: Graph) -> PassReport:
        """Every moe gets a route in front, or a near miss says why not."""
        report = PassReport(self.name)
        builder = Builder(graph)
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.op == "moe" and not _routed(node):
                try:
                    nodes += _route(builder, node)
                    report.fired.append(node.scope)
                except Refusal as reason:
                    report.missed.append(NearMiss(node.scope, str(reason)))
            nodes.append(node)
        graph.nodes = nodes
        return report


def _routed(moe: Node) -> bool:
    chosen = producer(unshaped(moe.operands[2]))
    return chosen is not None and chosen.op == "route"


def _route(builder: Builder, moe: Node) -> list[Node]:
    """The route and the reshapes of its results; `moe` reads them afterwards."""
    weights, ids = unshaped(moe.operands[1]), unshaped(moe.operands[2])
    top = producer(ids)
    if top is None or top.op != "topk" or ids is not top.results[1] or not is_last_axis(top):
        raise Refusal(f"{show(ids)} is no choice of the largest")
    if not isinstance(attribute(top, "k"), int):
        raise Refusal(f"{show(ids)} chooses more of longer sequences")
    attrs: dict[str, Attr] = {"k": attribute(top, "k")}
    scores, choice, tail = _chosen(weights, top)
    choice, groups = _groups(choice)
    correction = _correction(choice, scores)
    logits, kind = _scores(scores)
    attrs |= {**({"scores": kind} if kind != "softmax" else {}), **groups, **tail}
    operands = [logits, *([] if correction is None else [correction])]
    node = create(builder, "route", operands, attrs, top.scope)
    made = [node]
    for index, result in zip((1, 2), node.results, strict=True):
        wanted: Shape = moe.tensor(index).shape
        if result.shape != wanted:
            made.append(create(builder, "reshape", [result], {"shape": wanted}, top.scope))
            result = made[-1].result
        moe.operands[index] = result
    return made


def _chosen(weights: Operand, top: Node) -> tuple[Operand, Operand, dict[str, Attr]]:
    """Scores, what the choice is made by, and how the weights follow from the chosen scores."""
    tail: dict[str, Attr] = {}
    scaled = match(op("mul", _W, number("scale")), weights)
    if isinstance(scaled, Match):
        tail["scale"], weights = scaled.number("scale"), unshaped(scaled.bound["weights"])
    weights, tail = _normalised(weights, tail)
    softmaxed = producer(weights)
    if softmaxed is not None and softmaxed.op == "softmax" and is_last_axis(softmaxed):
        tail, weights = {"softmax_chosen": True, **tail}, unshaped(softmaxed.operands[0])
    choice = top.operands[0]
    gathered = producer(weights)
    if weights is top.results[0]:
        return choice, choice, tail
    if gathered is None or gathered.op != "gather" or not is_last_axis(gathered):
        raise Refusal(f"{show(weights)} is no chosen score")
    if not same(unshaped(gathered.operands[1]), top.results[1]):
        raise Refusal(f"{show(weights)} belongs to another choice of experts")
    return gathered.operands[0], choice, tail


def _normalised(weights: Operand, tail: dict[str, Attr]) -> tuple[Operand, dict[str, Attr]]:
    """The weights before they are divided by their sum, plus eps or at least `floor`."""
    for total in (_SUM, op("add", _SUM, number("eps")), op("clamp", _SUM)):
        found = match(op("div", _W, total), weights)
        if not isinstance(found, Match):
            continue
        more: dict[str, Attr] = {"normalise": True}
        if "eps" in found.bound:
            more["eps"] = found.number("eps")
        divisor = producer(weights)
        clamp = producer(divisor.operands[1]) if divisor is not None else None
        if clamp is not None and clamp.op == "clamp":
            if attribute(clamp, "high") is not None or attribute(clamp, "low") is None:
                raise Refusal(f"{show(weights)} is divided by a sum with an upper limit")
            more["floor"] = attribute(clamp, "low")
        return unshaped(found.bound["weights"]), more | tail
    return weights, tail


def _groups(choice: Operand) -> tuple[Operand, dict[str, Attr]]:
    """What is chosen by before experts outside of the best groups were masked."""
    masked = match(_MASKED, choice)
    if not isinstance(masked, Match):
        return choice, {}
    if masked.number("fill") != float("-inf"):
        raise Refusal(f"{show(choice)} gives experts outside of the best groups a score")
    inner = unshaped(masked.bound["choice"])
    kept = _unspread(masked.bound["kept"])
    best = producer(unshaped(kept.operands[1])) if kept.op == "scatter" else None
    if best is None or best.op != "topk" or not is_last_axis(best):
        raise Refusal(f"{show(choice)} is masked by something else than the best groups")
    if number_of(kept.operands[2]) != 1 or not _is_zero(kept.operands[0]):
        raise Refusal(f"{show(choice)} is masked by something else than ones at the best groups")
    grouped, per_group = _group_totals(best.operands[0])
    if not same(unshaped(grouped), inner):
        raise Refusal("groups are judged by other values than experts")
    groups, each = grouped.shape[-2:]
    spread = masked.shape("kept")
    if best.tensor(0).shape[-1] != groups or spread[-1] != groups * each:
        raise Refusal(f"{show(grouped)} has other groups than the mask")
    kept_groups = int(attribute(best, "k"))
    if kept_groups == groups:
        return inner, {}
    attrs: dict[str, Attr] = {"groups": groups, "best_groups": kept_groups}
    return inner, attrs | ({"per_group": per_group} if per_group != 1 else {})


def _is_zero(operand: Operand) -> bool:
    node = producer(operand)
    return node is not None and node.op == "full" and float(attribute(node, "value")) == 0


def _unspread(mask: Operand) -> Node:
    """The node of [.., groups] that a mask repeats for each group's experts."""
    node = producer(mask)
    while node is not None and node.op in ("cast", "reshape", "expand"):
        if node.op == "expand" and not _repeats_last(node):
            raise Refusal(f"{show(node.result)} does not repeat each group")
        node = producer(node.operands[0])
    if node is None:
        raise Refusal(f"{show(mask)} is no mask of groups")
    return node


def _repeats_last(node: Node) -> bool:
    before, after = node.tensor(0).shape, node.result.shape
    return before[-1] == 1 and before[:-1] == after[:-1]


def _group_totals(totals: Operand) -> tuple[Value | Constant, int]:
    """Scores [.., groups, experts], and how many of a group's largest are summed."""
    node = producer(totals)
    if node is not None and node.op == "amax" and is_last_axis(node):
        return node.tensor(0), 1
    if node is not None and node.op == "sum" and is_last_axis(node):
        top = producer(node.operands[0])
        largest = top is not None and top.op == "topk" and node.operands[0] is top.results[0]
        if top is not None and largest and is_last_axis(top):
            return top.tensor(0), int(attribute(top, "k"))
    raise Refusal(f"{show(totals)} is no judgement of groups by their best experts")


def _correction(choice: Operand, scores: Operand) -> Operand | None:
    """The constant [E] added to the scores for the choice."""
    if same(choice, scores):
        return None
    found = match(_CORRECTED, choice)
    if not isinstance(found, Match):
        raise Refusal(f"{show(choice)} is not {show(scores)} plus a correction")
    for one, other in (("scores", "correction"), ("correction", "scores")):
        if same(found.bound[one], scores) and len(found.shape(other)) == 1:
            return found.bound[other]
    raise Refusal(f"{show(choice)} is not {show(scores)} plus one number for each expert")


def _scores(scores: Operand) -> tuple[Operand, str]:
    node = producer(scores)
    if node is not None and node.op == "softmax" and is_last_axis(node):
        return node.operands[0], "softmax"
    if node is not None and node.op == "sigmoid":
        return node.operands[0], "sigmoid"
    return scores, "none"
