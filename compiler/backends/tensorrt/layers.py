"""One function per op: its layers in the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir import DType, Node, Operand, SymDim, Value, attribute
from .emission import Emission, NoLayersError
from .plan import Tensor

Emit = Callable[[Emission, Node], Tensor]
LAYERS: dict[str, Emit] = {}

_UNARY = {
    "neg": "NEG", "abs": "ABS", "exp": "EXP", "log": "LOG", "sqrt": "SQRT", "sin": "SIN",
    "cos": "COS", "erf": "ERF", "floor": "FLOOR", "reciprocal": "RECIP", "logical_not": "NOT",
}  # fmt: skip
_ACTIVATIONS = {"tanh": "TANH", "sigmoid": "SIGMOID", "relu": "RELU", "softplus": "SOFTPLUS"}
_BINARY = {
    "add": "SUM", "sub": "SUB", "mul": "PROD", "div": "DIV", "pow": "POW", "floor_div": "FLOOR_DIV",
    "maximum": "MAX", "minimum": "MIN", "logical_and": "AND", "logical_or": "OR",
}  # fmt: skip
_COMPARISONS = {"eq": ("EQUAL",), "lt": ("LESS",), "gt": ("GREATER",), "ne": ("EQUAL", "NOT"),
                "le": ("LESS", "EQUAL"), "ge": ("GREATER", "EQUAL")}  # fmt: skip
_REDUCTIONS = {"sum": "SUM", "mean": "AVG", "amax": "MAX"}


def emits(*ops: str) -> Callable[[Emit], Emit]:
    """Registers the function that emits these ops."""

    def register(emit: Emit) -> Emit:
        LAYERS.update(dict.fromkeys(ops, emit))
        return emit

    return register


def finish(emission: Emission, node: Node, tensor: Tensor) -> Tensor:
    """The node's result: rounded to its element type."""
    return emission.cast(tensor, emission.types.of(node.results[0]))


def _operand_type(emission: Emission, node: Node, operands: Sequence[Operand]) -> str:
    """What the operands of an elementwise op are brought to."""
    values = [o for o in operands if not isinstance(o, bool | int | float)]
    if any(o.dtype.is_float for o in values):
        return emission.types.computed_in(node)
    if any(isinstance(o, float) for o in operands) or node.op == "div":
        return "f32"
    return "bool" if all(o.dtype is DType.BOOL for o in values) else "i32"


def _operands(emission: Emission, node: Node, operands: Sequence[Operand]) -> list[Tensor]:
    dtype, rank = _operand_type(emission, node, operands), node.result.type.rank
    return [emission.operand(o, dtype, rank) for o in operands]


@emits(*_UNARY)
def _unary(emission: Emission, node: Node) -> Tensor:
    (x,) = _operands(emission, node, node.operands)
    return emission.unary(_UNARY[node.op], x)


@emits(*_ACTIVATIONS)
def _activation(emission: Emission, node: Node) -> Tensor:
    (x,) = _operands(emission, node, node.operands)
    return emission.activation(_ACTIVATIONS[node.op], x)


@emits("rsqrt")
def _rsqrt(emission: Emission, node: Node) -> Tensor:
    (x,) = _operands(emission, node, node.operands)
    return emission.unary("RECIP", emission.unary("SQRT", x))


@emits("silu")
def _silu(emission: Emission, node: Node) -> Tensor:
    (x,) = _operands(emission, node, node.operands)
    return emission.elementwise("PROD", x, emission.activation("SIGMOID", x))


@emits("gelu")
def _gelu(emission: Emission, node: Node) -> Tensor:
    (x,) = _operands(emission, node, node.operands)
    tanh = attribute(node, "approximate") == "tanh"
    return emission.activation("GELU_TANH" if tanh else "GELU_ERF", x)


@emits(*_BINARY)
def _binary(emission: Emission, node: Node) -> Tensor:
    x, y = _operands(emission, node, node.operands)
    return emission.elementwise(_BINARY[node.op], x, y)


@emits("remainder")
def _remainder(emission: Emission, node: Node) -> Tensor:
    x, y = _operands(emission, node, node.operands)
    whole = emission.elementwise("PROD", y, emission.elementwise("FLOOR_DIV", x, y))
    return emission.elementwise("SUB", x, whole)


@emits(*_COMPARISONS)
def _comparison(emission: Emission, node: Node) -> Tensor:
    x, y = _operands(emission, node, node.operands)
    first, *rest = _COMPARISONS[node.op]
    result = emission.elementwise(first, x, y)
    if rest == ["NOT"]:
        return emission.unary("NOT", result)
    for other in rest:
        result = emission.elementwise("OR", result, emission.elementwise(other, x, y))
    return result


@emits("where")
def _where(emission: Emission, node: Node) -> Tensor:
    rank = node.result.type.rank
    condition = emission.operand(node.operands[0], "bool", rank)
    x, y = _operands(emission, node, node.operands[1:])
    return emission.layer("select", [condition, x, y], emission.dims(node.result.shape), x.dtype)


@emits("clamp")
def _clamp(emission: Emission, node: Node) -> Tensor:
    (x,) = _operands(emission, node, node.operands)
    for op, bound in (("MAX", attribute(node, "low")), ("MIN", attribute(node, "high"))):
        if bound is not None:
            x = emission.elementwise(op, x, emission.scalar(bound, x.dtype, x.rank))
    return x


@emits("cast")
def _cast(emission: Emission, node: Node) -> Tensor:
    return emission.cast(emission.value(node.value(0)), emission.types.of(node.result))


@emits(*_REDUCTIONS)
def _reduction(emission: Emission, node: Node) -> Tensor:
    x = emission.value(node.value(0))
    exact = x if x.dtype == "i32" else emission.cast(x, "f32")  # long sums drift in half precision
    axis = int(attribute(node, "axis")) % x.rank
    kept = emission.reduce(_REDUCTIONS[node.op], exact, axis)
    return emission.reshape(kept, emission.dims(node.result.shape))


@emits("softmax")
def _softmax(emission: Emission, node: Node) -> Tensor:
    x = emission.cast(emission.value(node.value(0)), "f32")
    axis = int(attribute(node, "axis")) % x.rank
    return emission.layer("softmax", [x], x.shape, axis=axis)


@emits("reshape")
def _reshape(emission: Emission, node: Node) -> Tensor:
    x = emission.value(node.value(0))
    return emission.reshape(x, emission.dims(node.result.shape))


@emits("transpose")
def _transpose(emission: Emission, node: Node) -> Tensor:
    return emission.transpose(emission.value(node.value(0)), attribute(node, "perm"))


@emits("expand")
def _expand(emission: Emission, node: Node) -> Tensor:
    """Along axes of a known size; the others are as they were."""
    x, shape = emission.value(node.value(0)), emission.dims(node.result.shape)
    x = emission.ranked(x, len(shape))
    axes = [i for i, d in enumerate(shape) if x.shape[i] != d]
    if not axes:
        return x
    sizes = [shape[i] for i in axes]
    if not all(isinstance(size, int) for size in sizes):
        raise NoLayersError("it repeats elements as often as the step has tokens or sequences")
    return emission.layer(
        "slice", [x], shape, axes=tuple(axes), start=(0,) * len(axes),
        size=tuple(int(s) for s in sizes), stride=(0,) * len(axes),
    )  # fmt: skip


@emits("slice")
def _slice(emission: Emission, node: Node) -> Tensor:
    operand, rank = node.tensor(0), node.tensor(0).type.rank
    x = emission.operand(operand, _stored_type(emission, operand, node), rank)
    start, end, step = (attribute(node, n) for n in ("start", "end", "step"))
    if isinstance(start, SymDim) or isinstance(end, SymDim):
        raise NoLayersError("it cuts at a place that lengths decide")
    axis = int(attribute(node, "axis")) % rank
    return part(emission, x, axis, start, -(-(end - start) // step), step)


def part(emission: Emission, x: Tensor, axis: int, start: int, size: int, step: int = 1) -> Tensor:
    """`size` elements along an axis, from `start` in steps of `step`."""
    shape = [size if i == axis else d for i, d in enumerate(x.shape)]
    return emission.layer(
        "slice", [x], shape, axes=(axis,), start=(start,), size=(size,), stride=(step,)
    )


def _stored_type(emission: Emission, operand: Operand, node: Node) -> str:
    if isinstance(operand, Value):
        return emission.types.of(operand)
    return emission.types.of(node.results[0])


@emits("concat")
def _concat(emission: Emission, node: Node) -> Tensor:
    dtype, rank = _operand_type(emission, node, node.operands), node.result.type.rank
    parts = [emission.operand(o, dtype, rank) for o in node.operands]
    axis = int(attribute(node, "axis")) % rank
    return emission.layer("concatenation", parts, emission.dims(node.result.shape), axis=axis)


@emits("embedding")
def _embedding(emission: Emission, node: Node) -> Tensor:
    table, ids = node.tensor(0), node.value(1)
    return _rows(emission, node, table, ids)


@emits("index_select")
def _index_select(emission: Emission, node: Node) -> Tensor:
    if int(attribute(node, "axis")) % node.tensor(0).type.rank:
        raise NoLayersError("it picks along another axis than the first")
    return _rows(emission, node, node.tensor(0), node.value(1))


def _rows(emission: Emission, node: Node, table: Operand, ids: Value) -> Tensor:
    """Rows are picked as they are stored and then brought to the result's type."""
    assert not isinstance(table, bool | int | float)
    wide = table.format == "f32" if not isinstance(table, Value) else False
    dtype = "f32" if wide else emission.types.of(node.results[0])
    rows = emission.operand(table, dtype, table.type.rank)
    index = emission.value(ids)
    shape = (*index.shape, *rows.shape[1:])
    return emission.layer("gather", [rows, index], shape, axis=0, batch=0)


@emits("linear", "linear_residual")
def _linear(emission: Emission, node: Node) -> Tensor:
    dtype = emission.types.computed_in(node)
    weight, *rest = node.operands[1:]
    tensor = emission.cast(emission.value(node.value(0)), dtype)
    matrix = emission.operand(weight, dtype, tensor.rank)
    shape = (*tensor.shape[:-1], matrix.shape[-2])
    result = emission.layer("matmul", [tensor, matrix], shape, transpose=(False, True))
    for addend in reversed(rest):
        result = emission.elementwise("SUM", result, emission.operand(addend, dtype, tensor.rank))
    return result


@emits("matmul")
def _matmul(emission: Emission, node: Node) -> Tensor:
    dtype, rank = emission.types.computed_in(node), node.result.type.rank
    a, b = (emission.operand(o, dtype, rank) for o in node.operands)
    shape = emission.dims(node.result.shape)
    return emission.layer("matmul", [a, b], shape, transpose=(False, False))


@emits("rms_norm")
def _rms_norm(emission: Emission, node: Node) -> Tensor:
    """In f32: the squares of half precision overflow, and their mean needs the digits."""
    x = emission.cast(emission.value(node.value(0)), "f32")
    mean = emission.reduce("AVG", emission.elementwise("PROD", x, x), x.rank - 1)
    shifted = emission.elementwise(
        "SUM", mean, emission.scalar(attribute(node, "eps"), "f32", x.rank)
    )
    normed = emission.elementwise("DIV", x, emission.unary("SQRT", shifted))
    if len(node.operands) == 1:
        return normed
    weight = emission.operand(node.operands[1], "f32", x.rank)
    if offset := attribute(node, "offset"):
        weight = emission.elementwise("SUM", weight, emission.scalar(offset, "f32", x.rank))
    return emission.elementwise("PROD", normed, weight)


@emits("layer_norm")
def _layer_norm(emission: Emission, node: Node) -> Tensor:
    """In f32, as `_rms_norm`."""
    x = emission.cast(emission.value(node.value(0)), "f32")
    width = x.shape[-1]
    assert isinstance(width, int)
    scale, bias = (
        emission.operand(node.operands[1 + i], "f32", x.rank)
        if len(node.operands) > 1 + i
        else emission.literal((value,) * width, "f32", (1,) * (x.rank - 1) + (width,))
        for i, value in enumerate((1.0, 0.0))  # weight, bias
    )
    return emission.layer(
        "normalization", [x, scale, bias], x.shape, axis=x.rank - 1, eps=attribute(node, "eps")
    )


@emits("kv_append")
def _kv_append(emission: Emission, node: Node) -> Tensor:
    """Writes new rows into a cache of fixed capacity, each sequence from its own place."""
    name, axis = str(attribute(node, "state")), int(attribute(node, "axis"))
    if node.result.type.rank != 4 or axis % 4 != 2:
        raise NoLayersError("a cache is [B, heads, tokens, width]")
    new = emission.cast(emission.value(node.value(0)), emission.types.of_state(node))
    shape = emission.dims(node.result.shape)
    past = emission.tensors[f"{name}.past"]
    return emission.layer(
        "kv_cache_update", [past, new, emission.tensors["write_indices"]], shape,
        name=f"{name}.present",
    )  # fmt: skip
