"""One aten call being lowered, and the table of functions that lower them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..ir import (
    Attr,
    Builder,
    Constant,
    Dim,
    DType,
    Graph,
    Interpreter,
    Level,
    Operand,
    Shape,
    Tensor,
    TensorType,
    Value,
)
from ..ir.primitives import TORCH_DTYPE
from .lower_dims import DimTable

DTYPES = {theirs: ours for ours, theirs in TORCH_DTYPE.items()}
Lowered = Tensor | Sequence[Tensor]


class Unsupported(ValueError):
    """A call that the IR cannot express; the message says why. All of a graph's are reported."""


class Call:
    """One call of an aten op: its arguments by name, and the place to emit nodes.

    Args:
        op: the overload's name, such as ``add.Tensor``.
        name: for the results.
        arguments: by schema name, defaults filled in; tensors are IR values, sizes are dims.
        traced: what the tracer says that the call returns (fake tensor or tuple of them).
    """

    def __init__(
        self,
        op: str,
        name: str,
        scope: str,
        arguments: Mapping[str, Any],
        traced: Any,
        builder: Builder,
        dims: DimTable,
    ) -> None:
        self.op = op
        self.name = name
        self.scope = scope
        self.arguments = arguments
        self.traced = traced
        self.builder = builder
        self.dims = dims

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def tensor(self, argument: str) -> Tensor:
        """A tensor argument. Raises Unsupported if it is something else."""
        value = self.arguments[argument]
        if not isinstance(value, Value | Constant):
            raise Unsupported(f"{argument} is {value!r}, not a tensor")
        return value

    def known(self, argument: str) -> torch.Tensor:
        """A tensor argument's value. Raises Unsupported if it depends on inputs or parameters."""
        graph = Graph("known", Level.TRACED, nodes=list(self.builder.graph.nodes))
        graph.outputs = [self.emit("cast", self.tensor(argument), dtype=DType.F32)]
        graph.nodes.append(self.builder.graph.nodes[-1])
        graph.sweep()
        try:
            (result,) = Interpreter(graph, _no_parameter).run({})
        except KeyError as missing:
            raise Unsupported(f"{argument} is not known when compiling") from missing
        return result

    def axis(self, argument: str = "dim", rank: int | None = None) -> int:
        """An axis argument, made non-negative; of `self` unless a rank is given."""
        axis: int = self.arguments[argument]
        return axis % (rank or max(self.tensor("self").type.rank, 1))

    @property
    def type(self) -> TensorType:
        """What the call returns, by the tracer."""
        return self.type_of(self.traced)

    @property
    def shape(self) -> Shape:
        """Shape of what the call returns."""
        return self.type.shape

    def type_of(self, fake: Any) -> TensorType:
        """IR type of a fake tensor. Raises Unsupported for dtypes that the IR lacks."""
        if fake.dtype not in DTYPES:
            raise Unsupported(f"dtype {fake.dtype} is not in the IR")
        return TensorType(DTYPES[fake.dtype], tuple(self.dims.dim(s) for s in fake.shape))

    def emit(self, op: str, *operands: Operand, **attrs: Attr) -> Value:
        """A new node in the call's scope; the first one takes the call's name."""
        return self.builder.emit(op, operands, self.scope, name=self.name, **attrs)

    def emit_many(self, op: str, *operands: Operand, **attrs: Attr) -> list[Value]:
        """As `emit`, for an op with several results."""
        node = self.builder.node(op, operands, self.scope, name=self.name, **attrs)
        self.builder.graph.nodes.append(node)
        return node.results

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """x in that dtype; nothing if it has it."""
        return x if x.dtype is dtype else self.emit("cast", x, dtype=dtype)

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        """x in that shape; nothing if it has it."""
        return x if x.shape == shape else self.emit("reshape", x, shape=shape)

    def expand(self, x: Tensor, shape: Shape) -> Tensor:
        """x broadcast to that shape; nothing if it has it."""
        return x if x.shape == shape else self.emit("expand", x, shape=shape)

    def slice(self, x: Tensor, axis: int, start: Dim, end: Dim, step: int = 1) -> Tensor:
        """start <= i < end along an axis; nothing if that is all of it."""
        if (start, end, step) == (0, x.shape[axis], 1):
            return x
        if step == 1:
            return self.emit("slice", x, axis=axis, start=start, end=end)
        return self.emit("slice", x, axis=axis, start=start, end=end, step=step)


def _no_parameter(name: str) -> torch.Tensor:
    raise KeyError(name)


Lowering = Callable[[Call], Lowered]
LOWERINGS: dict[Any, Lowering] = {}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers a function for aten overloads such as ``add.Tensor``.

    Names that the installed torch lacks are left out.
    """

    def register(function: Lowering) -> Lowering:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if op is not None:
                LOWERINGS[op] = function
        return function

    return register


def by_schema(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the op's schema, defaults filled in."""
    named: dict[str, Any] = {}
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif index < len(args):
            named[argument.name] = args[index]
        else:
            named[argument.name] = argument.default_value
    return named


@lowers(
    "alias.default", "contiguous.default", "clone.default", "detach.default",
    "detach_.default", "lift_fresh_copy.default", "lift_fresh.default", "positive.default",
)  # fmt: skip
def same_tensor(call: Call) -> Lowered:
    """Copies and aliases: values here are never written to."""
    return call.tensor("self")
