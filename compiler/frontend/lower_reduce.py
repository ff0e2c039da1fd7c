"""Lowering of aten ops that reduce an axis, or sum and sort along it."""

from __future__ import annotations

from ..ir import DType
from .lower_call import Call, Lowered, Unsupported, lowers


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


@lowers("linalg_vector_norm.default")
def vector_norm(call: Call) -> Lowered:
    """Euclidean, along one axis."""
    x, axes = call.tensor("self"), call["dim"]
    if call["ord"] != 2 or axes is None or len(axes) != 1:
        raise Unsupported("only Euclidean norms along one axis are in the IR")
    x = call.cast(x, call.type.dtype)
    axis, keep = axes[0] % x.type.rank, bool(call["keepdim"])
    return call.emit("sqrt", call.emit("sum", call.emit("pow", x, 2), axis=axis, keepdim=keep))


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
