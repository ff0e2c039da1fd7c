"""Inputs, outputs and caches of a network against its graph."""

from __future__ import annotations

from collections.abc import Iterator

from ...ir import Graph, Node, Shape, SymDim, attribute, evaluate_dim
from .finding import Finding
from .precision import ElementTypes
from .read import ReadLayer, ReadNetwork, ReadTensor
from .target import Target

STEP = {"tokens": 2, "positions": 2, "write_indices": 1, "kv_lens": 1, "logit_rows": 2}
"""Inputs of every engine, all i32, and their ranks."""


def interface_findings(network: ReadNetwork, graph: Graph, target: Target) -> Iterator[Finding]:
    """Names, types and shapes; one update layer per cache; lengths on every attention."""
    appends = {str(attribute(n, "state")): n for n in graph.nodes if n.op == "kv_append"}
    types = ElementTypes(graph, target.dtype)
    wanted = {name: ("i32", (-1,) * rank) for name, rank in STEP.items()}
    present = {"logits": ("f32", (-1, -1, *_sizes(graph.outputs[0].shape[2:], target)))}
    for name, node in appends.items():
        cache = (types.of_state(node), (-1, *_sizes(node.result.shape[1:], target)))
        wanted[f"{name}.past"] = present[f"{name}.present"] = cache
    yield from _compare("input", network.inputs, wanted)
    yield from _compare("output", network.outputs, present)
    yield from _caches(network, appends)
    yield from _lengths(network)


def _sizes(shape: Shape, target: Target) -> tuple[int, ...]:
    """Fixed sizes; past and step together are the capacity."""
    step = {"P": target.capacity - 1, "S": 1}
    return tuple(evaluate_dim(d, step) if isinstance(d, SymDim) else d for d in shape)


def _compare(
    side: str, tensors: tuple[ReadTensor, ...], wanted: dict[str, tuple[str, tuple[int, ...]]]
) -> Iterator[Finding]:
    found = {t.name: (t.dtype, t.shape) for t in tensors}
    for name in sorted(found.keys() ^ wanted.keys()):
        yield Finding(f"{side} {name}", "it is missing" if name in wanted else "nothing needs it")
    for name in sorted(found.keys() & wanted.keys()):
        if found[name] != wanted[name]:
            (dtype, shape), (other, sizes) = found[name], wanted[name]
            yield Finding(
                f"{side} {name}", f"it is {dtype} {list(shape)}, not {other} {list(sizes)}"
            )


def _caches(network: ReadNetwork, appends: dict[str, Node]) -> Iterator[Finding]:
    """Each past is updated once, into its own present, which nothing else writes."""
    updates: dict[str, list[ReadLayer]] = {}
    for layer in network.layers:
        if layer.kind == "KV_CACHE_UPDATE":
            updates.setdefault(layer.inputs[0], []).append(layer)
        elif any(name.endswith(".past") for name in layer.inputs):
            yield Finding(layer.name, "it reads a cache that is being written")
    for name in appends:
        own = updates.get(f"{name}.past", [])
        if [u.output for u in own] != [f"{name}.present"]:
            written = ", ".join(u.output for u in own) or "nothing"
            yield Finding(f"cache {name}", f"its past is updated into {written}")
        for update in own:
            if update.inputs[2] != "write_indices":
                yield Finding(f"cache {name}", f"it is written at {update.inputs[2]}")
            way = (update.attrs["cache_mode"], update.attrs["update_form"])
            if way != ("LINEAR", "PADDED_BHND"):
                yield Finding(f"cache {name}", f"it is updated as {dict(update.attrs)}")


def _lengths(network: ReadNetwork) -> Iterator[Finding]:
    """Without lengths a kernel reads the whole capacity at every step, whatever the mask says."""
    for layer in network.layers:
        if layer.kind != "ATTENTION":
            continue
        if layer.inputs[4] != "kv_lens":
            got = layer.inputs[4] or "nothing"
            yield Finding(layer.name, f"its key-value lengths are {got}, not kv_lens")
        if not layer.inputs[3]:
            yield Finding(layer.name, "it has no mask")
        forms = {layer.attrs["query_form"], layer.attrs["key_value_form"]}
        plain = layer.attrs["norm_op"] == "SOFTMAX" and not layer.attrs["quantized"]
        if forms != {"PADDED_BHND"} or not plain:
            yield Finding(layer.name, f"it is an attention {dict(layer.attrs)}")
