"""Plan to INetworkDefinition: one function per kind of layer, nothing decided here.

Constants are handed over by address, not copied: `Network` keeps their arrays alive as long as
itself. Only called with tensorrt_rtx installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import ExitCode, SpikeError
from .constants import Constants, stored_array
from .plan import Layer, NetworkPlan, Stored, Tensor

_DTYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "bool": "bool",
    "int4": "int4",
}  # fmt: skip


@dataclass
class Network:
    """An INetworkDefinition under construction, with what it points to.

    Args:
        trt: the tensorrt_rtx module.
        definition: the INetworkDefinition.
        arrays: the constants' memory.
    """

    trt: Any
    definition: Any
    tensors: dict[str, Any] = field(default_factory=dict)
    arrays: list[npt.NDArray[Any]] = field(default_factory=list)

    def dtype(self, name: str) -> Any:
        """The API's name of an element type."""
        return getattr(self.trt, _DTYPES[name])


def define(trt: Any, definition: Any, plan: NetworkPlan, constants: Constants) -> Network:
    """Fills an empty INetworkDefinition; the result must live until the engine is built."""
    network = Network(trt, definition)
    definition.name = plan.name
    for tensor in plan.inputs:
        _add_input(network, tensor)
    for stored in plan.constants.values():
        _add_constant(network, stored, constants)
    for layer in plan.layers:
        _add_layer(network, plan, layer)
    for tensor in plan.outputs:
        definition.mark_output(network.tensors[tensor.name])
    return network


def _add_input(network: Network, tensor: Tensor) -> None:
    shape = [-1 if isinstance(d, str) else d for d in tensor.shape]
    made = network.definition.add_input(tensor.name, network.dtype(tensor.dtype), shape)
    for axis, dim in enumerate(tensor.shape):
        if isinstance(dim, str):
            made.set_dimension_name(axis, dim)
    network.tensors[tensor.name] = made


def _add_constant(network: Network, stored: Stored, constants: Constants) -> None:
    array = stored_array(stored, constants)
    network.arrays.append(array)
    count = int(np.prod([d for d in stored.tensor.shape if isinstance(d, int)], dtype=np.int64))
    weights = network.trt.Weights(network.dtype(stored.tensor.dtype), array.ctypes.data, count)
    layer = network.definition.add_constant(stored.tensor.shape, weights)
    _name(network, layer, stored.tensor.name, layer.get_output(0))


def _name(network: Network, layer: Any, name: str, output: Any) -> None:
    layer.name = name
    output.name = name
    network.tensors[name] = output


def _add_layer(network: Network, plan: NetworkPlan, layer: Layer) -> None:
    inputs = [network.tensors[name] if name else None for name in layer.inputs]
    made = _ADD[layer.kind](network, inputs, layer, plan.tensors[layer.outputs[0]])
    if made is None:
        raise SpikeError(
            "SPK528",
            "TensorRT",
            f"it refused the layer {layer.outputs[0]} ({layer.kind} in {layer.scope}).",
            "This is a bug of SpikeInfer; please report it with the model's config.json.",
            ExitCode.UNSUPPORTED,
        )
    made.metadata = layer.scope
    _name(network, made, layer.outputs[0], made.get_output(0))


Add = Callable[[Network, list[Any], Layer, Tensor], Any]


def _cast(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    return network.definition.add_cast(inputs[0], network.dtype(output.dtype))


def _dequantize(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_dequantize(*inputs, network.dtype(output.dtype))
    made.axis = layer.attrs["axis"]  # several scales along it: blocks
    return made


def _elementwise(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    operation = getattr(network.trt.ElementWiseOperation, str(layer.attrs["op"]))
    return network.definition.add_elementwise(*inputs, operation)


def _unary(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    operation = getattr(network.trt.UnaryOperation, str(layer.attrs["op"]))
    return network.definition.add_unary(inputs[0], operation)


def _activation(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_activation(
        inputs[0], getattr(network.trt.ActivationType, str(layer.attrs["op"]))
    )
    if layer.attrs["op"] == "SOFTPLUS":
        made.alpha = made.beta = 1.0
    return made


def _reduce(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    operation = getattr(network.trt.ReduceOperation, str(layer.attrs["op"]))
    axes = 1 << _int(layer, "axis")
    return network.definition.add_reduce(inputs[0], operation, axes, keep_dims=True)


def _softmax(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_softmax(inputs[0])
    made.axes = 1 << _int(layer, "axis")
    return made


def _shuffle(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_shuffle(inputs[0])
    if "reshape" in layer.attrs:
        made.reshape_dims = layer.attrs["reshape"]
    else:
        made.first_transpose = layer.attrs["transpose"]
    return made


def _unsqueeze(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    return network.definition.add_unsqueeze(*inputs)


def _slice(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    start, size, stride = (layer.attrs[n] for n in ("start", "size", "stride"))
    made = network.definition.add_slice(inputs[0], start, size, stride)
    made.axes = layer.attrs["axes"]
    return made


def _concatenation(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_concatenation(inputs)
    made.axis = layer.attrs["axis"]
    return made


def _select(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    return network.definition.add_select(*inputs)


def _gather(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_gather(*inputs, _int(layer, "axis"))
    made.num_elementwise_dims = layer.attrs["batch"]
    return made


def _matmul(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    operations = network.trt.MatrixOperation
    turned = layer.attrs["transpose"]
    assert isinstance(turned, tuple)
    a, b = (operations.TRANSPOSE if t else operations.NONE for t in turned)
    return network.definition.add_matrix_multiply(inputs[0], a, inputs[1], b)


def _normalization(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    made = network.definition.add_normalization_v2(*inputs, 1 << _int(layer, "axis"))
    made.epsilon = layer.attrs["eps"]
    return made


def _rotary_embedding(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    interleaved, width = bool(layer.attrs["interleaved"]), _int(layer, "width")
    return network.definition.add_rotary_embedding(*inputs, interleaved, width)


def _kv_cache_update(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    return network.definition.add_kv_cache_update(*inputs, network.trt.KVCacheMode.LINEAR)


def _attention(network: Network, inputs: list[Any], layer: Layer, output: Tensor) -> Any:
    q, k, v, mask, lengths = inputs
    made = network.definition.add_attention_v2(
        q, k, v, network.trt.AttentionNormalizationOp.SOFTMAX, network.trt.CausalMaskKind.NONE
    )
    if made is None:
        return None
    if mask is not None:
        made.mask = mask
    if lengths is not None:
        made.key_value_lengths = lengths
    made.decomposable = True  # where no fused kernel has the shape, and only there
    return made


def _int(layer: Layer, name: str) -> int:
    value = layer.attrs[name]
    assert isinstance(value, int)
    return value


_ADD: dict[str, Add] = {
    "activation": _activation,
    "attention": _attention,
    "cast": _cast,
    "concatenation": _concatenation,
    "dequantize": _dequantize,
    "elementwise": _elementwise,
    "gather": _gather,
    "kv_cache_update": _kv_cache_update,
    "matmul": _matmul,
    "normalization": _normalization,
    "reduce": _reduce,
    "rotary_embedding": _rotary_embedding,
    "select": _select,
    "shuffle": _shuffle,
    "slice": _slice,
    "softmax": _softmax,
    "unary": _unary,
    "unsqueeze": _unsqueeze,
}
