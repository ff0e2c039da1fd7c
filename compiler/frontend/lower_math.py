"""Lowering of aten ops that compute each element by itself."""

from __future__ import annotations

from functools import partial

import torch

from ..ir import Constant, Dim, DType, Operand, Value
from .lower_call import Call, Lowered, Unsupported, lowers

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
    return size_value(call, value)


def size_value(call: Call, size: Dim) -> Value:
    """A size as a value of the graph: i64 []."""
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


@lowers("erfinv.default", "special_erfinv.default")
def erfinv(call: Call) -> Lowered:
    """Of a number that is known when compiling: ONNX has no such op."""
    x = call.known("self")
    number = call.builder.data(call.name, torch.special.erfinv(x).numpy())
    return call.reshape(number, call.shape)


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
