"""config.json of an engine: what the model is, how it was built, what the runtime must bind.

`pretrained_config` and `build_config` use TensorRT-LLM's names where the meaning is the same;
`spike` holds what only this product needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FORMAT_VERSION = 5
"""Version of the whole directory layout; any change that an older reader misreads raises it."""

PAGE = 4096
"""Alignment of every tensor in rank0.weights, in bytes."""

MIXED = "mixed"
"""`quant_algo` of an engine whose formats a quality budget chose."""

RELATIVE_ERROR = "relative error"
"""Key of the report: rms(W - stored W) / rms(W) of each matrix."""

KL_SHARE = "share of KL"
"""Key of the report: each matrix's share of the predicted divergence, if it was measured."""


@dataclass(frozen=True)
class QuantizationConfig:
    """Storage formats by their recipe names, such as ``q4_k_m`` and ``f16``."""

    quant_algo: str
    kv_cache_quant_algo: str


@dataclass(frozen=True)
class PretrainedConfig:
    """The model's own sizes, as in the checkpoint."""

    architecture: str
    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    max_position_embeddings: int
    quantization: QuantizationConfig


@dataclass(frozen=True)
class BuildConfig:
    """Capacities: tokens per step, sequences per step, tokens per sequence."""

    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    kv_cache_type: Literal["paged", "continuous"]
    tokens_per_block: int
    enable_streaming: bool


@dataclass(frozen=True)
class StateSpec:
    """A buffer kept across steps: one pool ``[blocks, tokens_per_block, kv_heads, row_bytes]`` u8
    in the streaming ABI, ``[batch, kv_heads, past, head_dim]`` f32 in the functional one,
    ``[batch, kv_heads, capacity, head_dim]`` of `format` in the linear one."""

    name: str
    input: str
    output: str
    kv_heads: int
    head_dim: int
    format: str
    row_bytes: int


@dataclass(frozen=True)
class FixedStateSpec:
    """A tensor ``[batch, *shape]`` f32 that each step of a functional engine replaces: the state of
    a convolution or a recurrence. A sequence starts from zeros."""

    name: str
    input: str
    output: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightSpec:
    """One tensor in rank0.weights.

    `offset` (a multiple of `PAGE`) and `bytes` delimit it; `shape` is the logical ``[N, K]``
    (``[E, N, K]`` for stacked experts); `parameters` are the checkpoint tensors it came from.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    role: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class ProfileSpec:
    """Sizes one execution context takes, each as least, typical and most.

    Args:
        name: ``prefill`` or ``decode``.
        batches: sequences (B).
        steps: tokens of each (S).
        logit_rows: tokens of each whose logits are wanted (R).
    """

    name: str
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    logit_rows: tuple[int, ...]


@dataclass(frozen=True)
class AliasSpec:
    """A cache of the linear ABI: the input and the output that share one address."""

    state: str
    input: str
    output: str


LINEAR_INPUTS = ("tokens", "positions", "write_indices", "kv_lens", "logit_rows")
LOGITS = "logits"
"""A step over linear caches: int32 inputs ``[B, S]``, ``[B, S]``, ``[B]``, ``[B]``, ``[B, R]``, and
the float32 output ``[B, R, V]``."""


@dataclass(frozen=True)
class TensorRtSpec:
    """What a TensorRT engine was built by and for.

    Args:
        version: of tensorrt_rtx, which alone reads rank0.engine.
        sms: GPU architectures that it has code for.
        dtype: element type of activations and caches.
        capacity: tokens of one sequence's cache row; the last one is scratch.
        profiles: in the engine's order.
        aliases: in the order of `SpikeConfig.states`.
        weight_streaming: whether weights may stay in the machine's memory.
        bytes: on the device, by what takes them: ``weights``, ``kv cache``, a ``PROFILE step``.
    """

    version: str
    sms: tuple[str, ...]
    dtype: Literal["f16", "bf16"]
    capacity: int
    profiles: tuple[ProfileSpec, ...]
    aliases: tuple[AliasSpec, ...]
    weight_streaming: bool = False
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PrecisionEntry:
    """One precision decision: where, which value, the chosen dtype, and why.

    Values of a half-precision engine also state the op that made them, the range observed on
    calibration text (low, high), the proven bound of their magnitude, and the rounding error at the
    end of their subpath in units of the format; None where there is no finite figure.
    """

    scope: str
    value: str
    dtype: str
    reason: str
    op: str = ""
    observed: tuple[float, ...] = ()
    bound: float | None = None
    units: float | None = None


@dataclass(frozen=True)
class NearMiss:
    """A place where a pass nearly fired, and what stopped it."""

    where: str
    reason: str


@dataclass(frozen=True)
class PassEntry:
    """What one pass did in this build. `facts` holds its numbers and decisions."""

    name: str
    fired: int
    where: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SpikeConfig:
    """What the runtime binds and what the report shows. `report` is free-form JSON."""

    abi: Literal["streaming", "functional", "linear"]
    backend: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    states: tuple[StateSpec, ...]
    weights: tuple[WeightSpec, ...]
    fixed_states: tuple[FixedStateSpec, ...] = ()
    precision: tuple[PrecisionEntry, ...] = ()
    passes: tuple[PassEntry, ...] = ()
    report: Mapping[str, object] = field(default_factory=dict)
    tensorrt: TensorRtSpec | None = None
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class EngineConfig:
    """The whole of config.json."""

    pretrained_config: PretrainedConfig
    build_config: BuildConfig
    spike: SpikeConfig
