"""Ops of ours that follow one another become one node, `Chain` (kernels/ops/link_text.h).

Between two nodes ONNX Runtime needs microseconds, in a small model as many as a node takes. The
links of a chain run one behind the other on threads that are asked for once, and read their weights
out of one tensor, the whole weights file.

before:
    embedding = Embedding(tokens, @table)
    cos = Cos(angles)
    q, k, v = Qkv(embedding, @q, @k, @v, ..., cos, sin)
after:
    cos = Cos(angles)
    q, k, v = Chain(@weights, tokens, cos, sin)

A node's stage is how often the way to it changes from our ops to ONNX Runtime's. Our nodes of one
stage are one chain: none of them waits for a node that waits for another of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper

from .emission import DOMAIN, Emission, StoredTensor

WEIGHTS = "@weights"
TYPE_NAMES = {TensorProto.FLOAT: "f32", TensorProto.UINT8: "u8"}
OTHER_TYPES = {"Route.1": TensorProto.INT64}
"""Results that may stay inside a graph and are not f32."""


def chain_nodes(emission: Emission) -> None:
    """Puts chains in place of our nodes, and one initialiser in place of their weights."""
    returned = {value.name for value in emission.outputs}
    foreign, ours = _stages(emission.nodes)
    readers = {name for nodes in foreign.values() for node in nodes for name in node.input}
    emission.nodes = []
    for stage in range(max([*foreign, *ours], default=-1) + 1):
        emission.nodes += foreign[stage]
        if ours[stage]:
            later = {n for s in ours if s > stage for node in ours[s] for n in node.input}
            _emit_chain(emission, ours[stage], readers | later, returned)
    used = {name for node in emission.nodes for name in node.input}
    emission.initialisers = {n: t for n, t in emission.initialisers.items() if n in used}


def _stages(
    nodes: Iterable[NodeProto],
) -> tuple[defaultdict[int, list[NodeProto]], defaultdict[int, list[NodeProto]]]:
    """Nodes by stage, ONNX Runtime's and ours, each in the order they had."""
    stage_of: dict[str, tuple[int, bool]] = {}
    foreign, ours = defaultdict[int, list[NodeProto]](list), defaultdict[int, list[NodeProto]](list)
    for node in nodes:
        is_ours = node.domain == DOMAIN
        sources = [stage_of[name] for name in node.input if name in stage_of]
        stage = max((s + (theirs and not is_ours) for s, theirs in sources), default=0)
        stage_of |= dict.fromkeys(node.output, (stage, is_ours))
        (ours if is_ours else foreign)[stage].append(node)
    return foreign, ours


def _emit_chain(
    emission: Emission, nodes: Sequence[NodeProto], read: set[str], returned: set[str]
) -> None:
    """One node for these; its outputs are what others read and what leaves the graph."""
    stored = {n: emission.initialisers[n] for n in _inputs(nodes) if _is_stored(emission, n)}
    weights = _weights(emission) if stored else ""
    kinds = {name: kind for node in nodes for name, kind in _kinds(node)}
    outputs = [name for name in kinds if name in read or name in returned]
    emission.nodes.append(chain_node(nodes, outputs, emission.fresh("chain"), weights, stored))
    emission.between += [
        helper.make_tensor_value_info(name, kinds[name], None)
        for name in outputs
        if name not in returned
    ]


def chain_node(
    nodes: Sequence[NodeProto],
    outputs: Sequence[str],
    name: str,
    weights: str = "",
    stored: Mapping[str, TensorProto] = MappingProxyType({}),
) -> NodeProto:
    """The node whose links these nodes are.

    Args:
        nodes: of our domain, each behind those that it reads.
        outputs: what of their results leaves the chain.
        name: of the node.
        weights: the tensor that holds the stored ones.
        stored: constants by name that are a byte range of it.
    """
    made = [name for node in nodes for name in node.output]
    inputs = [n for n in _inputs(nodes) if n not in stored and n not in made]
    if stored:
        inputs.insert(0, weights)
    values = {name: f"%{i}" for i, name in enumerate([*inputs, *made])}
    words = {"": "-"} | {n: _stored_word(t) for n, t in stored.items()} | values
    lines = [_line(node, words) for node in nodes]
    lines.append(" ".join(["return", *(values[name] for name in outputs)]))
    links = "\n".join(lines)
    return helper.make_node("Chain", inputs, list(outputs), name, domain=DOMAIN, links=links)


def _inputs(nodes: Iterable[NodeProto]) -> list[str]:
    """Every input once, in order, but those that are left out."""
    return list(dict.fromkeys(name for node in nodes for name in node.input if name))


def _is_stored(emission: Emission, name: str) -> bool:
    """Whether a constant lies in the weights file, in a type that links know there."""
    tensor = emission.initialisers.get(name)
    if tensor is None or tensor.data_location != TensorProto.EXTERNAL:
        return False
    return tensor.data_type in TYPE_NAMES


def _weights(emission: Emission) -> str:
    """The initialiser that is the whole weights file."""
    if WEIGHTS not in emission.initialisers:
        end = max(stored.offset + stored.length for stored in emission.stored.values())
        whole = StoredTensor(TensorProto.UINT8, (end,), 0, end)
        emission.initialisers[WEIGHTS] = emission.external(WEIGHTS, whole)
    return WEIGHTS


def _stored_word(tensor: TensorProto) -> str:
    """A constant by its place in the weights file, such as ``@4096:f32[576]``."""
    offset = next(entry.value for entry in tensor.external_data if entry.key == "offset")
    return f"@{offset}:{TYPE_NAMES[tensor.data_type]}[{','.join(map(str, tensor.dims))}]"


def _line(node: NodeProto, words: dict[str, str]) -> str:
    """A link as text: outputs, op, inputs, attributes."""
    outputs = [words[name] for name in node.output]
    inputs = [words[name] for name in node.input]
    attributes = [f"{a.name}={_attribute(a)}" for a in sorted(node.attribute, key=lambda a: a.name)]
    return " ".join([*outputs, "=", node.op_type, *inputs, *attributes])


def _attribute(attribute: AttributeProto) -> str:
    """A value in the shortest form that reads back exactly."""
    if attribute.type == AttributeProto.FLOAT:
        return str(np.float32(attribute.f))
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else str(value)


def _kinds(node: NodeProto) -> Iterable[tuple[str, int]]:
    for i, name in enumerate(node.output):
        yield name, OTHER_TYPES.get(f"{node.op_type}.{i}", TensorProto.FLOAT)
