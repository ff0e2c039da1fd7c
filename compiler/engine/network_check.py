"""A TensorRT engine's network.json against its config.json; neither needs TensorRT or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from .config import LINEAR_INPUTS, LOGITS, EngineConfig
from .directory import EngineDirectory
from .manifest import NETWORK
from .schema import SchemaError, parse, plain


def network_problems(engine: EngineDirectory) -> list[str]:
    """What contradicts; empty for an engine that is in order."""
    if NETWORK not in engine.manifest.files:
        return [f"there is no {NETWORK}"]
    try:
        network = parse((engine.path / NETWORK).read_bytes())
        return list(_problems(cast("Mapping[str, Any]", network), engine.config))
    except (SchemaError, KeyError, TypeError, AttributeError) as error:
        return [f"{NETWORK} is not the plan of a network ({error})"]


def _problems(network: Mapping[str, Any], config: EngineConfig) -> Iterator[str]:
    spec = config.spike.tensorrt
    assert spec is not None
    if network["aliases"] != plain(spec.aliases):
        yield "its aliased pairs differ"
    if network["capacity"] != spec.capacity:
        yield "the caches' capacity differs"
    profiles = [{"name": p["name"], "batches": p["batches"], "steps": p["steps"],
                 "logit_rows": p["rows"]} for p in network["profiles"]]  # fmt: skip
    if profiles != plain(spec.profiles):
        yield "its profiles differ"
    pairs = [(a.input, a.output) for a in spec.aliases]
    if {t["name"] for t in network["inputs"]} != {*LINEAR_INPUTS, *(source for source, _ in pairs)}:
        yield "its inputs are not those of a step"
    if {t["name"] for t in network["outputs"]} != {LOGITS, *(sink for _, sink in pairs)}:
        yield "its outputs are not logits and caches"
    yield from _cache_problems(network, config)
    yield from _layer_problems(network)


def _cache_problems(network: Mapping[str, Any], config: EngineConfig) -> Iterator[str]:
    """Caches of other shapes or element types than the states."""
    spec = config.spike.tensorrt
    assert spec is not None
    tensors = {t["name"]: t for t in (*network["inputs"], *network["outputs"])}
    for state in config.spike.states:
        shape = ["B", state.kv_heads, spec.capacity, state.head_dim]
        for name in (state.input, state.output):
            found = tensors.get(name, {})
            if found.get("dtype") != state.format or found.get("shape") != shape:
                yield f"the cache {name} is not {state.format} {shape}"


def _layer_problems(network: Mapping[str, Any]) -> Iterator[str]:
    """A layer that reads what nothing wrote; constants without a hash; outputs nobody wrote."""
    known = {t["name"] for t in network["inputs"]}
    for constant in network["constants"]:
        known.add(constant["name"])
        if "source" in constant and len(constant.get("sha256", "")) != 64:
            yield f"the constant {constant['name']} has no hash"
    for layer in network["layers"]:
        for name in layer["in"]:
            if name and name not in known:
                yield f"a {layer['kind']} layer in {layer.get('scope', '')} reads {name} too early"
        known |= {t["name"] for t in layer["out"]}
    for tensor in network["outputs"]:
        if tensor["name"] not in known:
            yield f"nothing makes {tensor['name']}"
