"""Emission faults: each takes the plan of the tiny model and makes one mistake in it.

The checker sees the network that is built from the faulty plan, and the true graph and constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from spikeinfer.compiler.backends.tensorrt import Int4Matrix, NetworkPlan
from spikeinfer.compiler.backends.tensorrt.plan import Layer

Fault = Callable[[NetworkPlan], NetworkPlan]
PLANNED: dict[str, Fault] = {}
STORED: dict[str, tuple[str, Callable[[Any], Any]]] = {}
"""Constant and what happens to it on its way into the network."""


def fault(name: str) -> Callable[[Fault], Fault]:
    """Registers a fault by what it is."""

    def register(function: Fault) -> Fault:
        PLANNED[name] = function
        return function

    return register


def maker(plan: NetworkPlan, tensor: str) -> Layer:
    """The layer that makes a tensor."""
    return next(layer for layer in plan.layers if tensor in layer.outputs)


def behind(plan: NetworkPlan, tensor: str, *path: int | str) -> Layer:
    """The layer reached from a tensor by input numbers, checked by kinds along the way."""
    layer = maker(plan, tensor)
    for step in path:
        if isinstance(step, str):
            assert layer.kind == step, (tensor, layer)
        else:
            layer = maker(plan, layer.inputs[step])
    return layer


def changed(plan: NetworkPlan, old: Layer, **changes: Any) -> NetworkPlan:
    """The plan with one layer changed."""
    layers = tuple(replace(x, **changes) if x is old else x for x in plan.layers)
    assert layers != plan.layers
    return replace(plan, layers=layers)


def attr(plan: NetworkPlan, old: Layer, **attrs: Any) -> NetworkPlan:
    """The plan with attributes of one layer changed."""
    return changed(plan, old, attrs={**old.attrs, **attrs})


def inputs(plan: NetworkPlan, old: Layer, *names: str) -> NetworkPlan:
    """The plan with one layer reading other tensors."""
    return changed(plan, old, inputs=names)


def bypass(plan: NetworkPlan, tensor: str, other: str) -> NetworkPlan:
    """Everything that reads a tensor reads another one."""
    layers = tuple(
        replace(x, inputs=tuple(other if n == tensor else n for n in x.inputs)) for x in plan.layers
    )
    assert layers != plan.layers
    return replace(plan, layers=layers)


def literal(plan: NetworkPlan, name: str, factor: float) -> NetworkPlan:
    """The plan with a literal's numbers times a factor."""
    stored = plan.constants[name]
    assert not isinstance(stored.literal, str)
    whole = stored.tensor.dtype == "i32"
    values = tuple((int if whole else float)(v * factor) for v in stored.literal)
    other = replace(stored, literal=values)
    return replace(plan, constants={**plan.constants, name: other})


def source(plan: NetworkPlan, name: str, other: str) -> NetworkPlan:
    """The plan with a constant made from another one of the graph."""
    stored = replace(plan.constants[name], source=other)
    return replace(plan, constants={**plan.constants, name: stored})


@fault("transposed weight")
def _(plan: NetworkPlan) -> NetworkPlan:
    return attr(plan, behind(plan, "%q1", "matmul"), transpose=(False, False))


@fault("scales along the wrong axis")
def _(plan: NetworkPlan) -> NetworkPlan:
    return attr(plan, behind(plan, "%q1", 1, 0, "dequantize"), axis=0)


@fault("scales of another matrix")
def _(plan: NetworkPlan) -> NetworkPlan:
    return source(plan, "@q1.scales", "q0")


@fault("weight of another layer")
def _(plan: NetworkPlan) -> NetworkPlan:
    return source(source(plan, "@up1", "up0"), "@up1.scales", "up0")


@fault("missing bias")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = behind(plan, "%q0", "elementwise")
    return bypass(plan, "%q0", layer.inputs[0])


@fault("bias subtracted")
def _(plan: NetworkPlan) -> NetworkPlan:
    return attr(plan, behind(plan, "%q0", "elementwise"), op="SUB")


@fault("wrong window")
def _(plan: NetworkPlan) -> NetworkPlan:
    mask = behind(plan, maker(plan, "%a0").inputs[3], "elementwise", 1, "elementwise", 1)
    return literal(plan, mask.inputs[1], 2)


@fault("window off by one")
def _(plan: NetworkPlan) -> NetworkPlan:
    mask = behind(plan, maker(plan, "%a0").inputs[3], "elementwise", 1, "elementwise", 1)
    return literal(plan, mask.inputs[1], 9 / 8)


@fault("window in the layer without one")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer, other = maker(plan, "%a1"), maker(plan, "%a0")
    return inputs(plan, layer, *layer.inputs[:3], other.inputs[3], layer.inputs[4])


@fault("mask inverted")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = behind(plan, maker(plan, "%a1").inputs[3], "unary", 0, "elementwise")
    return inputs(plan, layer, *layer.inputs[::-1])


@fault("mask missing")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%a1")
    return inputs(plan, layer, *layer.inputs[:3], "", layer.inputs[4])


@fault("key-value lengths missing")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%a1")
    return inputs(plan, layer, *layer.inputs[:4], "")


@fault("key-value lengths without the new tokens")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%a1")
    return inputs(plan, layer, *layer.inputs[:4], "write_indices")


@fault("key and value cache swapped")
def _(plan: NetworkPlan) -> NetworkPlan:
    key, value = (maker(plan, f"layers.0.{part}.present") for part in ("key", "value"))
    plan = inputs(plan, key, value.inputs[0], *key.inputs[1:])
    return inputs(plan, value, key.inputs[0], *value.inputs[1:])


@fault("values written into the key cache")
def _(plan: NetworkPlan) -> NetworkPlan:
    key, value = (maker(plan, f"layers.0.{part}.present") for part in ("key", "value"))
    return inputs(plan, key, key.inputs[0], value.inputs[1], key.inputs[2])


@fault("attention over another layer's cache")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%a1")
    return inputs(plan, layer, layer.inputs[0], "layers.0.key.present", *layer.inputs[2:])


@fault("cache written at its end")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "layers.1.key.present")
    return inputs(plan, layer, *layer.inputs[:2], "kv_lens")


@fault("rotation of interleaved pairs")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = behind(plan, "%qr1", "shuffle", 0, "rotary_embedding")
    return attr(plan, layer, interleaved=True)


@fault("cosine and sine swapped")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = behind(plan, "%kr0", "shuffle", 0, "rotary_embedding")
    return inputs(plan, layer, layer.inputs[0], layer.inputs[2], layer.inputs[1])


@fault("keys not rotated")
def _(plan: NetworkPlan) -> NetworkPlan:
    return bypass(plan, "%kr1", "%kh1")


@fault("angles in half precision")
def _(plan: NetworkPlan) -> NetworkPlan:
    return _narrowed(plan, "%cos", "unary")


@fault("norm in half precision")
def _(plan: NetworkPlan) -> NetworkPlan:
    return _narrowed(plan, "%n1", "elementwise")


def _narrowed(plan: NetworkPlan, tensor: str, kind: str) -> NetworkPlan:
    """What is behind the last cast to f16 is computed in it."""
    cast = behind(plan, tensor, "cast")
    layer = behind(plan, tensor, 0, kind)
    early = [replace(plan.tensors[n], name=f"{n}/narrow", dtype="f16") for n in layer.inputs]
    casts = [Layer("cast", (n,), (t.name,)) for n, t in zip(layer.inputs, early, strict=True)]
    late = replace(layer, inputs=tuple(t.name for t in early))
    tensors = {**plan.tensors, **{t.name: t for t in early}}
    tensors[layer.outputs[0]] = replace(tensors[layer.outputs[0]], dtype="f16")
    layers: list[Layer] = []
    for x in plan.layers:
        layers += [*casts, late] if x is layer else [x]
    assert cast in layers
    return replace(plan, layers=tuple(layers), tensors=tensors)


@fault("wrong epsilon")
def _(plan: NetworkPlan) -> NetworkPlan:
    sqrt = behind(plan, "%n1", 0, "elementwise", 0, "elementwise", 1, "unary", 0)
    return literal(plan, sqrt.inputs[1], 0.1)


@fault("mean over the wrong axis")
def _(plan: NetworkPlan) -> NetworkPlan:
    reduce = behind(plan, "%n1", 0, 0, 1, 0, "elementwise", 0, "reduce")
    return attr(plan, reduce, axis=1)


@fault("norm without its weight")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = behind(plan, "%n1", "cast", 0, "elementwise")
    return bypass(plan, layer.outputs[0], layer.inputs[0])


@fault("weight of another norm")
def _(plan: NetworkPlan) -> NetworkPlan:
    return source(plan, "@norm1", "mlp_norm1")


@fault("wrong attention scale")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = behind(plan, maker(plan, "%a1").inputs[0], "cast", 0, "elementwise")
    return literal(plan, layer.inputs[1], 1.1)


@fault("attention without its scale")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%a1")
    return inputs(plan, layer, "%qt1", *layer.inputs[1:])


@fault("keys and values swapped")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%a1")
    q, k, v, *rest = layer.inputs
    return inputs(plan, layer, q, v, k, *rest)


@fault("gate and up swapped")
def _(plan: NetworkPlan) -> NetworkPlan:
    activation, product = maker(plan, "%act0"), maker(plan, "%h0")
    plan = inputs(plan, activation, "%u0")
    return inputs(plan, product, product.inputs[0], "%g0")


@fault("another activation")
def _(plan: NetworkPlan) -> NetworkPlan:
    return attr(plan, maker(plan, "%act1"), op="GELU_ERF")


@fault("residual from the wrong place")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%x2")
    return inputs(plan, layer, "%x1", layer.inputs[1])


@fault("residual missing")
def _(plan: NetworkPlan) -> NetworkPlan:
    return bypass(plan, "%y0", "%o0")


@fault("soft-cap of another height")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = next(x for x in plan.layers if x.outputs == ("logits",))
    return literal(plan, layer.inputs[1], 1.5)


@fault("final norm skipped")
def _(plan: NetworkPlan) -> NetworkPlan:
    return bypass(plan, "%final", "%x2")


@fault("logits of the first rows")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = next(x for x in plan.layers if "logit_rows" in x.inputs)
    return attr(plan, layer, batch=0, axis=0)


@fault("tokens taken for positions")
def _(plan: NetworkPlan) -> NetworkPlan:
    layer = maker(plan, "%x0")
    return inputs(plan, layer, layer.inputs[0], "positions")


@fault("heads in another order")
def _(plan: NetworkPlan) -> NetworkPlan:
    return attr(plan, maker(plan, "%at1"), transpose=(0, 2, 3, 1))


def _one_bit(values: Any) -> Any:
    other = np.array(values, np.float32)
    other.flat[7] += np.float32(2e-3)
    return other


def _swapped_nibbles(matrix: Int4Matrix) -> Int4Matrix:
    packed = (matrix.packed >> 4 | matrix.packed << 4).astype(np.uint8)
    return Int4Matrix(packed, matrix.scales)


def _one_nibble(matrix: Int4Matrix) -> Int4Matrix:
    packed = matrix.packed.copy()
    packed[3, 5] ^= 1
    return Int4Matrix(packed, matrix.scales)


STORED["one number of the head"] = ("head", _one_bit)
STORED["one number of a norm"] = ("norm1", _one_bit)
STORED["nibbles in the wrong order"] = ("down0", _swapped_nibbles)
STORED["one nibble"] = ("gate1", _one_nibble)
STORED["rows in reverse"] = ("embed", lambda values: values[::-1])
