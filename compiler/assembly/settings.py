"""config.json and provenance of an engine: sizes of model and build, what the runtime binds."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ...errors import SpikeError
from ...passes.base import PassReport
from ..backends import state_names
from ..backends.tensorrt import installed_version
from ..engine import (
    BuildConfig,
    EngineConfig,
    FixedStateSpec,
    NearMiss,
    PassEntry,
    PretrainedConfig,
    Provenance,
    QuantizationConfig,
    SpikeConfig,
    StateSpec,
    TensorRtSpec,
    WeightSpec,
)
from ..engine.config import MIXED
from ..engine.manifest import MODEL
from ..frontend.checkpoint import Checkpoint
from ..ir import Graph, State, SymDim
from ..quantize import ModelFacts, Quantization, StoragePlan
from .precision import precision_table
from .request import LONGEST_DEFAULT, BuildRequest

UNLIMITED = -1  # as XLNet states it
KV_BYTES = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "int8": (32, 34), "int4": (32, 20)}
"""(elements, bytes) of one group of a cached row."""
OF_THIS_MACHINE = ("_name_or_path", "transformers_version")
"""Fields of a configuration object that say nothing about the model."""
VERSIONED = ("torch", "transformers", "onnx", "numpy")


def text_config(checkpoint: Checkpoint) -> Any:
    """The part of the config that describes the decoder."""
    return checkpoint.config.get_text_config()


def model_facts(checkpoint: Checkpoint, weighed: bool = False) -> ModelFacts:
    """What storage rules need to know; what a config does not state counts as dense, ungrouped.

    `weighed`: whether the build has importances.
    """
    config = text_config(checkpoint)
    heads = int(getattr(config, "num_attention_heads", 1))
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return ModelFacts(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        experts=int(experts or 0),
        weighed=weighed,
    )


def sequence_limit(request: BuildRequest, checkpoint: Checkpoint) -> int:
    """Tokens of one sequence. Raises SPK803 if the request exceeds what the model was made for."""
    config = text_config(checkpoint)
    names = ("max_position_embeddings", "max_seq_len")  # MPT has the second
    stated = next((v for n in names if (v := getattr(config, n, None)) is not None), None)
    own = LONGEST_DEFAULT if stated in (None, UNLIMITED) else int(stated)
    if own < 1:
        raise SpikeError(
            "SPK122",
            "checkpoint",
            f"config.json states max_position_embeddings = {own}.",
            "Correct it: it is how many tokens the model was made for.",
        )
    if request.max_seq_len is None:
        return min(own, LONGEST_DEFAULT)
    if request.max_seq_len > own:
        raise SpikeError(
            "SPK803",
            "command line",
            f"--max-seq-len {request.max_seq_len} exceeds the model's {own} positions.",
            f"Use at most {own}, or a checkpoint whose config states a longer limit.",
        )
    return request.max_seq_len


def kv_format(request: BuildRequest, quantization: Quantization) -> str:
    """Format of the cache: as asked for; by default f32 only where everything else is f32."""
    if request.backend == "tensorrt":
        return request.half
    if not request.enable_streaming:
        return "f32"
    if request.kv_cache_dtype != "auto":
        return request.kv_cache_dtype
    return "f32" if quantization is Quantization.F32 and not request.budgeted else "f16"


def head_dim(state: State) -> int:
    """Width of one cached row of one head. Raises SPK404 if the format cannot hold it."""
    width = state.type.shape[-1]
    assert not isinstance(width, SymDim)
    group, _ = KV_BYTES[state.format]
    if width % group:
        raise SpikeError(
            "SPK404",
            "kv cache",
            f"{state.name} has rows of {width}, which is no multiple of {group} as "
            f"{state.format} needs.",
            "Use --kv-cache-dtype f16.",
        )
    return width


def row_bytes(state: State) -> int:
    """Bytes of one (token, head) row of a state."""
    group, size = KV_BYTES[state.format]
    return head_dim(state) // group * size


def engine_config(
    request: BuildRequest,
    checkpoint: Checkpoint,
    graph: Graph,
    weights: Sequence[WeightSpec],
    reports: Sequence[PassReport],
    plan: StoragePlan,
    memory: Mapping[str, object],
    measured: Mapping[str, object],
    tensorrt: TensorRtSpec | None = None,
) -> EngineConfig:
    """The whole of config.json; `measured` are figures per tensor for the report."""
    vocab = graph.outputs[0].shape[-1]
    assert not isinstance(vocab, SymDim)
    return EngineConfig(
        _pretrained(
            checkpoint, graph, MIXED if request.budgeted else plan.quantization.value, vocab
        ),
        _build(request, sequence_limit(request, checkpoint), tensorrt),
        SpikeConfig(
            abi=_abi(request),
            backend="tensorrt_rtx" if tensorrt else request.backend,
            vocab_size=vocab,
            eos_token_ids=_eos(checkpoint),
            states=_caches(graph, tensorrt),
            fixed_states=tuple(_fixed(s) for s in graph.states.values() if s.kind != "kv"),
            weights=tuple(weights),
            tensorrt=tensorrt,
            precision=precision_table(graph, reports),
            passes=tuple(map(_entry, reports)),
            report={
                **_report(checkpoint, reports, plan, memory),
                "source config": _source_config(checkpoint),
                "weight views": _views(graph),
                **measured,
            },
        ),
    )


def _pretrained(
    checkpoint: Checkpoint, graph: Graph, algorithm: str, vocab: int
) -> PretrainedConfig:
    config, facts = text_config(checkpoint), model_facts(checkpoint)
    states = [s for s in graph.states.values() if s.kind == "kv"]
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return PretrainedConfig(
        architecture=checkpoint.architecture,
        model_type=checkpoint.model_type,
        dtype=dtype,
        vocab_size=vocab,
        hidden_size=int(config.hidden_size),
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_size=head_dim(states[0]) if states else 0,
        max_position_embeddings=max(0, int(getattr(config, "max_position_embeddings", None) or 0)),
        quantization=QuantizationConfig(algorithm, states[0].format if states else "none"),
    )


def _abi(request: BuildRequest) -> Literal["streaming", "functional", "linear"]:
    if request.backend == "tensorrt":
        return "linear"
    return "streaming" if request.enable_streaming else "functional"


def _caches(graph: Graph, tensorrt: TensorRtSpec | None) -> tuple[StateSpec, ...]:
    """Keys and values, in the order of a TensorRT engine's pairs and by their names there."""
    if tensorrt is None:
        return tuple(_state(s) for s in graph.states.values() if s.kind == "kv")
    return tuple(
        replace(_state(graph.states[pair.state]), input=pair.input, output=pair.output)
        for pair in tensorrt.aliases
    )


def _build(request: BuildRequest, max_seq_len: int, tensorrt: TensorRtSpec | None) -> BuildConfig:
    if tensorrt is not None:
        return BuildConfig(
            max_num_tokens=min(request.max_num_tokens, max_seq_len),
            max_batch_size=request.max_batch_size,
            max_seq_len=max_seq_len,
            kv_cache_type="continuous",
            tokens_per_block=tensorrt.capacity,
            enable_streaming=False,
        )
    return BuildConfig(
        max_num_tokens=request.max_num_tokens,
        max_batch_size=request.max_batch_size,
        max_seq_len=max_seq_len,
        kv_cache_type="paged" if request.enable_streaming else "continuous",
        tokens_per_block=request.tokens_per_block,
        enable_streaming=request.enable_streaming,
    )


def _state(state: State) -> StateSpec:
    source, sink = state_names(state)
    heads = state.type.shape[1]
    assert not isinstance(heads, SymDim)
    return StateSpec(
        state.name, source, sink, heads, head_dim(state), state.format, row_bytes(state)
    )


def _fixed(state: State) -> FixedStateSpec:
    source, sink = state_names(state)
    shape = tuple(d for d in state.type.shape[1:] if isinstance(d, int))
    return FixedStateSpec(state.name, source, sink, shape)


def _eos(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Union of config.json's and generation_config.json's end-of-sequence ids."""
    found = [getattr(text_config(checkpoint), "eos_token_id", None)]
    path = checkpoint.path / "generation_config.json"
    if path.is_file():
        found.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    ids = {i for item in found for i in (item if isinstance(item, list) else [item])}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def _entry(report: PassReport) -> PassEntry:
    misses = tuple(NearMiss(m.where, m.reason) for m in report.missed)
    return PassEntry(report.name, len(report.fired), tuple(report.fired), misses, report.facts)


def _source_config(checkpoint: Checkpoint) -> dict[str, object]:
    """The decoder's whole configuration, defaults included: what an export has to state."""
    config: dict[str, object] = json.loads(text_config(checkpoint).to_json_string(use_diff=False))
    return {name: value for name, value in config.items() if name not in OF_THIS_MACHINE}


def _views(graph: Graph) -> dict[str, dict[str, object]]:
    """How stored weights differ from their parameters, for those that do."""
    views: dict[str, dict[str, object]] = {}
    for const in graph.constants.values():
        view: dict[str, object] = {
            "rows": list(const.rows) if const.rows else None,
            "transposed": const.transposed,
            "plus": const.plus,
            "plain": const.format == "array" and len(const.shape) > 1,
        }
        if const.parameter is not None and any(view.values()):
            views[const.name] = {name: value for name, value in view.items() if value}
    return views


def _report(
    checkpoint: Checkpoint,
    reports: Sequence[PassReport],
    plan: StoragePlan,
    memory: Mapping[str, object],
) -> dict[str, object]:
    return {
        "notes": list(checkpoint.notes),
        "unused tensors": list(checkpoint.unused),
        "storage": plan.table(),
        "bits per weight": round(plan.bits_per_weight, 4),
        "memory plan": dict(memory),
        "facts": {r.name: r.facts for r in reports if r.facts},
    }


def provenance(request: BuildRequest, checkpoint: Checkpoint) -> Provenance:
    """What the manifest says about where the engine came from."""
    versions = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    differing: tuple[str, ...] = ()
    if request.backend == "tensorrt":
        versions["tensorrt-rtx"] = installed_version()
        differing = (MODEL,)
    return Provenance(
        checkpoint.source_hash(), request.options(), versions, not_reproducible=differing
    )
