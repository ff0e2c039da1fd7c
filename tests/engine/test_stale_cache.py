"""A cache full of NaN: what lies in KV pools and was not written by a sequence never reaches it.

The bytes 0xff are NaN in every format: as f32, as f16, and as the f16 scale of an int8 or int4
group. Results must have the same bits as with zeroed pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from spikeinfer import SpikeEngine
from spikeinfer.driver import BuildRequest, build
from spikeinfer.runtime import functional_session, streaming_session

MODELS = Path(__file__).parents[2] / ".cache" / "models"
BLOCK, INT4_BLOCK = 8, 32
STALE = 0xFF
KV_FORMATS = ("f32", "f16", "int8", "int4")
ENGINES = [*itertools.product(("tiny-llama",), KV_FORMATS), ("tiny-gemma3", "f16")]
"""gemma3's layers have sliding windows, whose blocks lie before the window as well as behind."""

Pools = list[NDArray[np.uint8]]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A streaming engine with small blocks."""
    model, kv_format = request.param
    out = tmp_path_factory.mktemp("stale") / "engine"
    build(
        BuildRequest(
            MODELS / model,
            out,
            dtype="float32",
            enable_streaming=True,
            kv_cache_dtype=kv_format,
            tokens_per_block=INT4_BLOCK if kv_format == "int4" else BLOCK,
            max_num_tokens=16,
            golden="off",
        )
    )
    return out


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[SpikeEngine, Pools]]]:
    """Opens an engine whose new pools are filled with a byte; gives the pools as well."""
    engines = []

    def make(path: Path, fill: int) -> tuple[SpikeEngine, Pools]:
        pools: Pools = []

        def filled(size: int) -> NDArray[np.uint8]:
            pools.append(np.full(size, fill, np.uint8))
            return pools[-1]

        for session in (streaming_session, functional_session):
            monkeypatch.setattr(session, "pool_memory", filled)
        engines.append(SpikeEngine(path, kv_cache_memory=1 << 20, max_seq_len=64))
        assert pools
        return engines[-1], pools

    yield make
    for engine in engines:
        engine.close()


def _ids(engine: SpikeEngine, length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, engine.vocab_size, length).tolist()


def _work(engine: SpikeEngine) -> tuple[list[NDArray[np.float32]], list[tuple[int, ...]]]:
    """Logits of chunked prefills that end inside, at and behind a block, and ragged batches."""
    block = engine._loop.pool.block_size
    chunks = (None, 1, 5, block)
    lengths = (1, block - 1, block, block + 1, 29 if block < 29 else 51)
    scored = [
        engine.score(_ids(engine, length, length), chunk_tokens=chunk)
        for length in lengths
        for chunk in chunks
    ]
    prompts = [_ids(engine, length, length) for length in lengths]
    completions = engine.generate_batch(prompts, max_tokens=12)
    return scored, [tuple(c.token_ids) for c in completions]


def _require_same(found: object, expected: object) -> None:
    logits, tokens = found  # type: ignore[misc]
    wanted_logits, wanted_tokens = expected  # type: ignore[misc]
    assert all(np.isfinite(rows).all() for rows in wanted_logits)
    assert all(map(np.array_equal, logits, wanted_logits))
    assert tokens == wanted_tokens
    assert all(tokens)


def test_fresh_pools(path: Path, opened: Callable[..., tuple[SpikeEngine, Pools]]) -> None:
    """Also the tails of blocks: nobody wrote behind the last token."""
    clean, _ = opened(path, 0)
    stale, pools = opened(path, STALE)
    _require_same(_work(stale), _work(clean))
    assert any((pool != STALE).any() for pool in pools)


def test_freed_and_reused_blocks(
    path: Path, opened: Callable[..., tuple[SpikeEngine, Pools]]
) -> None:
    """What finished sequences left behind, and then NaN over everything they freed."""
    engine, pools = opened(path, 0)
    expected = _work(engine)
    _require_same(_work(engine), expected)
    engine.clear_prefix_cache()  # else what was freed is still worth something
    for pool in pools:
        pool[:] = STALE
    _require_same(_work(engine), expected)


@pytest.mark.parametrize("poison", [False, True], ids=["left", "poisoned"])
def test_cancelled_sequences(
    path: Path, opened: Callable[..., tuple[SpikeEngine, Pools]], poison: bool
) -> None:
    """A sequence cancelled in its middle frees blocks while another one goes on."""
    clean, _ = opened(path, 0)
    long = _ids(clean, 20, 1)
    alone = tuple(clean.complete(long, max_tokens=30).token_ids)
    expected = _work(clean)
    engine, pools = opened(path, STALE)
    kept, cancelled = (engine.stream(long, max_tokens=30) for _ in range(2))
    for stream in (kept, cancelled):
        stream.submit_locked()
    for _ in range(10):
        engine._loop.step()
    assert len(cancelled.completion.token_ids) > 1
    cancelled.close()
    if poison:
        _poison_free_blocks(engine, pools)
    kept.run()
    assert tuple(kept.completion.token_ids) == alone
    assert cancelled.completion.finish_reason == "cancelled"
    _require_same(_work(engine), expected)


def _poison_free_blocks(engine: SpikeEngine, pools: Pools) -> None:
    engine.clear_prefix_cache()
    blocks = engine._loop.pool
    assert blocks.owned
    for pool in pools:
        pool.reshape(blocks.num_blocks, -1)[blocks._blank] = STALE


def test_the_tail_of_an_owned_block(
    path: Path, opened: Callable[..., tuple[SpikeEngine, Pools]]
) -> None:
    """NaN behind the last token, in the block that the next tokens go to."""
    engine, pools = opened(path, 0)
    ids = _ids(engine, 11, 3)
    expected = tuple(engine.complete(ids, max_tokens=30).token_ids)
    stream = engine.stream(ids, max_tokens=30)
    stream.submit_locked()
    engine._loop.step()
    while engine._loop.scheduler.running:
        (request,) = engine._loop.scheduler.running
        assert request.table is not None
        _poison_tail(engine, pools, request.table.ids, request.computed)
        engine._loop.step()
    assert tuple(stream.completion.token_ids) == expected


def _poison_tail(engine: SpikeEngine, pools: Pools, blocks: NDArray[np.int32], tokens: int) -> None:
    pool = engine._loop.pool
    last, own = int(blocks[-1]), blocks[pool.recent_blocks :]
    used = tokens - (len(own) - 1) * pool.block_size
    for index, memory in enumerate(pools):
        places = memory.reshape(pool.num_blocks, pool.block_size, -1)
        if pool.recent_blocks == 0:
            places[last, used:] = STALE
            continue
        # int4: keys have codes once their group is complete; until then they lie in the blocks
        # that lead the table, 10 tokens in a block of 32.
        keys = index % 2 == 0 and used < pool.block_size
        places[last, 0 if keys else used :] = STALE
        recent = memory.reshape(pool.num_blocks, -1)
        size = recent.shape[1] // 10
        for place in range(tokens % INT4_BLOCK, INT4_BLOCK):
            at = place % 10 * size
            recent[blocks[place // 10], at : at + size] = STALE
