"""The built network against the graph it came from, without a GPU.

Reads the real INetworkDefinition (`read.py`) and knows nothing of the plan it was made by. In turn:

1. interface: inputs, outputs, caches in pairs of one update each, names, types, shapes;
2. constants: every matrix and vector of the graph is in the network, byte for byte (SHA-256), and
   nothing large is that the graph doesn't have;
3. types: every tensor that stands for a value has the value's element type, and what must be
   computed in f32 is;
4. meaning: each value is computed from the values that its node names, and from nothing else, to
   the same numbers: the layers between are run on random input by `meaning.py`, the nodes by the
   reference interpreter's functions. So a transposed weight, a scale on the wrong axis, a missing
   bias or a wrong window is found where it is, and pieces that agree compose to a whole that does.
   Rows of very different magnitude make an epsilon show, and sequences of different lengths a mask.

What stays open is what the device's kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ir import Graph, Node, Value, attribute
from .check_constants import constant_findings
from .check_interface import interface_findings
from .check_meaning import Pieces
from .constants import Constants
from .finding import Finding
from .read import read_network
from .target import Target

__all__ = ["Finding", "check_network"]

TOLERANCE = 1e-4
"""Largest difference between a piece and its nodes, relative to the largest number of the row: sums
of a few thousand f32 products in two orders differ by 1e-6."""
EXACT_INSIDE = ("rms_norm", "layer_norm", "sum", "mean", "softmax")
"""Ops that compute in f32 whatever stands around them."""


def check_network(
    definition: Any, graph: Graph, constants: Constants, target: Target
) -> list[Finding]:
    """Differences between an INetworkDefinition and a placed graph; none is the proof."""
    try:
        network = read_network(definition)
    except RuntimeError as error:  # shapes that contradict each other
        return [Finding("network", f"TensorRT can't read it back: {error}")]
    findings = [*interface_findings(network, graph, target)]
    if findings:
        return findings  # sizes are not known well enough to run anything
    findings += constant_findings(network, graph, constants, target)
    pieces = Pieces(network, graph, constants, target)
    for value in pieces.shared:
        findings += _piece(pieces, value)
    return findings


def _piece(pieces: Pieces, value: Value) -> Iterator[Finding]:
    """What is wrong with the layers that make one value."""
    assert value.node is not None
    where = f"%{value.name} ({value.node.op} in {value.node.scope or 'the model'})"
    try:
        made = pieces.network_value(value)
        meant = pieces.graph_value(value, made.constants)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        yield Finding(where, f"its layers can't be run: {error}")
        return
    yield from _types(pieces, value, where)
    for name in sorted(made.leaves - meant.leaves - allowed(pieces, value)):
        yield Finding(where, f"its layers read {name}, which its node doesn't")
    for name in sorted(meant.leaves - made.leaves):
        yield Finding(where, f"its layers don't read {name}, which its node does")
    reason = difference(made.result, meant.result)
    if reason:
        yield Finding(where, reason)


def allowed(pieces: Pieces, value: Value) -> set[str]:
    """Step inputs that stand for what the graph knows from its shapes."""
    extra = {"logit_rows"} if value is pieces.graph.outputs[0] else set[str]()
    for node in pieces.nodes_of(value):
        if node.op == "attention":
            extra |= {"positions", "kv_lens"}
        if node.op == "kv_append":
            extra |= {"write_indices", f"{attribute(node, 'state')}.past"}
    return extra


def difference(made: Tensor, meant: Tensor) -> str:
    """In what the network's numbers differ from the graph's; empty if in nothing."""
    if made.shape != meant.shape:
        return f"it has shape {list(made.shape)}, not {list(meant.shape)}"
    if not meant.is_floating_point():
        return "" if torch.equal(made.long(), meant.long()) else "it has other numbers"
    largest = meant.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    error = float(((made - meant).abs() / largest).nan_to_num(float("inf")).max())
    return "" if error <= TOLERANCE else f"it is off by {error:.2g} of its row's largest number"


def _types(pieces: Pieces, value: Value, where: str) -> Iterator[Finding]:
    """The value's own element type; and no narrower one on the way to it."""
    network, name = pieces.network, pieces.names[id(value)]
    wanted = "f32" if value is pieces.graph.outputs[0] else pieces.types.of(value)
    if network.tensors[name].dtype != wanted:
        yield Finding(where, f"it is {network.tensors[name].dtype}, not {wanted}")
    if all(_exact(pieces, node) for node in pieces.nodes_of(value)):
        for layer in pieces.layers_of(value):
            dtype = network.tensors[layer.output].dtype
            moves = layer.kind in ("CAST", "CONSTANT", "SHUFFLE", "SLICE", "GATHER")
            if dtype in ("f16", "bf16") and not moves:
                yield Finding(where, f"{layer.kind} computes in {dtype}, not in f32")


def _exact(pieces: Pieces, node: Node) -> bool:
    floats = node.results[0].dtype.is_float and node.op != "kv_append"
    return floats and (node.op in EXACT_INSIDE or pieces.types.computed_in(node) == "f32")
