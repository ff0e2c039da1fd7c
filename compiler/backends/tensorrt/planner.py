"""From a placed graph to the plan of its network.

The step's interface, all i32: ``tokens`` and ``positions`` [B, S], ``write_indices`` [B] (tokens
that each sequence has in its cache), ``kv_lens`` [B] (with the new ones), ``logit_rows`` [B, R]
(whose logits are wanted, 0..S-1). Sequences shorter than S are padded at the end; a token's
position is its place in the cache. Each state is an input ``NAME.past`` and an output
``NAME.present`` that share one address; the output ``logits`` is f32 [B, R, V].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ....errors import ExitCode, SpikeError
from ...ir import Constant, Graph, Kind, Level, Node, Value, op_of
from . import attention, rotary
from .emission import Emission, NoLayersError, refusal
from .layers import LAYERS, finish
from .plan import AliasedPair, Dimension, Layer, NetworkPlan, Tensor
from .precision import ElementTypes
from .target import Target

_T = TypeVar("_T")

STEP_INPUTS = {
    "tokens": ("B", "S"),
    "positions": ("B", "S"),
    "write_indices": ("B",),
    "kv_lens": ("B",),
    "logit_rows": ("B", "R"),
}
LOGITS = "logits"
assert attention
assert rotary  # registered


def plan_network(graph: Graph, target: Target) -> NetworkPlan:
    """A placed graph's network. Reads no weights.

    Raises SpikeError: SPK520..524 for the target, SPK525 an op or a state that has no layers,
    SPK526 an attention that can't be stated.
    """
    target.check()
    _check_interface(graph)
    _check_ops(graph)
    emission = Emission(graph, target, ElementTypes(graph, target.dtype))
    for name, shape in STEP_INPUTS.items():
        emission.tensor(name, "i32", shape)
    for name in ("tokens", "positions"):
        emission.values[id(graph.input(name))] = emission.tensors[name]
    _declare_caches(emission)
    tail = _tail(graph)
    inside = set(map(id, tail))
    for node in graph.nodes:
        if id(node) not in inside:
            _emit(emission, node)
    _emit_logits(emission, tail)
    plan = _collect(emission)
    target.check(plan.weight_types() - {"f32", "i32", "bool"})
    return plan


def _check_interface(graph: Graph) -> None:
    if graph.level is not Level.PLACED:
        raise ValueError(f"the graph is {graph.level.value}, not placed")
    for state in graph.states.values():
        if state.kind != "kv" or state.input is not None:
            raise SpikeError(
                "SPK525",
                "TensorRT network",
                f"the state {state.name} is not a key or value cache that grows in place.",
                "Build this model for ONNX Runtime (leave --backend out).",
                ExitCode.UNSUPPORTED,
            )
    if graph.is_stepwise:
        raise SpikeError(
            "SPK525",
            "TensorRT network",
            "the model was traced for one token per step only, so it has no prefill.",
            "Build this model for ONNX Runtime (leave --backend out).",
            ExitCode.UNSUPPORTED,
        )


def _check_ops(graph: Graph) -> None:
    """All at once: a model of experts is refused by its experts, not by what stands before them."""
    for node in graph.nodes:
        if node.op not in LAYERS:
            raise refusal("SPK525", node, f"the network API has no layers for {node.op}")


def _declare_caches(emission: Emission) -> None:
    """An input per state; its type is that of what is appended."""
    for node in emission.graph.nodes:
        if node.op == "kv_append":
            name = str(node.attrs["state"])
            emission.tensor(f"{name}.past", emission.types.of_state(node), _cache(emission, node))
            emission.aliases.append(AliasedPair(name, f"{name}.past", f"{name}.present"))


def _cache(emission: Emission, node: Node) -> tuple[Dimension, ...]:
    return _attempt(node, lambda: emission.dims(node.result.shape))


def _emit(emission: Emission, node: Node) -> None:
    emit = LAYERS[node.op]
    emission.scope, emission.stem = node.scope, f"%{node.results[0].name}"
    tensor = _attempt(node, lambda: finish(emission, node, emit(emission, node)))
    emission.values[id(node.result)] = tensor


def _attempt(node: Node, emit: Callable[[], _T]) -> _T:
    """What an emitter makes, or its reason as SPK525."""
    try:
        return emit()
    except NoLayersError as reason:
        raise refusal("SPK525", node, str(reason)) from reason


def _tail(graph: Graph) -> list[Node]:
    """The head and the elementwise ops behind it: what only the wanted rows need."""
    nodes: list[Node] = []
    node = graph.outputs[0].node
    while node is not None and op_of(node).kind is Kind.ELEMENTWISE:
        values = [o for o in node.operands if isinstance(o, Value)]
        if len(values) != 1 or any(isinstance(o, Constant) for o in node.operands):
            return []
        nodes.append(node)
        node = values[0].node
    if node is None or node.op != "linear" or not isinstance(node.operands[0], Value):
        return []
    return [node, *nodes[::-1]]


def _emit_logits(emission: Emission, tail: list[Node]) -> None:
    """The wanted rows, then the tail on them; it ends in f32, as what leaves a graph does."""
    logits = emission.graph.outputs[0]
    source = tail[0].value(0) if tail else logits
    emission.scope, emission.stem = (tail[0].scope if tail else ""), LOGITS
    rows = _wanted_rows(emission, emission.value(source))
    kept = dict(emission.values)
    emission.values[id(source)] = rows
    emission.step = "R"
    for node in tail:
        _emit(emission, node)
        emission.stem = LOGITS
    emission.values = kept | {id(logits): emission.value(logits)}


def _wanted_rows(emission: Emission, tensor: Tensor) -> Tensor:
    """[B, S, K] to [B, R, K]."""
    shape = ("B", "R", tensor.shape[-1])
    rows = emission.tensors["logit_rows"]
    return emission.layer("gather", [tensor, rows], shape, axis=1, batch=1)


def _collect(emission: Emission) -> NetworkPlan:
    """The plan, with the graph's names for the values that are in both."""
    names = _names(emission)
    tensors = {names[t.name]: replace(t, name=names[t.name]) for t in emission.tensors.values()}
    layers = tuple(
        replace(
            layer,
            inputs=tuple(names.get(n, "") for n in layer.inputs),
            outputs=tuple(names[n] for n in layer.outputs),
        )
        for layer in emission.layers
    )
    used = {name for layer in layers for name in layer.inputs}
    inputs = [*STEP_INPUTS, *(a.input for a in emission.aliases)]
    outputs = [LOGITS, *(a.output for a in emission.aliases)]
    return NetworkPlan(
        name=emission.graph.name,
        inputs=tuple(tensors[n] for n in inputs),
        outputs=tuple(tensors[n] for n in outputs),
        layers=_live(layers, outputs),
        tensors=tensors,
        constants={n: s for n, s in emission.constants.items() if n in used},
        aliases=tuple(emission.aliases),
        profiles=emission.target.profiles(_vocabulary(tensors[LOGITS])),
        capacity=emission.target.capacity,
    )


def _vocabulary(logits: Tensor) -> int:
    width = logits.shape[-1]
    assert isinstance(width, int)
    return width


def _names(emission: Emission) -> dict[str, str]:
    """New names by old: ``%VALUE`` for the graph's values, if the tensor has no name of its own."""
    fixed = {*STEP_INPUTS, *emission.constants}
    fixed |= {n for a in emission.aliases for n in (a.input, a.output)}
    names = {n: n for n in emission.tensors}
    logits = emission.graph.outputs[0]
    taken = set[str]()
    for value in emission.graph.values():
        tensor = emission.values.get(id(value))
        if tensor is None or tensor.name in fixed | taken:
            continue
        names[tensor.name] = LOGITS if value is logits else f"%{value.name}"
        taken.add(tensor.name)
    return names


def _live(layers: tuple[Layer, ...], outputs: list[str]) -> tuple[Layer, ...]:
    """Layers that an output needs."""
    wanted, kept = set(outputs), list[Layer]()
    for layer in reversed(layers):
        if wanted & set(layer.outputs):
            wanted |= set(layer.inputs)
            kept.append(layer)
    return tuple(kept[::-1])
