"""The network under construction: tensors, layers, constants, casts, shapes.

This file knows the network API's layers, not our ops; `layers.py` and `attention.py` hold one small
function per op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import ExitCode, SpikeError
from ...ir import (
    Constant,
    Dim,
    Graph,
    Node,
    Operand,
    Shape,
    Value,
    print_node,
    symbol,
)
from .constants import INT4_BLOCK, INT4_FORMAT
from .plan import AliasedPair, Attr, Dimension, Layer, Stored, Tensor
from .precision import ElementTypes
from .target import Target


class NoLayersError(ValueError):
    """An op that the network API can't state; the message is the reason."""


def refusal(code: str, node: Node, reason: str) -> SpikeError:
    """An op or attention that TensorRT has no layers for."""
    return SpikeError(
        code,
        "TensorRT network",
        f"{print_node(node)} in {node.scope or 'the model'}: {reason}.",
        "Build this model for ONNX Runtime (leave --backend out).",
        ExitCode.UNSUPPORTED,
    )


@dataclass
class Emission:
    """Collects layers and constants for one placed graph.

    Args:
        tensors: by name, constants too.
        values: the network's tensor for a value of the graph.
        step: what S stands for; R in the tail that only computes logits.
    """

    graph: Graph
    target: Target
    types: ElementTypes
    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    constants: dict[str, Stored] = field(default_factory=dict)
    aliases: list[AliasedPair] = field(default_factory=list)
    values: dict[int, Tensor] = field(default_factory=dict)
    once: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    scope: str = ""
    stem: str = ""
    step: Dimension = "S"

    def tensor(self, name: str, dtype: str, shape: Sequence[Dimension]) -> Tensor:
        """A new tensor; the name gets a number if it is taken."""
        unique, count = name, 1
        while unique in self.tensors:
            unique, count = f"{name}.{count}", count + 1
        self.tensors[unique] = Tensor(unique, dtype, tuple(shape))
        return self.tensors[unique]

    def layer(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        shape: Sequence[Dimension],
        dtype: str = "",
        *,
        name: str = "",
        **attrs: Attr,
    ) -> Tensor:
        """Appends a layer with one output: of the first input's element type if none is given."""
        first = next(t for t in inputs if t is not None)
        made = self.tensor(name or f"{self.stem}/{kind}", dtype or first.dtype, shape)
        names = tuple(t.name if t is not None else "" for t in inputs)
        self.layers.append(Layer(kind, names, (made.name,), attrs, self.scope))
        return made

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another element type; made once."""
        if tensor.dtype == dtype:
            return tensor
        key = ("cast", tensor.name, dtype)
        if key not in self.once:
            name = f"{tensor.name}:{dtype}"
            self.once[key] = self.layer("cast", [tensor], tensor.shape, dtype, name=name)
        return self.once[key]

    def literal(
        self, values: Sequence[float] | Sequence[int] | str, dtype: str, shape: Sequence[int]
    ) -> Tensor:
        """A small constant; equal ones are shared."""
        kept = values if isinstance(values, str) else tuple(values)
        key = ("literal", kept, dtype, tuple(shape))
        if key not in self.once:
            tensor = self.tensor(f"literal.{len(self.constants)}", dtype, shape)
            self.constants[tensor.name] = Stored(tensor, literal=kept)
            self.once[key] = tensor
        return self.once[key]

    def scalar(self, value: float, dtype: str, rank: int) -> Tensor:
        """One number that broadcasts to `rank` dimensions."""
        number = int(value) if dtype == "i32" else float(value)
        return self.literal((number,), dtype, (1,) * rank)

    def weights(self, const: Constant, dtype: str, rank: int) -> Tensor:
        """A constant of the graph with leading ones up to `rank`, in an element type.

        Matrices keep what their format says; the network widens or dequantises them.
        """
        key = ("weights", const.name, dtype, rank)
        if key not in self.once:
            self.once[key] = self._weights(const, dtype, rank)
        return self.once[key]

    def _weights(self, const: Constant, dtype: str, rank: int) -> Tensor:
        shape = (1,) * (rank - const.type.rank) + self.dims(const.shape)
        if const.format == INT4_FORMAT:
            return self._dequantised(const, dtype, shape)
        kept = dtype
        if const.format in ("f16", "bf16"):
            kept = self.types.half.value
        elif const.format not in ("f32", "array", "i64", "i32", "bool", ""):
            raise NoLayersError(f"@{const.name} is stored as {const.format}, not {INT4_FORMAT}")
        tensor = self.cast(self._stored(const, kept, self.dims(const.shape)), dtype)
        # Stored once, whatever rank it is read in: a tied head is the embedding's bytes.
        name = f"{tensor.name}/{rank}" if rank != tensor.rank else ""
        return self.reshape(tensor, shape, name)

    def _dequantised(self, const: Constant, dtype: str, shape: tuple[Dimension, ...]) -> Tensor:
        k = shape[-1]
        if not isinstance(k, int) or k % INT4_BLOCK:
            raise NoLayersError(f"rows of {k} in @{const.name} are no multiple of {INT4_BLOCK}")
        flat = self.dims(const.shape)
        values = self._stored(const, "int4", flat)
        scales = self._stored(const, dtype, (flat[0], k // INT4_BLOCK), "scales")
        name = f"@{const.name}:{dtype}"
        matrix = self.layer("dequantize", [values, scales], flat, dtype, name=name, axis=1)
        return self.reshape(matrix, shape, f"{name}/{len(shape)}" if shape != flat else "")

    def _stored(
        self, const: Constant, dtype: str, shape: Sequence[Dimension], part: str = "values"
    ) -> Tensor:
        name = f"@{const.name}" + ("" if part == "values" else f".{part}")
        key = ("stored", name, dtype, tuple(shape))
        if key not in self.once:
            tensor = self.tensor(name, dtype, shape)
            self.constants[tensor.name] = Stored(tensor, const.name, part)
            self.once[key] = tensor
        return self.once[key]

    def operand(self, operand: Operand, dtype: str, rank: int) -> Tensor:
        """An operand in an element type, with leading ones up to `rank`."""
        if isinstance(operand, bool | int | float):
            return self.scalar(operand, dtype, rank)
        if isinstance(operand, Constant):
            return self.weights(operand, dtype, rank)
        return self.ranked(self.cast(self.value(operand), dtype), rank)

    def value(self, value: Value) -> Tensor:
        """The tensor of a graph's value."""
        return self.values[id(value)]

    def ranked(self, tensor: Tensor, rank: int) -> Tensor:
        """The tensor with leading ones up to `rank`."""
        if tensor.rank == rank:
            return tensor
        missing = rank - tensor.rank
        axes = self.literal(tuple(range(missing)), "i32", (missing,))
        return self.layer("unsqueeze", [tensor, axes], (1,) * missing + tensor.shape)

    def reshape(self, tensor: Tensor, shape: Sequence[Dimension], name: str = "") -> Tensor:
        """Same elements in another shape: at most one dimension may have to be worked out."""
        if tuple(shape) == tensor.shape:
            return tensor
        wanted, unknown = list[int](), 0
        for axis, dim in enumerate(shape):
            same = axis < tensor.rank and tensor.shape[axis] == dim
            wanted.append(dim if isinstance(dim, int) else 0 if same else -1)
            unknown += wanted[-1] == -1
        if unknown > 1:
            raise NoLayersError(f"a reshape of {_show(tensor.shape)} to {_show(shape)}")
        return self.layer("shuffle", [tensor], shape, name=name, reshape=tuple(wanted))

    def transpose(self, tensor: Tensor, perm: Sequence[int]) -> Tensor:
        """Axis i of the result is axis perm[i]."""
        shape = [tensor.shape[p] for p in perm]
        return self.layer("shuffle", [tensor], shape, transpose=tuple(perm))

    def elementwise(self, op: str, x: Tensor, y: Tensor) -> Tensor:
        """A binary op; ranks are equal, ones broadcast; comparisons give bool."""
        shape = [b if a == 1 else a for a, b in zip(x.shape, y.shape, strict=True)]
        dtype = "bool" if op in ("EQUAL", "GREATER", "LESS") else x.dtype
        return self.layer("elementwise", [x, y], shape, dtype, op=op)

    def unary(self, op: str, x: Tensor) -> Tensor:
        """A unary op."""
        return self.layer("unary", [x], x.shape, op=op)

    def activation(self, op: str, x: Tensor) -> Tensor:
        """An activation."""
        return self.layer("activation", [x], x.shape, op=op)

    def reduce(self, op: str, x: Tensor, axis: int) -> Tensor:
        """Along one axis, which stays as 1."""
        shape = [1 if i == axis else d for i, d in enumerate(x.shape)]
        return self.layer("reduce", [x], shape, op=op, axis=axis)

    def dims(self, shape: Shape) -> tuple[Dimension, ...]:
        """A shape of the graph in the network, where a cache always has its capacity."""
        return tuple(map(self.dim, shape))

    def dim(self, dim: Dim) -> Dimension:
        """A dimension in the network. Raises NoLayersError for what a network can't say."""
        if isinstance(dim, int):
            return dim
        if dim == symbol("P") + symbol("S"):
            return self.target.capacity
        if dim == symbol("S"):
            return self.step
        if dim == symbol("B"):
            return "B"
        raise NoLayersError(
            f"the dimension {dim} depends on the length of the past or on a product"
        )


def _show(shape: Sequence[Dimension]) -> str:
    return f"[{', '.join(map(str, shape))}]"
