"""Lowering of aten ops that move or make elements: views, slices, joins, ranges, constants.

Result shapes come from the tracer, so that sizes of -1 and the like need no second reading.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir import Dim, DType, SymDim, Tensor
from .lower_call import Call, Lowered, Unsupported, lowers
from .lower_dims import at_least

_FAR = 2**62  # slice ends at or beyond mean "to the end"


@lowers(
    "view.default", "reshape.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims",
    "squeeze.default", "flatten.using_ints", "unflatten.int", "_unsafe_view.default",
    "view_as.default", "reshape_as.default",
)  # fmt: skip
def reshape(call: Call) -> Lowered:
    """All of them keep the row-major order."""
    return call.reshape(call.tensor("self"), call.shape)


@lowers("expand.default", "expand_as.default", "broadcast_to.default")
def expand(call: Call) -> Lowered:
    """Broadcast to the result's shape."""
    return call.expand(call.tensor("self"), call.shape)


@lowers("broadcast_tensors.default")
def broadcast(call: Call) -> Lowered:
    """All to one shape."""
    kinds = map(call.type_of, call.traced)
    return [call.expand(x, kind.shape) for x, kind in zip(call["tensors"], kinds, strict=True)]


def _transposed(call: Call, x: Tensor, perm: list[int]) -> Lowered:
    if perm == list(range(len(perm))):
        return x
    return call.emit("transpose", x, perm=tuple(perm))


@lowers("permute.default")
def permute(call: Call) -> Lowered:
    """Axes in the given order."""
    x = call.tensor("self")
    return _transposed(call, x, [axis % x.type.rank for axis in call["dims"]])


@lowers("transpose.int")
def transpose(call: Call) -> Lowered:
    """Two axes exchanged."""
    x = call.tensor("self")
    perm = list(range(x.type.rank))
    first, second = call.axis("dim0"), call.axis("dim1")
    perm[first], perm[second] = second, first
    return _transposed(call, x, perm)


@lowers("t.default", "mT.default", "numpy_T.default")
def matrix_transpose(call: Call) -> Lowered:
    """The last two axes exchanged."""
    x = call.tensor("self")
    perm = list(range(x.type.rank))
    return _transposed(call, x, perm[:-2] + perm[-2:][::-1])


@lowers("slice.Tensor")
def slice_(call: Call) -> Lowered:
    """Clamped: the length is the tracer's."""
    x, axis, step = call.tensor("self"), call.axis(), call["step"]
    size = x.shape[axis]
    start = from_start(call, 0 if call["start"] is None else call["start"], size)
    if step == 1:
        return call.slice(x, axis, start, start + call.shape[axis])
    end = from_start(call, size if call["end"] is None else call["end"], size)
    if isinstance(end, SymDim):
        raise Unsupported("a slice with a step over a symbolic axis is not in the IR")
    return call.slice(x, axis, start, end, step)


def from_start(call: Call, index: Dim, size: Dim) -> Dim:
    """An index counted from the start, at most `size`. Raises Unsupported if its sign is open."""
    if isinstance(index, int) and index >= _FAR:
        return size
    if call.dims.at_least(index, 0):
        outside = isinstance(index, int) and isinstance(size, int) and index > size
        return size if outside else index
    if at_least(-index, 1):
        return size + index
    raise Unsupported(f"a slice from {index} may count from either end")


@lowers("select.int")
def select(call: Call) -> Lowered:
    """One index of an axis, which is then dropped."""
    x, axis = call.tensor("self"), call.axis()
    start = from_start(call, call["index"], x.shape[axis])
    return call.reshape(call.slice(x, axis, start, start + 1), call.shape)


def _pieces(call: Call, axis: int) -> list[Tensor]:
    """Slices of `self` as long as the traced results."""
    start: Dim = 0
    pieces = []
    for fake in call.traced:
        end = start + call.type_of(fake).shape[axis]
        pieces.append(call.slice(call.tensor("self"), axis, start, end))
        start = end
    return pieces


@lowers("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default",
        "tensor_split.sections")  # fmt: skip
def split(call: Call) -> Lowered:
    """Slices."""
    return _pieces(call, call.axis())


@lowers("unbind.int")
def unbind(call: Call) -> Lowered:
    """Slices of one, with the axis dropped."""
    x, axis = call.tensor("self"), call.axis()
    return [
        call.reshape(call.slice(x, axis, i, i + 1), call.type_of(fake).shape)
        for i, fake in enumerate(call.traced)
    ]


@lowers("cat.default", "concat.default", "concatenate.default")
def concat(call: Call) -> Lowered:
    """Empty vectors are skipped, as torch does."""
    tensors: list[Tensor] = [t for t in call["tensors"] if t.shape != (0,)]
    if len(tensors) == 1:
        return tensors[0]
    return call.emit("concat", *tensors, axis=call.axis("dim", tensors[0].type.rank))


@lowers("stack.default")
def stack(call: Call) -> Lowered:
    """Joined along a new axis."""
    tensors = call["tensors"]
    axis = call.axis("dim", tensors[0].type.rank + 1)
    whole = call.shape
    one = (*whole[:axis], 1, *whole[axis + 1 :])
    return call.emit("concat", *(call.reshape(t, one) for t in tensors), axis=axis)


@lowers("copy.default")
def copy(call: Call) -> Lowered:
    """The source, in the shape and dtype of what it overwrites."""
    return call.expand(call.cast(call.tensor("src"), call.type.dtype), call.shape)


@lowers("slice_scatter.default")
def slice_scatter(call: Call) -> Lowered:
    """What lies before the slice, the source, what lies behind it."""
    x, source, axis = call.tensor("self"), call.tensor("src"), call.axis()
    start = from_start(call, 0 if call["start"] is None else call["start"], x.shape[axis])
    if call["step"] != 1:
        return _interleaved(call, x, source, axis, start)
    return _replaced(call, x, source, axis, start)


@lowers("select_scatter.default")
def select_scatter(call: Call) -> Lowered:
    """As a slice of one."""
    x, source, axis = call.tensor("self"), call.tensor("src"), call.axis()
    one = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    start = from_start(call, call["index"], x.shape[axis])
    return _replaced(call, x, call.reshape(source, one), axis, start)


def _interleaved(call: Call, x: Tensor, source: Tensor, axis: int, start: Dim) -> Lowered:
    """x with every step-th element along an axis of known size replaced: picked from both."""
    size, count, step = x.shape[axis], source.shape[axis], call["step"]
    if not (isinstance(size, int) and isinstance(count, int) and isinstance(start, int)):
        raise Unsupported("writing to a slice with a step over a symbolic axis is not in the IR")
    order = np.arange(size, dtype=np.int64)
    order[start : start + count * step : step] = size + np.arange(count)
    both = call.emit("concat", x, source, axis=axis)
    picked = call.builder.data(f"{call.name}.order", order)
    return call.emit("index_select", both, picked, axis=axis)


def _replaced(call: Call, x: Tensor, source: Tensor, axis: int, start: Dim) -> Lowered:
    """x with the source in place of its elements from `start` on along an axis."""
    end, size = start + source.shape[axis], x.shape[axis]
    parts = [call.slice(x, axis, 0, start)] if start != 0 else []
    parts += [source] + ([call.slice(x, axis, end, size)] if end != size else [])
    return call.emit("concat", *parts, axis=axis) if len(parts) > 1 else source


@lowers("repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Lowered:
    """Each element several times in a row."""
    x, times = call.tensor("self"), call["repeats"]
    if call["dim"] is None:
        raise Unsupported("repeat_interleave over all axes is not in the IR")
    axis = call.axis()
    before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
    return _tiled(call, x, (*before, 1, *after), (*before, times, *after))


@lowers("repeat.default")
def repeat(call: Call) -> Lowered:
    """The whole tensor several times along axes."""
    x, times = call.tensor("self"), list(call["repeats"])
    sizes = [1] * (len(times) - x.type.rank) + list(x.shape)
    if all(size == 1 or t == 1 for size, t in zip(sizes, times, strict=True)):
        return call.expand(call.reshape(x, tuple(sizes)), call.shape)
    pairs = list(zip(times, sizes, strict=True))
    one = tuple(d for _, size in pairs for d in (1, size))
    return _tiled(call, x, one, tuple(d for pair in pairs for d in pair))


def _tiled(call: Call, x: Tensor, one: tuple[Dim, ...], many: tuple[Dim, ...]) -> Lowered:
    return call.reshape(call.expand(call.reshape(x, one), many), call.shape)


@lowers("pad.default", "constant_pad_nd.default")
def pad(call: Call) -> Lowered:
    """By one value; negative widths cut."""
    if call.arguments.get("mode", "constant") != "constant":
        raise Unsupported(f"padding by {call['mode']} is not in the IR")
    x, widths, value = call.tensor("self"), call["pad"], call.arguments.get("value") or 0
    for i in range(0, len(widths), 2):
        axis = x.type.rank - 1 - i // 2
        before, after = widths[i : i + 2]
        x = _filled(call, x, axis, (before, after), value)
    return x


def _filled(call: Call, x: Tensor, axis: int, widths: tuple[Dim, Dim], value: float) -> Tensor:
    if not all(at_least(w, 0) or at_least(-w, 0) for w in widths):
        raise Unsupported(f"padding by {widths}, which may add or cut, is not in the IR")
    sides: list[Tensor | None] = []
    for width in widths:
        shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
        added = width != 0 and at_least(width, 0)
        filler = float(value) if x.dtype.is_float else int(value)
        sides += [call.emit("full", shape=shape, value=filler, dtype=x.dtype)] if added else [None]
    start, end = (0 if at_least(w, 0) else -w for w in widths)
    parts = [sides[0], call.slice(x, axis, start, x.shape[axis] - end), sides[1]]
    given = [p for p in parts if p is not None]
    return call.emit("concat", *given, axis=axis) if len(given) > 1 else given[0]


@lowers("flip.default")
def flip(call: Call) -> Lowered:
    """Along axes of known size."""
    x = call.tensor("self")
    for axis in (a % x.type.rank for a in call["dims"]):
        size = x.shape[axis]
        if not isinstance(size, int):
            raise Unsupported("flip along a symbolic axis is not in the IR")
        order = call.builder.data(f"{call.name}.order", np.arange(size, dtype=np.int64)[::-1])
        x = call.emit("index_select", x, order, axis=axis)
    return x


@lowers("unfold.default")
def unfold(call: Call) -> Lowered:
    """Windows one apart, along a new last axis: x shifted by each place of a window."""
    x, axis, size = call.tensor("self"), call.axis("dimension"), call["size"]
    if call["step"] != 1:
        raise Unsupported("windows with a step are not in the IR")
    count = x.shape[axis] - (size - 1)
    one = (*x.shape[:axis], count, *x.shape[axis + 1 :], 1)
    shifted = (call.slice(x, axis, i, count + i) for i in range(size))
    return call.emit("concat", *(call.reshape(s, one) for s in shifted), axis=len(one) - 1)


@lowers("tril.default", "triu.default")
def triangle(call: Call) -> Lowered:
    """Lower or upper."""
    op = call.op.partition(".")[0]
    return call.emit(op, call.tensor("self"), diagonal=call["diagonal"])


@lowers("arange.default", "arange.start", "arange.start_step")
def arange(call: Call) -> Lowered:
    """Integers or floats in equal steps."""
    start = call.arguments.get("start", 0)
    step = call.arguments.get("step", 1)
    if any(isinstance(v, float) for v in (start, call["end"], step)):
        raise Unsupported("arange with fractional bounds is not in the IR")
    given = {
        name: v for name, v, default in (("start", start, 0), ("step", step, 1)) if v != default
    }
    return call.emit("arange", **given, end=call["end"], dtype=call.type.dtype)


@lowers(
    "zeros.default", "ones.default", "full.default", "scalar_tensor.default", "zeros_like.default",
    "ones_like.default", "full_like.default", "new_zeros.default", "new_ones.default",
    "new_full.default", "empty.memory_format", "new_empty.default", "empty_like.default",
)  # fmt: skip
def full(call: Call) -> Lowered:
    """Every element the same; what is left open (`empty`) is 0."""
    value: Any = call.arguments.get("fill_value", call.arguments.get("s"))
    if value is None:
        value = 1 if "ones" in call.op else 0
    if not isinstance(value, bool | int | float | SymDim):
        raise Unsupported("full of a tensor's value is not in the IR")
    kind = call.type
    if kind.dtype.is_float and not isinstance(value, SymDim):
        value = float(value)
    elif kind.dtype is DType.BOOL:
        value = bool(value)
    return call.emit("full", shape=kind.shape, value=value, dtype=kind.dtype)


@lowers("one_hot.default")
def one_hot(call: Call) -> Lowered:
    """1 at the index, 0 elsewhere, i64."""
    x = call.tensor("self")
    classes = call.shape[-1]
    numbers = call.emit("arange", end=classes, dtype=DType.I64)
    equal = call.emit("eq", call.reshape(x, (*x.shape, 1)), numbers)
    return call.emit("cast", equal, dtype=DType.I64)
