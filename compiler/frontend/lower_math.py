"""Lowering of aten ops that compute: elementwise, reductions, products, norms, lookups."""

from __future__ import annotations

from functools import partial

import torch

from ..ir import Constant, Dim, DType, Operand, Tensor, Value
from .lower_call import Call, Lowered, Unsupported, lowers
from .lower_shape import from_start

_UNARY = {
    "neg": "neg", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tanh": "tanh", "erf": "erf",
    "sigmoid": "sigmoid", "silu": "silu", "relu": "relu", "floor": "floor",
    "logical_not": "logical_not",
}  # fmt: skip
_BINARY = {
    "mul": "mul", "multiply": "mul", "pow": "pow", "floor_divide": "floor_div",
    "remainder": "remainder",
    "maximum": "maximum", "minimum": "minimum", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le",
    "gt": "gt", "ge": "ge", "logical_and": "logical_and", "logical_or": "logical_or",
}  # fmt: skip
_BINARY_OVERLOADS = ("Tensor", "Scalar", "default", "Tensor_Tensor", "Tensor_Scalar")
_LOGICAL = {
    "bitwise_and": "logical_and", "__and__": "logical_and", "bitwise_or": "logical_or",
    "__or__": "logical_or",
}  # fmt: skip


def _declare_elementwise() -> None:
    for aten, op in _UNARY.items():
        lowers(f"{aten}.default")(partial(_unary, op))
    for aten, op in _BINARY.items():
        lowers(*(f"{aten}.{overload}" for overload in _BINARY_OVERLOADS))(partial(_binary, op))
    for aten, op in _LOGICAL.items():
        lowers(f"{aten}.Tensor", f"{aten}.Scalar")(partial(_logical, op))


def _unary(op: str, call: Call) -> Lowered:
    return call.emit(op, call.tensor("self"))


def operand(call: Call, argument: str) -> Operand:
    """A tensor or literal argument; a symbolic size becomes a scalar tensor."""
    value = call[argument]
    if isinstance(value, Value | Constant | bool | int | float):
        return value
    return _scalar(call, value)


def _scalar(call: Call, size: Dim) -> Value:
    return call.emit("full", shape=(), value=size, dtype=DType.I64)


def _other(call: Call) -> str:
    return next(n for n in ("other", "exponent", "value") if n in call.arguments)


def _binary(op: str, call: Call) -> Lowered:
    return call.emit(op, operand(call, "self"), operand(call, _other(call)))


def _logical(op: str, call: Call) -> Lowered:
    if call.type.dtype is not DType.BOOL:
        raise Unsupported("bit operations on integers are not in the IR")
    return _binary(op, call)


_declare_elementwise()


@lowers("bitwise_not.default")
def bitwise_not(call: Call) -> Lowered:
    """Of booleans only."""
    if call.type.dtype is not DType.BOOL:
        raise Unsupported("bit operations on integers are not in the IR")
    return call.emit("logical_not", call.tensor("self"))


@lowers("pow.Scalar")
def power_of_scalar(call: Call) -> Lowered:
    """number ** tensor"""
    return call.emit("pow", operand(call, "self"), operand(call, "exponent"))


@lowers("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def add(call: Call) -> Lowered:
    """self +- alpha * other"""
    op = "add" if "add" in call.op else "sub"
    return call.emit(op, operand(call, "self"), _scaled(call, operand(call, "other")))


@lowers("rsub.Scalar", "rsub.Tensor")
def reversed_sub(call: Call) -> Lowered:
    """other - alpha * self"""
    return call.emit("sub", operand(call, "other"), _scaled(call, operand(call, "self")))


def _scaled(call: Call, value: Operand) -> Operand:
    alpha = call.arguments.get("alpha", 1)
    return value if alpha == 1 else call.emit("mul", value, alpha)


@lowers("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "true_divide.Tensor")
def div(call: Call) -> Lowered:
    """self / other, true or rounded down"""
    mode = call.arguments.get("rounding_mode")
    if mode not in (None, "floor"):
        raise Unsupported(f"division with rounding mode {mode!r} is not in the IR")
    op = "floor_div" if mode else "div"
    return call.emit(op, operand(call, "self"), operand(call, "other"))


@lowers("square.default")
def square(call: Call) -> Lowered:
    """x ^ 2"""
    return call.emit("pow", call.tensor("self"), 2)


@lowers("gelu.default")
def gelu(call: Call) -> Lowered:
    """exact or by tanh"""
    return call.emit("gelu", call.tensor("self"), approximate=call["approximate"])


@lowers("softplus.default")
def softplus(call: Call) -> Lowered:
    """log(1 + e^x); the IR has beta 1 only"""
    if call["beta"] != 1:
        raise Unsupported(f"softplus with beta {call['beta']} is not in the IR")
    return call.emit("softplus", call.tensor("self"))


@lowers("log_sigmoid.default")
def log_sigmoid(call: Call) -> Lowered:
    """-log(1 + e^-x)"""
    return call.emit("neg", call.emit("softplus", call.emit("neg", call.tensor("self"))))


@lowers("clamp.default", "clamp_min.default", "clamp_max.default")
def clamp(call: Call) -> Lowered:
    """limits as attributes"""
    limits = {"low": call.arguments.get("min"), "high": call.arguments.get("max")}
    given = {name: value for name, value in limits.items() if value is not None}
    return call.emit("clamp", call.tensor("self"), **given)


@lowers("clamp.Tensor")
def clamp_by_tensors(call: Call) -> Lowered:
    """Limits that are computed."""
    x = call.tensor("self")
    for limit, op in (("min", "maximum"), ("max", "minimum")):
        if call[limit] is not None:
            x = call.emit(op, x, call.tensor(limit))
    return x


@lowers("max.other", "min.other")
def larger_or_smaller(call: Call) -> Lowered:
    """Elementwise"""
    op = "maximum" if "max" in call.op else "minimum"
    return call.emit(op, call.tensor("self"), call.tensor("other"))


@lowers("expm1.default")
def expm1(call: Call) -> Lowered:
    """e^x - 1; near 0 to the precision of 1, not of the result"""
    return call.emit("sub", call.emit("exp", call.tensor("self")), 1.0)


@lowers("log1p.default")
def log1p(call: Call) -> Lowered:
    """log(1 + x); near 0 to the precision of 1, not of the result"""
    return call.emit("log", call.emit("add", call.tensor("self"), 1.0))


@lowers("logsumexp.default")
def logsumexp(call: Call) -> Lowered:
    """Along one axis, from the largest element."""
    x = call.tensor("self")
    if len(call["dim"]) != 1:
        raise Unsupported("logsumexp over several axes is not in the IR")
    axis = call["dim"][0] % x.type.rank
    top = call.emit("amax", x, axis=axis, keepdim=True)
    total = call.emit("sum", call.emit("exp", call.emit("sub", x, top)), axis=axis, keepdim=True)
    return call.reshape(call.emit("add", call.emit("log", total), top), call.shape)


@lowers("std.dim", "var.dim", "std.correction", "var.correction")
def spread(call: Call) -> Lowered:
    """Standard deviation or variance along one axis of known size."""
    x, axes = call.tensor("self"), call["dim"]
    correction = call.arguments.get("correction", int(bool(call.arguments.get("unbiased", True))))
    size = x.shape[axes[0]] if axes and len(axes) == 1 else None
    if not isinstance(size, int):
        raise Unsupported("the spread over several axes or a symbolic one is not in the IR")
    axis = axes[0] % x.type.rank
    off = call.emit("sub", x, call.emit("mean", x, axis=axis, keepdim=True))
    total = call.emit("sum", call.emit("pow", off, 2), axis=axis, keepdim=bool(call["keepdim"]))
    variance = call.emit("div", total, float(size - (1 if correction is None else correction)))
    return call.emit("sqrt", variance) if "std" in call.op else variance


@lowers("erfinv.default", "special_erfinv.default")
def erfinv(call: Call) -> Lowered:
    """Of a number that is known when compiling: ONNX has no such op."""
    x = call.known("self")
    number = call.builder.data(call.name, torch.special.erfinv(x).numpy())
    return call.reshape(number, call.shape)


@lowers("linalg_vector_norm.default")
def vector_norm(call: Call) -> Lowered:
    """Euclidean, along one axis."""
    x, axes = call.tensor("self"), call["dim"]
    if call["ord"] != 2 or axes is None or len(axes) != 1:
        raise Unsupported("only Euclidean norms along one axis are in the IR")
    x = call.cast(x, call.type.dtype)
    axis, keep = axes[0] % x.type.rank, bool(call["keepdim"])
    return call.emit("sqrt", call.emit("sum", call.emit("pow", x, 2), axis=axis, keepdim=keep))


@lowers("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(call: Call) -> Lowered:
    """condition ? self : other"""
    return call.emit(
        "where", call.tensor("condition"), operand(call, "self"), operand(call, "other")
    )


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(call: Call) -> Lowered:
    """value where the mask holds"""
    return call.emit("where", call.tensor("mask"), operand(call, "value"), call.tensor("self"))


@lowers(
    "to.dtype", "to.device", "to.dtype_layout", "to.other", "_to_copy.default", "type_as.default",
)  # fmt: skip
def to(call: Call) -> Lowered:
    """A cast, or nothing; devices do not matter."""
    return call.cast(call.tensor("self"), call.type.dtype)


@lowers("dropout.default")
def dropout(call: Call) -> Lowered:
    """Nothing at inference."""
    if call["train"] and call["p"] > 0:
        raise Unsupported("dropout is active although the model is in inference mode")
    return call.tensor("input")


@lowers("softmax.int", "_softmax.default")
def softmax(call: Call) -> Lowered:
    """In the result's dtype."""
    x = call.cast(call.tensor("self"), call.type.dtype)
    return call.emit("softmax", x, axis=call.axis())


@lowers(
    "sum.dim_IntList", "mean.dim", "amax.default", "sum.default", "mean.default", "max.default",
)  # fmt: skip
def reduce(call: Call) -> Lowered:
    """One axis after the other."""
    op = "amax" if call.op == "max.default" else call.op.partition(".")[0]
    x = call.cast(call.tensor("self"), call.type.dtype) if op != "amax" else call.tensor("self")
    rank = x.type.rank
    axes = call.arguments.get("dim")
    axes = range(rank) if axes is None or axes == [] else [a % rank for a in axes]
    keep = bool(call.arguments.get("keepdim", False))
    for axis in sorted(axes, reverse=True):
        x = call.emit(op, x, axis=axis, keepdim=keep)
    return x


@lowers("max.dim")
def max_and_index(call: Call) -> Lowered:
    """Largest along an axis, and where it is first."""
    x, axis, keep = call.tensor("self"), call.axis(), bool(call["keepdim"])
    return [call.emit(op, x, axis=axis, keepdim=keep) for op in ("amax", "argmax")]


@lowers("argmax.default")
def argmax(call: Call) -> Lowered:
    """Along one axis only."""
    if call["dim"] is None:
        raise Unsupported("argmax over all axes is not in the IR")
    return call.emit("argmax", call.tensor("self"), axis=call.axis(), keepdim=call["keepdim"])


@lowers("diff.default")
def diff(call: Call) -> Lowered:
    """Differences of neighbours along an axis; of booleans, whether they differ."""
    if call["n"] != 1:
        raise Unsupported("repeated differences are not in the IR")
    axis = call.axis()
    given = [call[n] for n in ("prepend", "self", "append") if call[n] is not None]
    x = call.emit("concat", *given, axis=axis) if len(given) > 1 else given[0]
    left = call.slice(x, axis, 0, x.shape[axis] - 1)
    right = call.slice(x, axis, 1, x.shape[axis])
    return call.emit("ne" if x.dtype is DType.BOOL else "sub", right, left)


@lowers("cumsum.default")
def cumsum(call: Call) -> Lowered:
    """Running sum in the result's dtype."""
    return call.emit("cumsum", call.cast(call.tensor("self"), call.type.dtype), axis=call.axis())


@lowers("topk.default")
def topk(call: Call) -> Lowered:
    """The largest only."""
    if not call["largest"]:
        raise Unsupported("topk of the smallest is not in the IR")
    return call.emit_many("topk", call.tensor("self"), k=call["k"], axis=call.axis())


@lowers("matmul.default", "bmm.default", "mm.default")
def matmul(call: Call) -> Lowered:
    """Of at least two axes each."""
    second = "other" if "other" in call.arguments else "mat2"
    a, b = call.tensor("self"), call.tensor(second)
    if a.type.rank < 2 or b.type.rank < 2:
        raise Unsupported("matmul of a vector is not in the IR")
    return call.emit("matmul", a, b)


@lowers("addmm.default", "baddbmm.default")
def addmm(call: Call) -> Lowered:
    """beta * self + alpha * (a b)"""
    first, second = ("mat1", "mat2") if "mat1" in call.arguments else ("batch1", "batch2")
    product: Operand = call.emit("matmul", call.tensor(first), call.tensor(second))
    if call["alpha"] != 1:
        product = call.emit("mul", product, call["alpha"])
    bias: Operand = call.tensor("self")
    if call["beta"] != 1:
        bias = call.emit("mul", bias, call["beta"])
    return call.emit("add", product, bias)


@lowers("linear.default")
def linear(call: Call) -> Lowered:
    """x weight^T + bias"""
    operands = [call.tensor("input"), call.tensor("weight")]
    if call["bias"] is not None:
        operands.append(call.tensor("bias"))
    return call.emit("linear", *operands)


@lowers("embedding.default")
def embedding(call: Call) -> Lowered:
    """Rows of the weight."""
    return call.emit("embedding", call.tensor("weight"), call.tensor("indices"))


@lowers("layer_norm.default")
def layer_norm(call: Call) -> Lowered:
    """Over the last axis only."""
    _last_axis_only(call)
    if call["weight"] is None and call["bias"] is not None:
        raise Unsupported("a layer norm with a bias but no weight is not in the IR")
    given = [n for n in ("input", "weight", "bias") if call[n] is not None]
    return call.emit("layer_norm", *(call.tensor(n) for n in given), eps=call["eps"])


@lowers("rms_norm.default")
def rms_norm(call: Call) -> Lowered:
    """As primitives, in the order that torch computes them."""
    _last_axis_only(call)
    x = call.tensor("input")
    eps = torch.finfo(torch.float32).eps if call["eps"] is None else call["eps"]
    mean = call.emit("mean", call.emit("pow", x, 2), axis=x.type.rank - 1, keepdim=True)
    normed = call.emit("mul", x, call.emit("rsqrt", call.emit("add", mean, eps)))
    return normed if call["weight"] is None else call.emit("mul", normed, call.tensor("weight"))


def _last_axis_only(call: Call) -> None:
    if len(call["normalized_shape"]) != 1:
        raise Unsupported("a norm over several axes is not in the IR")


@lowers("index_select.default")
def index_select(call: Call) -> Lowered:
    """Slices at the index."""
    return call.emit("index_select", call.tensor("self"), call.tensor("index"), axis=call.axis())


@lowers("index.Tensor")
def index(call: Call) -> Lowered:
    """x[:, i, j]: neighbouring integer tensors; negative ones only where one is a constant."""
    given = [(axis, i) for axis, i in enumerate(call["indices"]) if i is not None]
    axes = [axis for axis, _ in given]
    if any(i.dtype is DType.BOOL for _, i in given) or axes[-1] - axes[0] != len(axes) - 1:
        raise Unsupported("only indexing of neighbouring axes by integers is in the IR")
    x, axis, indices = call.tensor("self"), axes[0], given[0][1]
    if len(given) > 1:
        return _index_several(call, axis, [i for _, i in given])
    if isinstance(indices, Constant) and indices.data is not None and indices.shape == (1,):
        start = from_start(call, int(indices.data[0]), x.shape[axis])
        return call.slice(x, axis, start, start + 1)
    return call.emit("index_select", x, indices, axis=axis)


def _index_several(call: Call, first: int, indices: list[Tensor]) -> Lowered:
    """The axes joined into one, and the indices into one number."""
    x = call.tensor("self")
    last = first + len(indices)
    joined: Dim = 1
    number: Tensor | None = None
    for size, i in zip(x.shape[first:last], indices, strict=True):
        joined = joined * size
        scale = size if isinstance(size, int) else _scalar(call, size)
        number = i if number is None else call.emit("add", call.emit("mul", number, scale), i)
    assert number is not None
    flat = call.reshape(x, (*x.shape[:first], joined, *x.shape[last:]))
    return call.emit("index_select", flat, number, axis=first)


@lowers("index_put.default")
def index_put(call: Call) -> Lowered:
    """x[mask] = number, the mask as large as x"""
    indices, values = call["indices"], call.tensor("values")
    x, mask = call.tensor("self"), indices[0]
    whole = len(indices) == 1 and mask.dtype is DType.BOOL and mask.shape == x.shape
    if not whole or values.shape not in ((), (1,)) or call["accumulate"]:
        raise Unsupported(
            "only writing one number where a mask of the same shape holds is in the IR"
        )
    return call.emit("where", mask, call.cast(values, x.dtype), x)


@lowers("gather.default")
def gather(call: Call) -> Lowered:
    """Elements at the index."""
    return call.emit("gather", call.tensor("self"), call.tensor("index"), axis=call.axis())


@lowers("scatter.src", "scatter.value")
def scatter(call: Call) -> Lowered:
    """Elements replaced at the index."""
    source = call["src"] if "src" in call.arguments else call["value"]
    return call.emit("scatter", call.tensor("self"), call.tensor("index"), source, axis=call.axis())


@lowers("conv1d.default")
def conv1d(call: Call) -> Lowered:
    """A sum over the kernel's taps: each a product with x shifted by one more token."""
    x, weight, groups = call.tensor("input"), call.tensor("weight"), call["groups"]
    outputs, inputs, taps = weight.shape
    plain = [list(call[n]) == [1] for n in ("stride", "dilation")]
    if not all(plain) or not isinstance(taps, int):
        raise Unsupported("only convolutions of stride and dilation 1 are in the IR")
    x, length = _padded(call, x, call["padding"][0]), call.shape[-1]
    total: Value | None = None
    for tap in range(taps):
        kernel = call.reshape(call.slice(weight, 2, tap, tap + 1), (outputs, inputs))
        part = _tap(call, kernel, call.slice(x, 2, tap, length + tap), groups)
        total = part if total is None else call.emit("add", total, part)
    assert total is not None
    if call["bias"] is None:
        return total
    return call.emit("add", total, call.reshape(call.tensor("bias"), (outputs, 1)))


def _tap(call: Call, kernel: Tensor, x: Tensor, groups: int) -> Value:
    """kernel [O, C / groups] by x [B, C, T]; each group of outputs sees its own inputs."""
    outputs, inputs = kernel.shape
    if groups == outputs and inputs == 1:
        return call.emit("mul", x, kernel)
    if groups == 1:
        return call.emit("matmul", kernel, x)
    assert isinstance(outputs, int)
    batch, _, length = x.shape
    apart = call.reshape(kernel, (groups, outputs // groups, inputs))
    product = call.emit("matmul", apart, call.reshape(x, (batch, groups, inputs, length)))
    return call.emit("reshape", product, shape=(batch, outputs, length))


def _padded(call: Call, x: Tensor, width: int) -> Tensor:
    if width == 0:
        return x
    zeros = call.emit("full", shape=(*x.shape[:2], width), value=0.0, dtype=x.dtype)
    return call.emit("concat", zeros, x, zeros, axis=2)
