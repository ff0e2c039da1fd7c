"""Primitive ops: what a traced model consists of. Each function is the op's meaning in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import rules
from .ops import OPS, Kind, declare
from .types import DType

TORCH_DTYPE = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F64: torch.float64,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}

_UNARY: dict[str, tuple[Any, str]] = {
    "neg": (torch.neg, "-x"),
    "abs": (torch.abs, "|x|"),
    "exp": (torch.exp, "e^x"),
    "log": (torch.log, "natural logarithm"),
    "sqrt": (torch.sqrt, "square root"),
    "rsqrt": (torch.rsqrt, "1 / sqrt(x)"),
    "reciprocal": (torch.reciprocal, "1 / x"),
    "sin": (torch.sin, "sine"),
    "cos": (torch.cos, "cosine"),
    "tanh": (torch.tanh, "hyperbolic tangent"),
    "erf": (torch.erf, "error function"),
    "sigmoid": (torch.sigmoid, "1 / (1 + e^-x)"),
    "silu": (functional.silu, "x * sigmoid(x)"),
    "relu": (functional.relu, "max(x, 0)"),
    "softplus": (functional.softplus, "log(1 + e^x)"),
    "floor": (torch.floor, "largest integer not above x"),
    "logical_not": (torch.logical_not, "true where x is false"),
}
_BINARY: dict[str, tuple[Any, Any, str]] = {
    "add": (torch.add, rules.elementwise, "x + y"),
    "sub": (torch.sub, rules.elementwise, "x - y"),
    "mul": (torch.mul, rules.elementwise, "x * y"),
    "div": (torch.div, rules.division, "x / y"),
    "pow": (torch.pow, rules.elementwise, "x to the power of y"),
    "floor_div": (torch.floor_divide, rules.elementwise, "floor(x / y)"),
    "remainder": (torch.remainder, rules.elementwise, "x - y * floor(x / y)"),
    "maximum": (torch.maximum, rules.elementwise, "the larger one"),
    "minimum": (torch.minimum, rules.elementwise, "the smaller one"),
    "eq": (torch.eq, rules.comparison, "x = y"),
    "ne": (torch.ne, rules.comparison, "x differs from y"),
    "lt": (torch.lt, rules.comparison, "x < y"),
    "le": (torch.le, rules.comparison, "x <= y"),
    "gt": (torch.gt, rules.comparison, "x > y"),
    "ge": (torch.ge, rules.comparison, "x >= y"),
    "logical_and": (torch.logical_and, rules.comparison, "both true"),
    "logical_or": (torch.logical_or, rules.comparison, "either true"),
}


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _declare_elementwise() -> None:
    for name, (function, doc) in _UNARY.items():
        rule = rules.same if name in ("neg", "abs", "relu", "logical_not") else rules.floating

        def unary(x: Tensor, function: Any = function) -> Tensor:
            result: Tensor = function(x)
            return result

        unary.__doc__ = doc
        declare(f"{name}(x)", rule, kind=Kind.ELEMENTWISE)(unary)
    for name, (function, rule, doc) in _BINARY.items():

        def binary(x: Any, y: Any, function: Any = function) -> Tensor:
            scalar_ok = isinstance(x, Tensor) and function not in (torch.maximum, torch.minimum)
            result: Tensor = function(_tensor(x), y if scalar_ok else _tensor(y))
            return result

        binary.__doc__ = doc
        declare(f"{name}(x, y)", rule, kind=Kind.ELEMENTWISE)(binary)


_declare_elementwise()


@declare("where(condition, x, y)", rules.selection, kind=Kind.ELEMENTWISE)
def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """x where the condition holds, else y"""
    return torch.where(condition, x, y)


@declare('gelu(x, *, approximate: str = "none")', rules.same, kind=Kind.ELEMENTWISE)
def gelu(x: Tensor, approximate: str) -> Tensor:
    """x times the normal distribution function: exact (none) or by tanh"""
    return functional.gelu(x, approximate=approximate)


@declare("clamp(x, *, low: float = None, high: float = None)", rules.same, kind=Kind.ELEMENTWISE)
def clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """x limited to [low, high]"""
    return torch.clamp(x, low, high)


@declare("cast(x, *, dtype: dtype)", rules.cast, kind=Kind.ELEMENTWISE)
def cast(x: Tensor, dtype: DType) -> Tensor:
    """x in another dtype"""
    return x.to(TORCH_DTYPE[dtype])


@declare("sum(x, *, axis: int, keepdim: bool = False)", rules.reduced)
def sum_(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    """sum along an axis"""
    return torch.sum(x, axis, keepdim=keepdim, dtype=x.dtype)


@declare("mean(x, *, axis: int, keepdim: bool = False)", rules.reduced)
def mean(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    """mean along an axis"""
    return torch.mean(x, axis, keepdim=keepdim)


@declare("amax(x, *, axis: int, keepdim: bool = False)", rules.reduced)
def amax(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    """maximum along an axis"""
    return torch.amax(x, axis, keepdim=keepdim)


@declare("argmax(x, *, axis: int, keepdim: bool = False)", rules.reduced)
def argmax(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    """index of the first maximum along an axis, i64"""
    return torch.argmax(x, axis, keepdim=keepdim)


@declare("cumsum(x, *, axis: int)", rules.same)
def cumsum(x: Tensor, axis: int) -> Tensor:
    """running sum along an axis"""
    return torch.cumsum(x, axis, dtype=x.dtype)


@declare("softmax(x, *, axis: int)", rules.same)
def softmax(x: Tensor, axis: int) -> Tensor:
    """e^(x - max) / sum along an axis"""
    return torch.softmax(x, axis)


@declare("topk(x, *, k: dim, axis: int = -1)", rules.top, results=2)
def topk(x: Tensor, k: int, axis: int) -> tuple[Tensor, Tensor]:
    """the k largest along an axis, descending, and their indices"""
    values, indices = torch.topk(x, k, dim=axis)
    return values, indices


@declare("reshape(x, *, shape: dims)", rules.reshaped, kind=Kind.SHAPE)
def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """same elements in row-major order, other shape"""
    return x.reshape(shape)


@declare("transpose(x, *, perm: ints)", rules.transposed, kind=Kind.SHAPE)
def transpose(x: Tensor, perm: tuple[int, ...]) -> Tensor:
    """axes reordered: result axis i is operand axis perm[i]"""
    return x.permute(perm)


@declare("expand(x, *, shape: dims)", rules.expanded, kind=Kind.SHAPE)
def expand(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """broadcast to a shape"""
    return x.expand(shape)


@declare(
    "slice(x, *, axis: int, start: dim, end: dim, step: int = 1)", rules.sliced, kind=Kind.SHAPE
)
def slice_(x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    """elements start, start + step, ... below end along an axis"""
    index = [slice(None)] * x.dim()
    index[axis] = slice(start, end, step)
    return x[tuple(index)]


@declare("concat(xs*, *, axis: int)", rules.concatenated, kind=Kind.SHAPE)
def concat(*xs: Tensor, axis: int) -> Tensor:
    """joined along an axis"""
    return torch.cat(xs, axis)


@declare("index_select(x, index, *, axis: int)", rules.gathered)
def index_select(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """slices of x at the given positions of an axis; the index has any shape"""
    picked = torch.index_select(x, axis, index.reshape(-1).long())
    axis %= x.dim()
    return picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


@declare("gather(x, index, *, axis: int)", rules.like_index)
def gather(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """torch.gather: result[i][j] = x[index[i][j]][j] along an axis"""
    return torch.gather(x, axis, index.long())


@declare("scatter(x, index, source, *, axis: int)", rules.same)
def scatter(x: Tensor, index: Tensor, source: Any, axis: int) -> Tensor:
    """x with elements at index replaced by the source's (torch.scatter)"""
    return torch.scatter(x, axis, index.long(), source)


@declare("tril(x, *, diagonal: int = 0)", rules.same)
def tril(x: Tensor, diagonal: int) -> Tensor:
    """lower triangle of the last two axes, zero elsewhere"""
    return torch.tril(x, diagonal)


@declare("triu(x, *, diagonal: int = 0)", rules.same)
def triu(x: Tensor, diagonal: int) -> Tensor:
    """upper triangle of the last two axes, zero elsewhere"""
    return torch.triu(x, diagonal)


@declare("arange(*, start: dim = 0, end: dim, step: int = 1, dtype: dtype)", rules.ranged)
def arange(start: int, end: int, step: int, dtype: DType) -> Tensor:
    """start, start + step, ... below end"""
    return torch.arange(start, end, step, dtype=TORCH_DTYPE[dtype])


@declare("full(*, shape: dims, value: scalar, dtype: dtype)", rules.from_shape)
def full(shape: tuple[int, ...], value: float, dtype: DType) -> Tensor:
    """every element has the same value"""
    return torch.full(shape, value, dtype=TORCH_DTYPE[dtype])


@declare("matmul(a, b)", rules.matmul)
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """matrix product over the last two axes, the others broadcast"""
    return torch.matmul(a, b)


@declare("linear(x, weight, bias?)", rules.linear, kind=Kind.LAST_AXIS)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias; weight [n, k]"""
    return functional.linear(x, weight, bias)


@declare("embedding(weight, ids)", rules.embedding)
def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """rows of weight [n, k]"""
    return functional.embedding(ids, weight)


assert OPS
