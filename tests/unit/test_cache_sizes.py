"""What a cache takes beside its tokens, and which blocks an int4 one can use."""

from __future__ import annotations

import pytest
from spikeinfer import SpikeError
from spikeinfer.compiler.engine import (
    BuildConfig,
    EngineConfig,
    PretrainedConfig,
    QuantizationConfig,
    SpikeConfig,
    StateSpec,
)
from spikeinfer.compiler.engine.cache import cache_line, recent_blocks, token_bytes
from spikeinfer.runtime.kv_pool import session_limits


def config(kv_format: str, row_bytes: int, block: int = 32) -> EngineConfig:
    """Three layers of two heads of 64, four sequences of 100 tokens."""
    formats = QuantizationConfig("f16", kv_format)
    pretrained = PretrainedConfig("Toy", "toy", "float32", 50, 128, 3, 2, 2, 64, 128, formats)
    build = BuildConfig(8, 4, 100, "paged", block, True)
    states = tuple(
        StateSpec(f"{part}.{layer}", "i", "o", 2, 64, kv_format, row_bytes)
        for layer in range(3)
        for part in ("key", "value")
    )
    return EngineConfig(
        pretrained, build, SpikeConfig("streaming", "onnxruntime", 50, (), states, ())
    )


@pytest.mark.parametrize(
    ("block", "blocks"), [(32, 4), (64, 2), (96, 2), (128, 1), (160, 1), (4096, 1)]
)
def test_an_int4_sequence_owns_blocks_for_32_tokens_as_halves(block: int, blocks: int) -> None:
    made = config("int4", 40, block)
    assert recent_blocks(made) == blocks
    coded = block * token_bytes(made)  # 3 layers, keys and values, 2 heads, 64 / 32 * 20 bytes
    assert coded == block * 3 * 2 * 2 * 40
    assert blocks * coded >= 32 * 3 * 2 * 2 * 64 * 2
    limits = session_limits(made, 100, None)
    assert limits.recent_blocks == blocks
    assert limits.num_blocks == 4 * (blocks + -(-100 // block))


def test_other_caches_need_none() -> None:
    for kv_format, row_bytes in (("f32", 256), ("f16", 128), ("int8", 68)):
        made = config(kv_format, row_bytes, 7)
        assert recent_blocks(made) == 0
        assert cache_line(made) == f"{kv_format}, paged, {12 * row_bytes:,} bytes per token"


def test_memory_for_one_sequence_counts_its_own_blocks() -> None:
    made = config("int4", 40)
    assert cache_line(made) == "int4, paged, 480 bytes per token and 61,440 per sequence"
    needed = (4 + 4) * 32 * 480
    assert session_limits(made, 100, needed).num_blocks == 8
    with pytest.raises(SpikeError, match=f"Give at least {needed} bytes") as caught:
        session_limits(made, 100, needed - 1)
    assert caught.value.code == "SPK615"


def test_an_engine_whose_blocks_hold_no_whole_group_is_refused() -> None:
    with pytest.raises(SpikeError, match=r"blocks of 48 tokens.*--tokens-per-block 32") as caught:
        session_limits(config("int4", 40, 48), 100, None)
    assert caught.value.code == "SPK431"
