"""Primitive ops as standard ONNX nodes: a table of ONNX names, and functions for the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir import DType, Node, SymDim, attribute
from ..ir.rules import promote
from .emission import NUMPY_DTYPE, ONNX_DTYPE, Emission

Emit = Callable[[Emission, Node], None]

UNARY = {
    "neg": "Neg",
    "abs": "Abs",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "sin": "Sin",
    "cos": "Cos",
    "tanh": "Tanh",
    "erf": "Erf",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "softplus": "Softplus",
    "floor": "Floor",
    "logical_not": "Not",
}
BINARY = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "pow": "Pow",
    "maximum": "Max",
    "minimum": "Min",
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "logical_and": "And",
    "logical_or": "Or",
}
REDUCE = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax"}


def _unary(emission: Emission, node: Node) -> None:
    x = emission.operand(node.operands[0], _float_if_needed(node))
    emission.node(UNARY[node.op], [x], node.result.name)


def _float_if_needed(node: Node) -> DType | None:
    """sqrt, sin, ... of integers are computed in the result's dtype."""
    return node.result.dtype if node.result.dtype.is_float else None


def _operands(emission: Emission, node: Node) -> list[str]:
    dtype = promote(node.operands)
    if node.op == "div" and not dtype.is_float:
        dtype = DType.F32
    return [emission.operand(o, dtype) for o in node.operands]


def _binary(emission: Emission, node: Node) -> None:
    emission.node(BINARY[node.op], _operands(emission, node), node.result.name)


def _ne(emission: Emission, node: Node) -> None:
    emission.node("Not", [emission.node("Equal", _operands(emission, node))], node.result.name)


def _rsqrt(emission: Emission, node: Node) -> None:
    root = emission.node("Sqrt", [emission.operand(node.operands[0], _float_if_needed(node))])
    emission.node("Reciprocal", [root], node.result.name)


def _silu(emission: Emission, node: Node) -> None:
    x = emission.operand(node.operands[0])
    emission.node("Mul", [x, emission.node("Sigmoid", [x])], node.result.name)


def _floored(emission: Emission, x: str, y: str, dtype: DType) -> tuple[str, str]:
    """(remainder, quotient) with Python's signs."""
    if dtype.is_float:
        quotient = emission.node("Floor", [emission.node("Div", [x, y])])
        product = emission.node("Mul", [quotient, y])
        return emission.node("Sub", [x, product]), quotient
    remainder = emission.node("Mod", [x, y])
    return remainder, emission.node("Div", [emission.node("Sub", [x, remainder]), y])


def _floor_div(emission: Emission, node: Node) -> None:
    x, y = _operands(emission, node)
    emission.node("Identity", [_floored(emission, x, y, node.result.dtype)[1]], node.result.name)


def _remainder(emission: Emission, node: Node) -> None:
    x, y = _operands(emission, node)
    emission.node("Identity", [_floored(emission, x, y, node.result.dtype)[0]], node.result.name)


def _where(emission: Emission, node: Node) -> None:
    dtype = node.result.dtype
    names = [emission.operand(node.operands[0], DType.BOOL)]
    names += [emission.operand(o, dtype) for o in node.operands[1:]]
    emission.node("Where", names, node.result.name)


def _gelu(emission: Emission, node: Node) -> None:
    kind = attribute(node, "approximate")
    emission.node("Gelu", [emission.operand(node.operands[0])], node.result.name, approximate=kind)


def _clamp(emission: Emission, node: Node) -> None:
    bounds = [attribute(node, "low"), attribute(node, "high")]
    names = [emission.scalar(b, node.result.dtype) if b is not None else "" for b in bounds]
    emission.node("Clip", [emission.operand(node.operands[0]), *names], node.result.name)


def _cast(emission: Emission, node: Node) -> None:
    to = ONNX_DTYPE[node.result.dtype]
    emission.node("Cast", [emission.operand(node.operands[0])], node.result.name, to=to)


def _reduce(emission: Emission, node: Node) -> None:
    keep = int(attribute(node, "keepdim"))
    names = [emission.operand(node.operands[0]), emission.ints([attribute(node, "axis")])]
    emission.node(REDUCE[node.op], names, node.result.name, keepdims=keep)


def _argmax(emission: Emission, node: Node) -> None:
    axis, keep = attribute(node, "axis"), int(attribute(node, "keepdim"))
    x = emission.operand(node.operands[0])
    emission.node("ArgMax", [x], node.result.name, axis=axis, keepdims=keep)


def _cumsum(emission: Emission, node: Node) -> None:
    axis = emission.scalar(attribute(node, "axis"), DType.I64)
    emission.node("CumSum", [emission.operand(node.operands[0]), axis], node.result.name)


def _softmax(emission: Emission, node: Node) -> None:
    x = emission.operand(node.operands[0])
    emission.node("Softmax", [x], node.result.name, axis=attribute(node, "axis"))


def _topk(emission: Emission, node: Node) -> None:
    names = [emission.operand(node.operands[0]), emission.dim(attribute(node, "k"))]
    values, indices = (v.name for v in node.results)
    emission.node("TopK", names, values, axis=attribute(node, "axis"))
    emission.nodes[-1].output.append(indices)


def _reshape(emission: Emission, node: Node) -> None:
    names = [emission.operand(node.operands[0]), emission.shape(node.result.shape)]
    emission.node("Reshape", names, node.result.name)


def _transpose(emission: Emission, node: Node) -> None:
    x = emission.operand(node.operands[0])
    emission.node("Transpose", [x], node.result.name, perm=list(attribute(node, "perm")))


def _expand(emission: Emission, node: Node) -> None:
    names = [emission.operand(node.operands[0]), emission.full_shape(node.result.shape)]
    emission.node("Expand", names, node.result.name)


def _slice(emission: Emission, node: Node) -> None:
    bounds = [emission.dim(attribute(node, "start")), emission.dim(attribute(node, "end"))]
    rest = [emission.ints([attribute(node, n)]) for n in ("axis", "step")]
    emission.node("Slice", [emission.operand(node.operands[0]), *bounds, *rest], node.result.name)


def _concat(emission: Emission, node: Node) -> None:
    names = [emission.operand(o, node.result.dtype) for o in node.operands]
    emission.node("Concat", names, node.result.name, axis=attribute(node, "axis"))


def _indexed(onnx_name: str) -> Emit:
    def emit(emission: Emission, node: Node) -> None:
        names = [emission.operand(o) for o in node.operands]
        emission.node(onnx_name, names, node.result.name, axis=attribute(node, "axis"))

    return emit


def _scatter(emission: Emission, node: Node) -> None:
    """A literal source stands for every index."""
    x, index, source = node.operands
    names = [emission.operand(o) for o in (x, index)]
    names.append(emission.operand(source, node.result.dtype))
    if isinstance(source, bool | int | float):
        shape = emission.full_shape(node.tensor(1).shape)
        names[2] = emission.node("Expand", [names[2], shape])
    emission.node("ScatterElements", names, node.result.name, axis=attribute(node, "axis"))


def _triangle(upper: int) -> Emit:
    def emit(emission: Emission, node: Node) -> None:
        diagonal = emission.scalar(attribute(node, "diagonal"), DType.I64)
        names = [emission.operand(node.operands[0]), diagonal]
        emission.node("Trilu", names, node.result.name, upper=upper)

    return emit


def _arange(emission: Emission, node: Node) -> None:
    dtype = node.result.dtype
    bounds = [_bound(emission, attribute(node, n), dtype) for n in ("start", "end", "step")]
    emission.node("Range", bounds, node.result.name)


def _bound(emission: Emission, dim: int | SymDim, dtype: DType) -> str:
    if not isinstance(dim, SymDim):
        return emission.scalar(dim, dtype)
    scalar = emission.node("Squeeze", [emission.dim(dim), emission.ints([0])])
    return scalar if dtype is DType.I64 else emission.cast(scalar, dtype)


def _full(emission: Emission, node: Node) -> None:
    value = attribute(node, "value")
    shape = emission.full_shape(node.result.shape)
    if isinstance(value, SymDim):
        filler = _bound(emission, value, node.result.dtype)
    else:
        filler = emission.array(np.array(value, NUMPY_DTYPE[node.result.dtype]))
    emission.node("Expand", [filler, shape], node.result.name)


def _matmul(emission: Emission, node: Node) -> None:
    emission.node("MatMul", [emission.operand(o) for o in node.operands], node.result.name)


def _layer_norm(emission: Emission, node: Node) -> None:
    names = [emission.operand(o) for o in node.operands]
    if len(names) == 1:
        width = node.result.shape[-1]
        assert isinstance(width, int)
        names.append(emission.array(np.ones(width, np.float32)))
    eps = attribute(node, "eps")
    emission.node("LayerNormalization", names, node.result.name, axis=-1, epsilon=eps)


PRIMITIVES: dict[str, Emit] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(REDUCE, _reduce),
    "ne": _ne,
    "rsqrt": _rsqrt,
    "silu": _silu,
    "floor_div": _floor_div,
    "remainder": _remainder,
    "where": _where,
    "gelu": _gelu,
    "clamp": _clamp,
    "cast": _cast,
    "argmax": _argmax,
    "cumsum": _cumsum,
    "softmax": _softmax,
    "topk": _topk,
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "slice": _slice,
    "concat": _concat,
    "index_select": _indexed("Gather"),
    "gather": _indexed("GatherElements"),
    "scatter": _scatter,
    "tril": _triangle(0),
    "triu": _triangle(1),
    "arange": _arange,
    "full": _full,
    "matmul": _matmul,
    "layer_norm": _layer_norm,
}
