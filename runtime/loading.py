"""What an engine directory becomes in memory, and whether it is what the caller asked for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..compiler.engine.cache import token_bytes
from ..compiler.engine.config import EngineConfig
from ..compiler.engine.directory import EngineDirectory
from ..errors import SpikeError
from ..kernels import ops_library
from .chat import ChatTemplate
from .checks import require_count
from .functional_session import FunctionalSession
from .grammar import Grammars
from .kv_pool import session_limits
from .session import Session, SessionLimits
from .streaming_session import StreamingSession
from .tensorrt_session import TensorRtSession, linear_limits
from .text_codec import TextCodec, read_json
from .threads import default_threads

GENERATION_CONFIG = "generation_config.json"
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# Names in use for the same storage format; the right-hand side is what an engine's config says.
FORMAT_NAMES = {
    "fp32": "f32",
    "float32": "f32",
    "fp16": "f16",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "int4": "q4_k_m",
    "int8": "q8_0",
}
KV_FORMAT_NAMES = {name: fmt for name, fmt in FORMAT_NAMES.items() if not name.startswith("int")}


@dataclass(frozen=True)
class LoadedEngine:
    """The parts that generation needs.

    Attributes:
        session: executes steps.
        codec: tokenizer; None = token ids only.
        template: chat template, if any.
        eos_ids: union of what config, generation_config and tokenizer call end of sequence.
        generation_defaults: sampling values the checkpoint recommends.
        directory: what it was opened from; None for parts that came otherwise.
    """

    session: Session
    codec: TextCodec | None = None
    template: ChatTemplate | None = None
    eos_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    directory: EngineDirectory | None = None

    @cached_property
    def grammars(self) -> Grammars | None:
        """Compiles grammars for this tokenizer; None without one."""
        limits = self.session.limits
        return Grammars(self.codec, limits.vocab_size, self.eos_ids) if self.codec else None


@dataclass(frozen=True)
class LoadOptions:
    """How to load an engine; see `SpikeEngine` and, for `spins`, `open_session`.

    Raises:
        SpikeError: SPK608, no count where there should be one.
    """

    quant_config: Mapping[str, str] | None = None
    max_seq_len: int | None = None
    threads: int | None = None
    kv_cache_memory: int | None = None
    spins: bool = True

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "threads", "kv_cache_memory"):
            require_count(name, getattr(self, name))


def load_engine(
    directory: EngineDirectory, options: LoadOptions, before: LoadedEngine | None = None
) -> LoadedEngine:
    """Map an engine.

    Args:
        directory: the engine, checked.
        options: see there.
        before: what loading it gave at another time; if that was this very directory, only the
            session is opened anew: reading the tokenizer is most of the rest.

    Raises:
        SpikeError: SPK602, it was built with other formats than asked for; SPK610, unreadable
            tokenizer files; SPK614, its model can't be loaded; SPK615, too little KV memory.
    """
    require_formats(directory, options.quant_config)
    if before is not None and before.directory is directory:
        return replace(before, session=_open_session(directory, options))
    # One behind the other: beside each other they took a fifth longer, both busy with page faults.
    session = _open_session(directory, options)
    codec = TextCodec.open(directory.path)
    template = ChatTemplate.open(directory.path, codec.special_tokens) if codec else None
    generation = read_json(directory.path / GENERATION_CONFIG)
    return LoadedEngine(
        session=session,
        codec=codec,
        template=template,
        eos_ids=_eos_ids(directory.config, generation, codec),
        generation_defaults=_sampling_defaults(generation),
        directory=directory,
    )


def mapped_bytes(directory: EngineDirectory, options: LoadOptions) -> int:
    """Bytes that a loaded engine takes: its files to be mapped, and a cache that is all in use."""
    limits = _limits(directory, options)
    cache = limits.num_blocks * limits.block_size * token_bytes(directory.config)
    files = (directory.model_path, directory.weights_path)
    return cache + sum(path.stat().st_size for path in files if path.exists())


def canonical_formats(quant_config: Mapping[str, str] | None) -> dict[str, str]:
    """`quant_config` with the storage formats' own names (``fp16`` -> ``f16``).

    Raises:
        SpikeError: SPK603, a key other than ``linear`` and ``kv_cache``.
    """
    names = {"linear": FORMAT_NAMES, "kv_cache": KV_FORMAT_NAMES}
    if quant_config is not None and not isinstance(quant_config, Mapping):
        raise SpikeError(
            "SPK603",
            "quant_config",
            f"{quant_config!r} is no mapping of parts to formats.",
            'Give for example {"linear": "q4_k_m", "kv_cache": "f16"}.',
        )
    given = dict(quant_config or {})
    for key in given:
        if key not in names:
            raise SpikeError(
                "SPK603",
                "quant_config",
                f"{key!r} is no part of a model that can have a format.",
                "The parts are 'linear' (weights) and 'kv_cache'.",
            )
    return {key: names[key].get(str(fmt).lower(), str(fmt).lower()) for key, fmt in given.items()}


def require_formats(directory: EngineDirectory, quant_config: Mapping[str, str] | None) -> None:
    """Check that an engine has the formats asked for: it can't change them any more.

    Raises:
        SpikeError: SPK602, SPK603.
    """
    built = directory.config.pretrained_config.quantization
    has = {"linear": built.quant_algo, "kv_cache": built.kv_cache_quant_algo}
    for part, wanted in canonical_formats(quant_config).items():
        if FORMAT_NAMES.get(has[part], has[part]) != wanted and has[part] != wanted:
            raise SpikeError(
                "SPK602",
                "quant_config",
                f"{part} {quant_config[part] if quant_config else wanted!r} was asked for, but "
                f"{directory.path} was built with {part} {has[part]!r}.",
                "Leave it out of quant_config, or build an engine with it from the checkpoint.",
            )


def _open_session(directory: EngineDirectory, options: LoadOptions) -> Session:
    config, limits = directory.config, _limits(directory, options)
    if config.spike.abi == "linear":
        return TensorRtSession(directory.model_path, config, limits)
    kind = StreamingSession if config.spike.abi == "streaming" else FunctionalSession
    threads = options.threads or default_threads()
    return kind(directory.model_path, config, limits, ops_library(), threads, options.spins)


def _limits(directory: EngineDirectory, options: LoadOptions) -> SessionLimits:
    config = directory.config
    max_seq_len = effective_seq_len(config.build_config.max_seq_len, options.max_seq_len)
    of_engine = linear_limits if config.spike.abi == "linear" else session_limits
    return of_engine(config, max_seq_len, options.kv_cache_memory)


def effective_seq_len(capacity: int, wanted: int | None) -> int:
    """`wanted`, but at most the engine's capacity: a caller's upper bound, not a demand.

    So one call serves engines of any capacity; a warning says when it was too much.
    """
    if wanted is None or wanted <= capacity:
        return wanted or capacity
    warnings.warn(
        f"max_seq_len={wanted} is more than the {capacity} tokens this engine was built for; "
        f"{capacity} are used",
        stacklevel=2,
    )
    return capacity


def _eos_ids(
    config: EngineConfig, generation: Mapping[str, Any], codec: TextCodec | None
) -> frozenset[int]:
    named = generation.get("eos_token_id")
    from_generation = named if isinstance(named, list) else [named]
    ids = {*config.spike.eos_token_ids, *(i for i in from_generation if isinstance(i, int))}
    return frozenset(ids) | (codec.eos_ids if codec else frozenset())


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling values of generation_config.json; none unless it says that it samples."""
    if not generation.get("do_sample"):
        return {}
    found = {name: generation.get(name) for name in SAMPLING_NAMES}
    # transformers' own defaults for what a sampling checkpoint leaves out.
    defaults = {"temperature": 1.0, "top_k": 50}
    return {**defaults, **{name: value for name, value in found.items() if value is not None}}
