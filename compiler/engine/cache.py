"""How much memory an engine's cache takes: for each token, and for each sequence besides."""

from __future__ import annotations

from .config import EngineConfig

GROUP_TOKENS = 32
"""Tokens whose int4 keys share scales; a sequence keeps those of its last group as f16 as well."""
INT4_BITS, F16_BITS = 5, 16
"""Of one element; int4's scales and minima are counted."""


def token_bytes(config: EngineConfig) -> int:
    """Bytes of cache for one token, over all states."""
    if config.spike.abi == "functional":
        return sum(4 * state.kv_heads * state.head_dim for state in config.spike.states)
    return sum(state.kv_heads * state.row_bytes for state in config.spike.states)


def recent_blocks(config: EngineConfig) -> int:
    """Blocks that every sequence owns beside those of its tokens, first in its block table.

    The int4 cache keeps a sequence's last group of tokens there, as f16 until it is complete and
    its keys can be coded by channel; other formats need none. `kv_recent_blocks` of the kernels.
    """
    if all(state.format != "int4" for state in config.spike.states):
        return 0
    rows = config.build_config.tokens_per_block * INT4_BITS // F16_BITS
    return -(-GROUP_TOKENS // rows)


def cache_line(config: EngineConfig) -> str:
    """Format and sizes, such as ``int4, paged, 7,200 bytes per token and 921,600 per sequence``."""
    build = config.build_config
    name = config.pretrained_config.quantization.kv_cache_quant_algo
    line = f"{name}, {build.kv_cache_type}, {token_bytes(config):,} bytes per token"
    fixed = recent_blocks(config) * build.tokens_per_block * token_bytes(config)
    return f"{line} and {fixed:,} per sequence" if fixed else line
