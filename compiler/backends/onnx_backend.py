"""From a placed graph to the ONNX model that ONNX Runtime executes."""

from __future__ import annotations

import onnx

from ..ir import OPS, DType, Graph, Kind, Node, State, TensorType, Value, symbol
from .chains import chain_nodes
from .emission import ONNX_DTYPE, Emission, StoredTensor, value_info
from .folds import find_folds
from .kernel_nodes import KERNELS, emit_choice, emit_sum
from .primitive_nodes import PRIMITIVES

EMITTERS = {**PRIMITIVES, **KERNELS}
KERNEL_NAMES = {
    **{op: f"onnx.{op}" for op in PRIMITIVES},
    **{op: f"spike.{op}" for op in KERNELS},
    "attention": "onnx.attention",
}
"""Who runs each op: standard nodes of ONNX Runtime, or our kernels."""
PAGED = "kv."
LOGITS, WANTED = "logits", "wanted_logits"
BEST_IDS, BEST_LOGITS = "best_ids", "best_logits"


def emit_onnx(
    graph: Graph,
    stored: dict[str, StoredTensor],
    weights_file: str,
    row_bytes: dict[str, int],
    tokens_per_block: int,
) -> onnx.ModelProto:
    """The ONNX model of a placed graph.

    Args:
        graph: level placed; every op has an entry in `EMITTERS` (assign-kernels checked it).
        stored: byte range of every constant in the weights file, by constant name.
        weights_file: its name, beside the model.
        row_bytes: bytes of one (token, head) row of each paged state.
        tokens_per_block: size of a block of the paged pools.

    Inputs and outputs are those of docs/engine-format.md for the graph's ABI.
    """
    emission = Emission(graph, stored, weights_file, find_folds(graph))
    chooses = any(value.name == "logit_rows" for value in graph.inputs)
    graph.outputs[0].name = "all_logits" if chooses else LOGITS
    for value in graph.inputs:
        _input(emission, value)
    for node in graph.nodes:
        if id(node) not in emission.folds.inside:
            emit = emit_sum if id(node) in emission.folds.sums else EMITTERS[node.op]
            emit(emission, node)
            _round(emission, node)
    emission.outputs = [value_info(v.name, v.type) for v in graph.outputs]
    if chooses:
        emission.outputs[:1] = _choice(emission, graph.outputs[0])
    for state in graph.states.values():
        if state.input is None:
            _pool(emission, state, row_bytes[state.name], tokens_per_block)
        else:
            assert state.output is not None
            emission.outputs.append(value_info(state.output.name, state.output.type))
    chain_nodes(emission)
    return emission.model("spikeinfer")


def _choice(emission: Emission, logits: Value) -> list[onnx.ValueInfoProto]:
    """The best of every row, and the rows themselves that an input names."""
    rows, width = logits.shape
    outputs = {
        BEST_IDS: TensorType(DType.I32, (rows,)),
        BEST_LOGITS: TensorType(DType.F32, (rows,)),
        LOGITS: TensorType(DType.F32, (symbol("F"), width)),
    }
    emission.inputs.append(value_info(WANTED, TensorType(DType.I32, (symbol("F"),))))
    emit_choice(emission, logits, WANTED, list(outputs))
    return [value_info(name, kind) for name, kind in outputs.items()]


def _input(emission: Emission, value: Value) -> None:
    """An input under its own name; ids are int32 outside, whatever they are inside."""
    outside = value.type
    if value.dtype is DType.I64:
        outside = TensorType(DType.I32, value.shape)
    emission.inputs.append(value_info(value.name, outside))
    if outside is not value.type:
        inside = f"{value.name}.{value.dtype.value}"
        emission.node("Cast", [value.name], inside, to=ONNX_DTYPE[value.dtype])
        value.name = inside


def _round(emission: Emission, node: Node) -> None:
    """Results with a precision pass through it: one cast down, one cast up for all readers.

    A node that only moves elements which are rounded already has nothing left to round. Graph
    outputs keep their names and have no precision.
    """
    for value in node.results:
        moved = OPS[node.op].kind is Kind.SHAPE and all(
            isinstance(o, Value) and o.precision is value.precision for o in node.operands
        )
        if value.precision is not None and not moved:
            low = emission.cast(value.name, value.precision)
            value.name = emission.cast(low, value.dtype)


def state_names(state: State) -> tuple[str, str]:
    """The state's ONNX input and output."""
    if state.input is None:
        return f"{PAGED}{state.name}", f"{PAGED}{state.name}.out"
    assert state.output is not None
    return state.input.name, state.output.name


def _pool(emission: Emission, state: State, row_bytes: int, tokens_per_block: int) -> None:
    kind = TensorType(DType.U8, (symbol("NB"), tokens_per_block, state.type.shape[1], row_bytes))
    name, out = state_names(state)
    emission.inputs.append(value_info(name, kind))
    emission.outputs.append(value_info(out, kind))
