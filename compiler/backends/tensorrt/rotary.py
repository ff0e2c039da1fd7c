"""Rotary embeddings: the network API's own layer where cos and sin are two equal halves.

The layer takes x [B, N, S, D] and the cosines [B, S, R / 2] that both elements of a pair share.
The graph has cosines of full width; that they repeat is proved from how they were made, and where
it can't be, the rotation is spelt out.
"""

from __future__ import annotations

from ...ir import Node, Operand, Value, attribute
from .emission import Emission
from .layers import emits, part
from .plan import Tensor

_KEEPS_PAIRS = ("cos", "sin", "cast", "neg")


@emits("rope")
def _rope(emission: Emission, node: Node) -> Tensor:
    style = str(attribute(node, "style"))
    dtype = emission.types.computed_in(node)
    x = emission.cast(emission.value(node.value(0)), dtype)
    tables = node.operands[1:]
    per_token = all(_per_token(emission, o) for o in tables)
    if x.rank == 4 and per_token and all(repeats(o, style) for o in tables):
        return _layer(emission, node, x, dtype, style)
    return _spelt_out(emission, node, x, dtype, style)


def _per_token(emission: Emission, operand: Operand) -> bool:
    """Whether cosines are [B, S, 1, R] or [B, 1, S, R]: the same for all heads."""
    shape = emission.value(operand).shape if isinstance(operand, Value) else ()
    return shape[:3] in ((("B", "S", 1)), ("B", 1, "S"))


def repeats(operand: Operand, style: str) -> bool:
    """Whether the value's last axis is its first half twice, or each element twice in turn."""
    node = operand.node if isinstance(operand, Value) else None
    if node is None:
        return False
    if node.op in _KEEPS_PAIRS:
        return repeats(node.operands[0], style)
    if node.op == "mul" and isinstance(node.operands[1], int | float):
        return repeats(node.operands[0], style)
    if node.op == "concat" and style == "half":
        last = int(attribute(node, "axis")) % node.result.type.rank == node.result.type.rank - 1
        return last and len(node.operands) == 2 and node.operands[0] is node.operands[1]
    if node.op == "reshape":
        before, after = node.value(0), node.result
        if before.shape[-1] == after.shape[-1]:
            return repeats(before, style)
        return style == "interleaved" and _each_twice(before)
    return False


def _each_twice(value: Value) -> bool:
    """Whether a value [..., k, 2] is a value [..., k, 1] expanded."""
    node = value.node
    return (
        node is not None
        and node.op == "expand"
        and value.shape[-1] == 2
        and node.value(0).shape == (*value.shape[:-1], 1)
    )


def _layer(emission: Emission, node: Node, x: Tensor, dtype: str, style: str) -> Tensor:
    tokens_first = emission.value(node.value(1)).shape[1] == "S"
    turned = emission.transpose(x, (0, 2, 1, 3)) if tokens_first else x
    cos, sin = (_half(emission, node.value(i), dtype, style) for i in (1, 2))
    width = emission.value(node.value(1)).shape[-1]
    assert isinstance(width, int)
    rotated = emission.layer(
        "rotary_embedding", [turned, cos, sin], turned.shape,
        interleaved=style != "half", width=0 if width == x.shape[-1] else width,
    )  # fmt: skip
    return emission.transpose(rotated, (0, 2, 1, 3)) if tokens_first else rotated


def _half(emission: Emission, value: Value, dtype: str, style: str) -> Tensor:
    """Cosines [B, S, R / 2] of a table of full width; made once for all layers."""
    tensor = emission.cast(emission.value(value), dtype)
    key = ("half", tensor.name, style)
    if key not in emission.once:
        width = tensor.shape[-1]
        assert isinstance(width, int)
        flat = emission.reshape(tensor, ("B", "S", width))
        step = 1 if style == "half" else 2
        emission.once[key] = part(emission, flat, 2, 0, width // 2, step)
    return emission.once[key]


def _spelt_out(emission: Emission, node: Node, x: Tensor, dtype: str, style: str) -> Tensor:
    """x * cos + rotate(x) * sin on the first R elements."""
    cos, sin = (emission.operand(o, dtype, x.rank) for o in node.operands[1:])
    width, whole = cos.shape[-1], x.shape[-1]
    assert isinstance(width, int)
    assert isinstance(whole, int)
    last = x.rank - 1
    head = x if width == whole else part(emission, x, last, 0, width)
    turned = _turned(emission, head, width, style)
    result = emission.elementwise(
        "SUM", emission.elementwise("PROD", head, cos), emission.elementwise("PROD", turned, sin)
    )
    if width == whole:
        return result
    rest = part(emission, x, last, width, whole - width)
    return emission.layer("concatenation", [result, rest], x.shape, axis=last)


def _turned(emission: Emission, x: Tensor, width: int, style: str) -> Tensor:
    """(-second half, first half), or (-odd, even) in turn."""
    last, half = x.rank - 1, width // 2
    if style == "half":
        low, high = part(emission, x, last, 0, half), part(emission, x, last, half, half)
        parts = [emission.unary("NEG", high), low]
        return emission.layer("concatenation", parts, x.shape, axis=last)
    even, odd = (part(emission, x, last, i, half, 2) for i in (0, 1))
    column = (*x.shape[:-1], half, 1)
    pairs = [emission.reshape(t, column) for t in (emission.unary("NEG", odd), even)]
    joined = emission.layer("concatenation", pairs, (*x.shape[:-1], half, 2), axis=last + 1)
    return emission.reshape(joined, x.shape)
