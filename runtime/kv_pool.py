"""How large the KV pool is, and its memory."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from ..compiler.engine.cache import GROUP_TOKENS, recent_blocks, token_bytes
from ..compiler.engine.config import EngineConfig
from ..errors import SpikeError
from .session import SessionLimits

# Logits of one functional step (every token's) may take this much.
FUNCTIONAL_LOGITS_BYTES = 256 << 20


def session_limits(
    config: EngineConfig, max_seq_len: int, kv_cache_memory: int | None
) -> SessionLimits:
    """Limits of a session over this engine.

    Args:
        config: the engine's.
        max_seq_len: most tokens of one sequence, at most the engine's.
        kv_cache_memory: bytes for the pools; None = enough for `max_batch_size` full sequences,
            but no more than half of the machine's memory. Pages are only used when written to.

    Raises:
        SpikeError: SPK615, `kv_cache_memory` does not hold one full sequence; SPK431, an int4
            cache with blocks that its groups of tokens don't fit.
    """
    build, vocab_size = config.build_config, config.spike.vocab_size
    streaming = config.spike.abi == "streaming"
    block_size = build.tokens_per_block if build.tokens_per_block > 0 else 64
    recent = _recent_blocks(config)
    one = recent + -(-max_seq_len // block_size)
    block_bytes = max(1, block_size * token_bytes(config))
    if kv_cache_memory is None:
        num_blocks = min(build.max_batch_size * one, max(one, _half_of_memory() // block_bytes))
    else:
        num_blocks = _blocks_within(kv_cache_memory, block_bytes, one, max_seq_len)
    rows = max(1, FUNCTIONAL_LOGITS_BYTES // (4 * vocab_size))
    return SessionLimits(
        vocab_size=vocab_size,
        max_num_tokens=build.max_num_tokens if streaming else min(build.max_num_tokens, rows),
        max_batch_size=build.max_batch_size,
        max_seq_len=max_seq_len,
        num_blocks=num_blocks,
        block_size=block_size,
        recent_blocks=recent,
        group_tokens=_group_tokens(config),
    )


def pool_memory(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes on their own pages, uint8 ``[size]``; untouched pages cost nothing."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8, size)


def _group_tokens(config: EngineConfig) -> int:
    # Functional engines compute with ONNX Runtime's operators: the last bits of a result depend on
    # how many tokens are computed together.
    if config.spike.abi == "functional":
        return 0
    return GROUP_TOKENS if any(state.format == "int4" for state in config.spike.states) else 1


def _recent_blocks(config: EngineConfig) -> int:
    size = config.build_config.tokens_per_block
    coded = any(state.format == "int4" for state in config.spike.states)
    if coded and size % GROUP_TOKENS:
        raise SpikeError(
            "SPK431",
            "KV cache",
            f"this engine's int4 cache has blocks of {size} tokens; keys are coded in groups of "
            f"{GROUP_TOKENS} tokens, and no group may lie in two blocks.",
            f"Build it again with --tokens-per-block {GROUP_TOKENS}, or a multiple of it.",
        )
    return recent_blocks(config)


def _blocks_within(memory: int, block_bytes: int, one: int, max_seq_len: int) -> int:
    num_blocks = memory // block_bytes
    if num_blocks >= one:
        return num_blocks
    raise SpikeError(
        "SPK615",
        "KV cache",
        f"kv_cache_memory={memory} bytes hold {num_blocks} blocks of {block_bytes} bytes; "
        f"one sequence of {max_seq_len} tokens needs {one}.",
        f"Give at least {one * block_bytes} bytes or a smaller max_seq_len.",
    )


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
