"""What the layers of a network compute, after TensorRT's documentation, in torch and f32.

The checker runs pieces of a network by these definitions. Rounding between layers is left out:
types are compared as types, values as values.
Source: the operator reference and the API reference of TensorRT (IAttention, IKVCacheUpdateLayer,
IRotaryEmbeddingLayer, IDequantizeLayer, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from .constants import dequantised, widened
from .read import ReadLayer, ReadNetwork

Inputs = Sequence[Tensor]
Meaning = Callable[[ReadLayer, Inputs], Tensor]

_BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "SUB": torch.sub,
    "DIV": lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "POW": torch.pow,
    "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}
_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "NEG": torch.neg,
    "ABS": torch.abs,
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "SIN": torch.sin,
    "COS": torch.cos,
    "ERF": torch.erf,
    "FLOOR": torch.floor,
    "NOT": torch.logical_not,
}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "TANH": torch.tanh,
    "SIGMOID": torch.sigmoid,
    "RELU": torch.relu,
    "SOFTPLUS": functional.softplus,
    "GELU_ERF": functional.gelu,
    "GELU_TANH": lambda x: functional.gelu(x, approximate="tanh"),
}


def evaluate(layer: ReadLayer, inputs: Inputs, network: ReadNetwork) -> Tensor:
    """A layer's output. Raises RuntimeError or ValueError if the inputs do not fit it."""
    if layer.kind == "CONSTANT":
        return _constant(layer, network)
    if layer.kind == "CAST":
        return _cast(inputs[0], network.tensors[layer.output].dtype)
    return _MEANINGS[layer.kind](layer, inputs)


def _constant(layer: ReadLayer, network: ReadNetwork) -> Tensor:
    dtype = network.tensors[layer.output].dtype
    assert layer.array is not None
    return torch.from_numpy(widened(layer.array, dtype))


def _cast(x: Tensor, dtype: str) -> Tensor:
    if dtype in ("f32", "f16", "bf16"):
        return x.float()
    return x.bool() if dtype == "bool" else x.int()


def _dequantize(layer: ReadLayer, inputs: Inputs) -> Tensor:
    """value * scale of its block; blocks lie along `axis`, whose length the scales divide."""
    packed, scales = (t.numpy() for t in inputs)
    if packed.ndim != scales.ndim or layer.attrs["axis"] not in (-1, packed.ndim - 1):
        raise ValueError(f"blocks along axis {layer.attrs['axis']} of rows packed along the last")
    blocks, rest = divmod(2 * packed.shape[-1], scales.shape[-1])
    if packed.shape[:-1] != scales.shape[:-1] or rest or blocks < 2:
        raise ValueError(f"scales {list(scales.shape)} for {list(packed.shape)} pairs of values")
    return torch.from_numpy(dequantised(packed, scales))


def _elementwise(layer: ReadLayer, inputs: Inputs) -> Tensor:
    a, b = inputs
    if a.dim() != b.dim():
        raise ValueError(f"ranks {a.dim()} and {b.dim()}")
    return _BINARY[layer.attrs["op"]](a, b)


def _unary(layer: ReadLayer, inputs: Inputs) -> Tensor:
    return _UNARY[layer.attrs["op"]](inputs[0])


def _activation(layer: ReadLayer, inputs: Inputs) -> Tensor:
    kind = layer.attrs["type"]
    if kind == "SOFTPLUS" and (layer.attrs["alpha"], layer.attrs["beta"]) != (1.0, 1.0):
        raise ValueError("a softplus with factors")
    return _ACTIVATIONS[kind](inputs[0])


def _axes(mask: int) -> list[int]:
    return [i for i in range(8) if mask >> i & 1]


def _reduce(layer: ReadLayer, inputs: Inputs) -> Tensor:
    axes, keep = _axes(layer.attrs["axes"]), bool(layer.attrs["keep_dims"])
    x = inputs[0]
    if layer.attrs["op"] == "MAX":
        return torch.amax(x, axes, keepdim=keep)
    return (torch.mean if layer.attrs["op"] == "AVG" else torch.sum)(x, axes, keepdim=keep)


def _softmax(layer: ReadLayer, inputs: Inputs) -> Tensor:
    (axis,) = _axes(layer.attrs["axes"])
    return torch.softmax(inputs[0], axis)


def _shuffle(layer: ReadLayer, inputs: Inputs) -> Tensor:
    x, attrs = inputs[0], layer.attrs
    x = x.permute(attrs["first_transpose"][: x.dim()])
    if dims := attrs.get("reshape_dims"):
        copies = attrs["zero_is_placeholder"]
        x = x.reshape([x.shape[i] if d == 0 and copies else d for i, d in enumerate(dims)])
    return x.permute(attrs["second_transpose"][: x.dim()])


def _unsqueeze(layer: ReadLayer, inputs: Inputs) -> Tensor:
    x, axes = inputs
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _slice(layer: ReadLayer, inputs: Inputs) -> Tensor:
    """Element i along an axis is start + i * stride; a stride of 0 repeats."""
    x, attrs = inputs[0], layer.attrs
    if attrs["mode"] not in ("STRICT_BOUNDS", "DEFAULT"):
        raise ValueError(f"a slice of mode {attrs['mode']}")
    axes = attrs["axes"] or range(x.dim())
    for axis, start, size, stride in zip(
        axes, attrs["start"], attrs["shape"], attrs["stride"], strict=True
    ):
        x = x.index_select(axis, start + stride * torch.arange(size))
    return x


def _concatenation(layer: ReadLayer, inputs: Inputs) -> Tensor:
    return torch.cat(list(inputs), layer.attrs["axis"])


def _select(layer: ReadLayer, inputs: Inputs) -> Tensor:
    return torch.where(*inputs)


def _gather(layer: ReadLayer, inputs: Inputs) -> Tensor:
    """Rows by index; the first `num_elementwise_dims` dimensions are shared by data and index."""
    data, index = inputs
    axis, shared = layer.attrs["axis"], layer.attrs["num_elementwise_dims"]
    if layer.attrs["mode"] != "DEFAULT" or shared not in (0, 1) or axis != shared:
        raise ValueError(f"a gather {dict(layer.attrs)}")
    if shared:
        return torch.stack([d[i.long()] for d, i in zip(data, index, strict=True)])
    return data[index.long()]


def _matmul(layer: ReadLayer, inputs: Inputs) -> Tensor:
    turned = [
        t.transpose(-1, -2) if layer.attrs[name] == "TRANSPOSE" else t
        for t, name in zip(inputs, ("op0", "op1"), strict=True)
    ]
    if turned[0].dim() != turned[1].dim():
        raise ValueError(f"ranks {turned[0].dim()} and {turned[1].dim()}")
    return torch.matmul(*turned)


def _normalization(layer: ReadLayer, inputs: Inputs) -> Tensor:
    x, scale, bias = inputs
    axes = _axes(layer.attrs["axes"])
    centred = x - x.mean(axes, keepdim=True)
    variance = centred.pow(2).mean(axes, keepdim=True)
    return centred / torch.sqrt(variance + layer.attrs["epsilon"]) * scale + bias


def _rotary_embedding(layer: ReadLayer, inputs: Inputs) -> Tensor:
    """x [B, N, S, D]; cos, sin [B, S, R / 2]: pairs (i, i + R / 2), or (2i, 2i + 1)."""
    x, cos, sin = inputs[:3]
    width = layer.attrs["rotary_embedding_dim"] or x.shape[-1]
    if 2 * cos.shape[-1] != width:
        raise ValueError(f"cosines of {cos.shape[-1]} for {width} elements")
    head, rest = x[..., :width], x[..., width:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if layer.attrs["interleaved"]:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = head.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned, rest), -1)


def _kv_cache_update(layer: ReadLayer, inputs: Inputs) -> Tensor:
    """cache [B, N, C, D] with update [B, N, S, D] from row write_indices[b] on."""
    cache, update, indices = inputs
    result = cache.clone()
    for b, start in enumerate(indices.tolist()):
        result[b, :, start : start + update.shape[2]] = update[b]
    return result


def _attention(layer: ReadLayer, inputs: Inputs) -> Tensor:
    """softmax(q k^T, masked) v, without a scale; keys from key_value_lengths[b] on are hidden."""
    q, k, v, mask, lengths = inputs
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3))
    scores = scores.masked_fill(~_visible(layer, scores, mask, lengths), float("-inf"))
    return torch.matmul(torch.softmax(scores, -1), v)


def _visible(
    layer: ReadLayer, scores: Tensor, mask: Tensor | None, lengths: Tensor | None
) -> Tensor:
    seen = torch.ones_like(scores, dtype=torch.bool)
    queries, keys = scores.shape[2:]
    offset = {"NONE": keys, "UPPER_LEFT": 0, "LOWER_RIGHT": keys - queries}
    seen = seen.tril(offset[layer.attrs["causal_kind"]])
    if mask is not None:
        if mask.dtype is not torch.bool:
            raise ValueError("an additive mask")
        seen = seen & mask
    if lengths is not None:
        seen = seen & (torch.arange(keys) < lengths.reshape(-1, 1, 1, 1))
    return seen


_MEANINGS: dict[str, Meaning] = {
    "ACTIVATION": _activation,
    "ATTENTION": _attention,
    "CONCATENATION": _concatenation,
    "DEQUANTIZE": _dequantize,
    "ELEMENTWISE": _elementwise,
    "GATHER": _gather,
    "IDENTITY": lambda _, inputs: cast("Any", inputs[0]),
    "KV_CACHE_UPDATE": _kv_cache_update,
    "MATRIX_MULTIPLY": _matmul,
    "NORMALIZATION": _normalization,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rotary_embedding,
    "SELECT": _select,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": _softmax,
    "UNARY": _unary,
    "UNSQUEEZE": _unsqueeze,
}
