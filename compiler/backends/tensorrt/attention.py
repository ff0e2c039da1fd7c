"""Attention over the linear caches.

Which keys a query sees is a mask computed from the tokens' positions, never a causal flag: what
"lower right" means for a cache that is longer than its content is not specified, and can't be tried
here. The lengths are given as well, so that kernels need not read the cache's unused rest.

The network API's attention has neither scale nor soft-cap, sinks or slopes: the scale is applied
to the queries; attention with any of the others is spelt out, its scores and softmax in f32.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import Node, attribute
from .emission import Emission, refusal
from .layers import emits
from .plan import Tensor

HIDDEN = -1e30
"""Score of a hidden key: e^HIDDEN is 0, and f32 holds it."""


@dataclass(frozen=True)
class _Heads:
    """Sizes of one attention."""

    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.queries // self.keys


@emits("attention")
def _attention(emission: Emission, node: Node) -> Tensor:
    reason = _problem(emission, node)
    if reason:
        raise refusal("SPK526", node, reason)
    dtype = emission.types.computed_in(node)
    q, k, v = (emission.cast(emission.value(node.value(i)), dtype) for i in range(3))
    heads = _Heads(*(int(t.shape[i]) for t, i in ((q, 1), (k, 1), (k, 3), (v, 3))))
    scaled = _scaled(emission, q, float(attribute(node, "scale")))
    special = len(node.operands) > 3 or attribute(node, "softcap") or attribute(node, "slopes")
    if special or heads.width != heads.value_width:
        return _spelt_out(emission, node, scaled, k, v, heads)
    return emission.layer(
        "attention", [scaled, k, v, _mask(emission, node), emission.tensors["kv_lens"]], q.shape,
    )  # fmt: skip


def _problem(emission: Emission, node: Node) -> str:
    """Why the network can't state it; empty if it can."""
    if not attribute(node, "causal"):
        return "it lets queries see later tokens"
    capacity = emission.target.capacity
    for index, what in ((1, "keys"), (2, "values")):
        tensor = emission.value(node.value(index))
        if tensor.rank != 4 or tensor.shape[2] != capacity:
            return f"its {what} are no cache: {list(tensor.shape)}"
    return ""


def _scaled(emission: Emission, q: Tensor, scale: float) -> Tensor:
    """Queries times the scale, in f32: in half precision the factor itself would be rounded."""
    if scale == 1.0:
        return q
    exact = emission.cast(q, "f32")
    product = emission.elementwise("PROD", exact, emission.scalar(scale, "f32", 4))
    return emission.cast(product, q.dtype)


def _places(emission: Emission) -> tuple[Tensor, Tensor]:
    """Places in the cache: of keys i32 [1, 1, 1, C], of queries [B, 1, S, 1]."""
    capacity = emission.target.capacity
    keys = emission.literal("range", "i32", (1, 1, 1, capacity))
    key = ("queries",)
    if key not in emission.once:
        positions = emission.tensors["positions"]
        emission.once[key] = emission.reshape(positions, ("B", 1, "S", 1))
    return keys, emission.once[key]


def _mask(emission: Emission, node: Node) -> Tensor:
    """bool [B, 1, S, C]: the keys that each query sees; made once for all layers."""
    window, chunk = int(attribute(node, "window")), int(attribute(node, "chunk"))
    key = ("mask", window, chunk)
    if key not in emission.once:
        emission.once[key] = _visible(emission, window, chunk)
    return emission.once[key]


def _visible(emission: Emission, window: int, chunk: int) -> Tensor:
    keys, queries = _places(emission)
    seen = emission.unary("NOT", emission.elementwise("GREATER", keys, queries))
    if window:
        width = emission.scalar(window, "i32", 4)
        first = emission.elementwise("SUB", queries, width)
        seen = emission.elementwise("AND", seen, emission.elementwise("GREATER", keys, first))
    if chunk:
        size = emission.scalar(chunk, "i32", 4)
        of_key, of_query = (emission.elementwise("FLOOR_DIV", t, size) for t in (keys, queries))
        same = emission.elementwise("EQUAL", of_key, of_query)
        seen = emission.elementwise("AND", seen, same)
    return seen


def _spelt_out(
    emission: Emission, node: Node, q: Tensor, k: Tensor, v: Tensor, heads: _Heads
) -> Tensor:
    """[B, Hkv, G, S, .] with keys and values [B, Hkv, 1, C, .]; scores and weights are f32."""
    capacity = emission.target.capacity
    grouped = emission.reshape(q, ("B", heads.keys, heads.groups, "S", heads.width))
    keys = emission.reshape(k, ("B", heads.keys, 1, capacity, heads.width))
    values = emission.reshape(v, ("B", heads.keys, 1, capacity, heads.value_width))
    shape = (*grouped.shape[:4], capacity)
    product = emission.layer("matmul", [grouped, keys], shape, transpose=(False, True))
    scores = _biased(emission, node, emission.cast(product, "f32"), heads)
    mask = _mask(emission, node)
    seen = emission.reshape(mask, ("B", 1, 1, "S", capacity))
    hidden = emission.scalar(HIDDEN, "f32", 5)
    shown = emission.layer("select", [seen, scores, hidden], shape, "f32")
    weights = emission.cast(_softmax(emission, node, shown, heads), v.dtype)
    mixed = emission.layer(
        "matmul", [weights, values], (*shape[:4], heads.value_width), transpose=(False, False)
    )
    return emission.reshape(mixed, ("B", heads.queries, "S", heads.value_width))


def _biased(emission: Emission, node: Node, scores: Tensor, heads: _Heads) -> Tensor:
    """Soft-cap and slopes (ALiBi)."""
    if cap := float(attribute(node, "softcap")):
        bound = emission.scalar(cap, "f32", 5)
        small = emission.activation("TANH", emission.elementwise("DIV", scores, bound))
        scores = emission.elementwise("PROD", small, bound)
    if slopes := attribute(node, "slopes"):
        keys, queries = (emission.cast(t, "f32") for t in _places(emission))
        distance = emission.elementwise("SUB", keys, queries)
        per_head = emission.literal(slopes, "f32", (1, heads.keys, heads.groups, 1, 1))
        far = emission.reshape(distance, ("B", 1, 1, "S", scores.shape[4]))
        scores = emission.elementwise("SUM", scores, emission.elementwise("PROD", per_head, far))
    return scores


def _softmax(emission: Emission, node: Node, scores: Tensor, heads: _Heads) -> Tensor:
    """Over the keys; a sink takes its share of the sum and gives nothing."""
    if len(node.operands) == 3:
        return emission.layer("softmax", [scores], scores.shape, axis=4)
    column = (1, heads.keys, heads.groups, 1, 1)
    sinks = emission.reshape(emission.operand(node.operands[3], "f32", 1), column)
    top = emission.elementwise("MAX", emission.reduce("MAX", scores, 4), sinks)
    powers = emission.unary("EXP", emission.elementwise("SUB", scores, top))
    share = emission.unary("EXP", emission.elementwise("SUB", sinks, top))
    total = emission.elementwise("SUM", emission.reduce("SUM", powers, 4), share)
    return emission.elementwise("DIV", powers, total)
