"""An INetworkDefinition as it is, layer by layer: what the checker compares with the graph.

Reads the real object through its own accessors, and knows nothing of plans. Python has no accessor
for weights that numpy has no type for (int4, bf16): those are read where the object points to.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import ExitCode, SpikeError

_SPELLING = {
    "FLOAT": "f32", "HALF": "f16", "BF16": "bf16", "INT32": "i32", "INT64": "i64", "BOOL": "bool",
    "INT4": "int4", "INT8": "int8", "UINT8": "u8", "FP8": "fp8", "FP4": "fp4",
}  # fmt: skip

_CLASSES = {
    "ACTIVATION": ("IActivationLayer", ("type", "alpha", "beta")),
    "CAST": ("ICastLayer", ("to_type",)),
    "CONCATENATION": ("IConcatenationLayer", ("axis",)),
    "CONSTANT": ("IConstantLayer", ("shape",)),
    "DEQUANTIZE": ("IDequantizeLayer", ("axis",)),
    "ELEMENTWISE": ("IElementWiseLayer", ("op",)),
    "GATHER": ("IGatherLayer", ("axis", "mode", "num_elementwise_dims")),
    "IDENTITY": ("IIdentityLayer", ()),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", ("cache_mode", "update_form")),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", ("op0", "op1")),
    "NORMALIZATION": ("INormalizationLayer", ("axes", "epsilon", "num_groups")),
    "REDUCE": ("IReduceLayer", ("op", "axes", "keep_dims")),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", ("interleaved", "rotary_embedding_dim")),
    "SELECT": ("ISelectLayer", ()),
    "SHUFFLE": ("IShuffleLayer", ("first_transpose", "reshape_dims", "second_transpose",
                                  "zero_is_placeholder")),
    "SLICE": ("ISliceLayer", ("start", "shape", "stride", "axes", "mode")),
    "SOFTMAX": ("ISoftMaxLayer", ("axes",)),
    "UNARY": ("IUnaryLayer", ("op",)),
    "UNSQUEEZE": ("IUnsqueezeLayer", ()),
}  # fmt: skip
_ATTENTION = ("causal_kind", "norm_op", "decomposable", "query_form", "key_value_form")
_OWN_VALUE = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Offset of the pointer to the C++ object behind a pybind11 object's header."""


class _Weights(ctypes.Structure):
    """nvinfer1::Weights, whose layout is part of TensorRT's ABI."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


@dataclass(frozen=True)
class ReadTensor:
    """A tensor of the network; -1 is a dimension that the step decides."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ReadLayer:
    """A layer; `kind` is the API's layer type, ``ATTENTION`` for the two that bound one."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    array: npt.NDArray[Any] | None = None

    @property
    def output(self) -> str:
        """The first result."""
        return self.outputs[0]


@dataclass(frozen=True)
class ReadNetwork:
    """Everything that the network says about itself."""

    inputs: tuple[ReadTensor, ...]
    outputs: tuple[ReadTensor, ...]
    layers: tuple[ReadLayer, ...]
    tensors: Mapping[str, ReadTensor]


def read_network(definition: Any) -> ReadNetwork:
    """Walks an INetworkDefinition. Raises SpikeError SPK529 for a layer that has no reading."""
    tensors: dict[str, ReadTensor] = {}
    inputs = tuple(_tensor(definition.get_input(i), tensors) for i in range(definition.num_inputs))
    layers = [
        layer
        for i in range(definition.num_layers)
        if (layer := _layer(definition.get_layer(i), tensors)) is not None
    ]
    outputs = tuple(
        _tensor(definition.get_output(i), tensors) for i in range(definition.num_outputs)
    )
    return ReadNetwork(inputs, outputs, tuple(layers), tensors)


def _tensor(tensor: Any, tensors: dict[str, ReadTensor]) -> ReadTensor:
    dtype = _SPELLING.get(tensor.dtype.name, tensor.dtype.name)
    read = ReadTensor(tensor.name, dtype, tuple(tensor.shape))
    tensors[read.name] = read
    return read


def _layer(layer: Any, tensors: dict[str, ReadTensor]) -> ReadLayer | None:
    kind = layer.type.name
    if kind == "ATTENTION_INPUT":
        return None
    if kind == "ATTENTION_OUTPUT":
        return _attention(layer, tensors)
    if kind not in _CLASSES:
        raise SpikeError(
            "SPK529",
            "TensorRT network",
            f"it has a layer of type {kind} ({layer.name}), which the checker can't read.",
            "This is a bug of SpikeInfer; please report it.",
            ExitCode.INTERNAL,
        )
    trt = importlib.import_module("tensorrt_rtx")
    inputs = tuple(_name(layer.get_input(i), tensors) for i in range(layer.num_inputs))
    outputs = tuple(_name(layer.get_output(i), tensors) for i in range(layer.num_outputs))
    name, attributes = _CLASSES[kind]
    layer.__class__ = getattr(trt, name)  # get_layer gives the base class, without attributes
    attrs = {a: _plain(getattr(layer, a)) for a in attributes if _has(layer, a)}
    array = _values(layer, tensors[outputs[0]]) if kind == "CONSTANT" else None
    return ReadLayer(kind, layer.name, inputs, outputs, attrs, array)


def _attention(layer: Any, tensors: dict[str, ReadTensor]) -> ReadLayer:
    """The scope between its two bounds: query, key, value, mask, key-value lengths."""
    trt = importlib.import_module("tensorrt_rtx")
    layer.__class__ = trt.IAttentionOutputLayer
    attention = layer.attention
    operands = [attention.get_input(i) for i in range(3)]
    operands += [attention.mask, attention.key_value_lengths]
    inputs = tuple(_name(t, tensors) for t in operands)
    attrs = {a: _plain(getattr(attention, a)) for a in _ATTENTION}
    attrs["quantized"] = attention.normalization_quantize_scale is not None
    output = _name(attention.get_output(0), tensors)
    return ReadLayer("ATTENTION", attention.name, inputs, (output,), attrs)


def _has(layer: Any, attribute: str) -> bool:
    """Shuffles that only transpose have no dimensions, and say so by raising."""
    try:
        getattr(layer, attribute)
    except RuntimeError:
        return False
    return True


def _name(tensor: Any, tensors: dict[str, ReadTensor]) -> str:
    return _tensor(tensor, tensors).name if tensor is not None else ""


def _plain(value: Any) -> Any:
    """Enums by name, dimensions and permutations as tuples."""
    if hasattr(value, "name") and hasattr(value, "value"):
        return value.name
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return tuple(value)


def _values(layer: Any, tensor: ReadTensor) -> npt.NDArray[Any]:
    """A constant layer's memory, not copied: packed bytes for int4, bits for bf16."""
    weights = layer.weights
    if isinstance(weights, np.ndarray):
        return weights.reshape(tensor.shape)
    read = _Weights.from_address(_pointer(id(weights) + _OWN_VALUE))
    if (read.count, read.type) != (weights.size, int(weights.dtype)) or not read.values:
        raise RuntimeError(f"{tensor.name}: this tensorrt_rtx keeps weights in another way")
    if tensor.dtype == "int4":
        buffer = (ctypes.c_uint8 * (read.count // 2)).from_address(read.values)
        packed = np.frombuffer(buffer, np.uint8)
        return packed.reshape(*tensor.shape[:-1], tensor.shape[-1] // 2)
    bits = (ctypes.c_uint16 * read.count).from_address(read.values)
    return np.frombuffer(bits, np.uint16).reshape(tensor.shape)


def _pointer(address: int) -> int:
    return int(ctypes.c_void_p.from_address(address).value or 0)
