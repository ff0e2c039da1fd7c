"""The ONNX graph under construction: names, scalars, symbolic dimensions, initialisers.

Emission is one pass over a placed graph. This file knows ONNX, not our ops; `primitive_nodes` and
`kernel_nodes` hold one small function per op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..ir import (
    Constant,
    Dim,
    DType,
    Graph,
    Operand,
    Shape,
    SymDim,
    TensorType,
    Value,
    choices,
)
from .folds import Folds

ONNX_DTYPE = {
    DType.F32: TensorProto.FLOAT,
    DType.F16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
    DType.F64: TensorProto.DOUBLE,
    DType.I64: TensorProto.INT64,
    DType.I32: TensorProto.INT32,
    DType.U8: TensorProto.UINT8,
    DType.BOOL: TensorProto.BOOL,
}
NUMPY_DTYPE = {
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.F64: np.float64,
    DType.I64: np.int64,
    DType.I32: np.int32,
    DType.U8: np.uint8,
    DType.BOOL: np.bool_,
}
OPSET = 20
DOMAIN = "spike"


@dataclass(frozen=True)
class StoredTensor:
    """Where a constant lies in the weights file, as ONNX external data sees it.

    Args:
        dtype: ONNX element type: uint8 for packed formats, float for plain f32 vectors.
        shape: as the graph sees it: [bytes] for packed formats.
        offset, length: byte range in the weights file.
    """

    dtype: int
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass
class Emission:
    """Collects ONNX nodes and initialisers for one placed graph.

    Args:
        stored: location of every constant that lies in the weights file, by constant name.
        weights_file: file name that external data refers to.
        folds: which nodes are emitted as part of another one.
    """

    graph: Graph
    stored: dict[str, StoredTensor]
    weights_file: str
    folds: Folds
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initialisers: dict[str, onnx.TensorProto] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    between: list[onnx.ValueInfoProto] = field(default_factory=list)
    counter: int = 0
    once: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        """A tensor name that is not in use."""
        self.counter += 1
        return f"{stem}.{self.counter}"

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        output: str = "",
        *,
        domain: str = "",
        **attrs: Any,
    ) -> str:
        """Appends a node with one output and returns the output's name."""
        output = output or self.fresh(op)
        self.nodes.append(helper.make_node(op, list(inputs), [output], domain=domain, **attrs))
        return output

    def array(self, array: npt.NDArray[Any]) -> str:
        """An initialiser with the array's content; equal arrays share one."""
        key = ("array", array.dtype.str, array.shape, array.tobytes())
        if key not in self.once:
            name = self.once[key] = f"data.{len(self.initialisers)}"
            self.initialisers[name] = numpy_helper.from_array(array, name)
        return self.once[key]

    def ints(self, values: Sequence[int]) -> str:
        """A 1-D int64 initialiser, as shapes and axes are given."""
        return self.array(np.array(values, np.int64))

    def scalar(self, value: bool | int | float, dtype: DType) -> str:
        """A 0-D initialiser."""
        return self.array(np.array(value, NUMPY_DTYPE[dtype]))

    def operand(self, operand: Operand, dtype: DType | None = None) -> str:
        """The name of an operand, cast to `dtype` if it has another one."""
        if isinstance(operand, bool | int | float):
            return self.scalar(operand, dtype or DType.F32)
        name = operand.name if isinstance(operand, Value) else self.constant(operand)
        if dtype is None or operand.dtype is dtype:
            return name
        return self.cast(name, dtype)

    def cast(self, name: str, dtype: DType) -> str:
        """A cast of a named tensor; made once per tensor and dtype."""
        key = ("cast", name, dtype)
        if key not in self.once:
            self.once[key] = self.node("Cast", [name], to=ONNX_DTYPE[dtype])
        return self.once[key]

    def constant(self, const: Constant) -> str:
        """A constant's initialiser: inline data, or a byte range of the weights file."""
        name = f"@{const.name}"
        if name not in self.initialisers:
            if const.name in self.stored:
                self.initialisers[name] = self.external(name, self.stored[const.name])
            else:
                assert const.data is not None, const
                self.initialisers[name] = numpy_helper.from_array(const.data, name)
        return name

    def external(self, name: str, stored: StoredTensor) -> onnx.TensorProto:
        """An initialiser that is a byte range of the weights file."""
        tensor = TensorProto(name=name, data_type=stored.dtype, dims=stored.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", self.weights_file),
            ("offset", stored.offset),
            ("length", stored.length),
        ):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def dim(self, dim: Dim) -> str:
        """A dimension as a 1-D int64 tensor of one element, computed at run time if symbolic."""
        if not isinstance(dim, SymDim):
            return self.ints([dim])
        key = ("dim", dim)
        if key not in self.once:
            terms = [self._term(m, c) for m, c in dim.terms]
            total = terms[0]
            for term in terms[1:]:
                total = self.node("Add", [total, term])
            self.once[key] = total
        return self.once[key]

    def _term(self, monomial: tuple[str, ...], coefficient: int) -> str:
        parts = [self._symbol(s) for s in monomial]
        parts += [self.ints([coefficient])] if coefficient != 1 or not parts else []
        product = parts[0]
        for part in parts[1:]:
            product = self.node("Mul", [product, part])
        return product

    def _symbol(self, name: str) -> str:
        key = ("symbol", name)
        if key not in self.once and (found := choices(name)) is not None:
            kind, dims = found
            self.once[key] = self.node(kind.capitalize(), [self.dim(d) for d in dims])
        if key not in self.once:
            source, axis = self._holder(name)
            self.once[key] = self.node("Shape", [source], start=axis, end=axis + 1)
        return self.once[key]

    def _holder(self, name: str) -> tuple[str, int]:
        for value in self.graph.inputs:
            for axis, dim in enumerate(value.shape):
                if str(dim) == name:
                    return value.name, axis
        raise ValueError(f"no input has a dimension {name}")

    def shape(self, shape: Shape) -> str:
        """A shape as a 1-D int64 tensor; one symbolic dimension becomes -1 (for Reshape only)."""
        symbolic = [d for d in shape if isinstance(d, SymDim)]
        if len(symbolic) <= 1:
            return self.ints([-1 if isinstance(d, SymDim) else d for d in shape])
        return self.full_shape(shape)

    def full_shape(self, shape: Shape) -> str:
        """A shape as a 1-D int64 tensor with every dimension computed."""
        if not any(isinstance(d, SymDim) for d in shape):
            return self.ints([d for d in shape if isinstance(d, int)])
        key = ("shape", shape)
        if key not in self.once:
            self.once[key] = self.node("Concat", [self.dim(d) for d in shape], axis=0)
        return self.once[key]

    def reshaped(self, name: str, shape: Shape) -> str:
        """A Reshape, made once per tensor and shape."""
        key = ("reshape", name, shape)
        if key not in self.once:
            self.once[key] = self.node("Reshape", [name, self.shape(shape)])
        return self.once[key]

    def model(self, producer: str) -> onnx.ModelProto:
        """The finished model; the checker runs over everything but our own domain."""
        graph = helper.make_graph(
            self.nodes,
            self.graph.name,
            self.inputs,
            self.outputs,
            list(self.initialisers.values()),
            value_info=self.between,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name=producer)


def value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    """Name, dtype and dims of a graph input or output; symbolic dims keep their text."""
    dims = [str(d) if isinstance(d, SymDim) else d for d in kind.shape]
    return helper.make_tensor_value_info(name, ONNX_DTYPE[kind.dtype], dims)
