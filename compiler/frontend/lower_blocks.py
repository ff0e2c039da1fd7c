"""Lowering of aten ops over whole rows: products, norms, lookups, convolutions."""

from __future__ import annotations

import torch

from ..ir import Constant, Dim, DType, Operand, Tensor, Value
from .lower_call import Call, Lowered, Unsupported, lowers
from .lower_math import size_value
from .lower_shape import from_start


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
        scale = size if isinstance(size, int) else size_value(call, size)
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
