"""What a request gets does not depend on how it was scheduled: same tokens, same bits of logits.

Alone and fresh, against batches, chunks, cached prefixes, pre-emption, cancelled neighbours; for
weights and caches in each format, with full and with sliding-window attention.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from spikeinfer import SpikeEngine
from spikeinfer.driver import BuildRequest, build
from spikeinfer.runtime.batch import Chunk, step_inputs
from spikeinfer.runtime.blocks import BlockPool
from spikeinfer.runtime.session import BestLogits, StepInputs, best_of

MODELS = Path(__file__).parents[2] / ".cache" / "models"
BLOCK, CAPACITY, TOKENS = 32, 192, 10
ENGINES = [
    ("tiny-llama", "none", "f32"),
    ("tiny-llama", "q8_0", "f16"),
    ("tiny-gemma3", "none", "int8"),
    ("tiny-gemma3", "q8_0", "int4"),
]
"""gemma3's first layers see 16 tokens back, less than a block."""

Rows = dict[tuple[int, int], set[bytes]]


class Recorder:
    """Keeps the bits of every logit row: by position and token, whoever asked for it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.rows: Rows = defaultdict(set)

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._session.step(inputs)
        for row, at in zip(logits, inputs.logit_rows.tolist(), strict=True):
            key = int(inputs.positions[at]), int(inputs.tokens[at])
            self.rows[key].add(row.tobytes())
        return logits

    def best(self, inputs: StepInputs) -> BestLogits:
        """Of all logits, so that their bits are seen."""
        return best_of(self.step(inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, quantization, kv_format = request.param
    out = tmp_path_factory.mktemp("same") / "engine"
    build(
        BuildRequest(
            MODELS / model,
            out,
            dtype="float32",
            quantization=quantization,
            enable_streaming=True,
            kv_cache_dtype=kv_format,
            tokens_per_block=BLOCK,
            max_num_tokens=512,
            max_batch_size=32,
            max_seq_len=CAPACITY,
            golden="off",
        )
    )
    return out


@contextmanager
def opened(path: Path, chunk: int, blocks: int = 400) -> Iterator[tuple[SpikeEngine, Rows]]:
    """An engine of so many tokens a step and KV blocks, and the rows it computes."""
    with SpikeEngine(path, threads=1) as engine:
        sizes = engine._loaded.session.blocks
        assert sizes is not None
        memory = blocks * sizes.block_bytes
    with SpikeEngine(path, threads=1, max_num_tokens=chunk, kv_cache_memory=memory) as engine:
        recorder = Recorder(engine._loop._session)
        engine._loop._session = recorder  # type: ignore[assignment]
        yield engine, recorder.rows


def prompts_for(engine: SpikeEngine, count: int) -> list[list[int]]:
    """Of all lengths; every second one begins with the same 80 tokens, so with two full blocks."""
    rng = np.random.default_rng(3)
    shared = rng.integers(5, engine.vocab_size, 80).tolist()
    lengths = rng.integers(1, 100, count).tolist()
    rest = [rng.integers(5, engine.vocab_size, n).tolist() for n in lengths]
    return [shared + tail if i % 2 else tail for i, tail in enumerate(rest)]


@pytest.fixture(scope="module")
def alone(path: Path) -> tuple[list[list[int]], list[list[int]], Rows]:
    """32 prompts, the tokens each gets alone with nothing cached, and the logits' bits."""
    with opened(path, 512) as (engine, rows):
        prompts = prompts_for(engine, 32)
        done = [
            engine.complete(p, max_tokens=TOKENS, ignore_eos=True, cache_salt=str(i))
            for i, p in enumerate(prompts)
        ]
        assert engine.stats().cached_prompt_tokens == 0
    return prompts, [completion.token_ids for completion in done], rows


@pytest.mark.parametrize(("chunk", "batch"), [(16, 8), (64, 32), (512, 32)])
def test_batches_chunks_and_cached_prefixes(path: Path, alone: Any, chunk: int, batch: int) -> None:
    prompts, expected, bits = alone
    with opened(path, chunk) as (engine, rows):
        for known in (False, True):
            done = []
            for at in range(0, len(prompts), batch):
                part = prompts[at : at + batch]
                done += engine.generate_batch(part, max_tokens=TOKENS, ignore_eos=True)
            assert [completion.token_ids for completion in done] == expected
            assert rows == bits
            full = [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
            assert not known or [completion.cached_tokens for completion in done] == full
    assert len({len(set(values)) for values in expected}) > 1  # no model that repeats itself


def test_pre_empted_sequences(path: Path, alone: Any) -> None:
    """Thrown out at any moment, in a pool too small for all; computed again, or found again."""
    prompts, expected, bits = alone
    with opened(path, 64, blocks=40) as (engine, rows):
        streams = [engine.stream(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts]
        loop, moments = engine._loop, random.Random(7)
        for stream in streams:
            stream.submit_locked()
        while not loop.idle:
            loop.step()
            if loop.scheduler.running and moments.random() < 0.4:
                loop.scheduler.preempt(moments.choice(loop.scheduler.running))
        assert [stream.completion.token_ids for stream in streams] == expected
        assert rows == bits
        counts = [stream.completion.preemptions for stream in streams]
        assert engine.stats().preemptions == sum(counts) > 10
        assert engine.stats().blocks_owned == 0


def test_cancelled_neighbours(path: Path, alone: Any) -> None:
    prompts, expected, _ = alone
    with opened(path, 64) as (engine, _):
        streams = [engine.stream(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts[:16]]
        with engine._lock:
            for stream in streams:
                stream.submit_locked()
        for number in range(40):
            engine._loop.step()
            if number < 8:
                streams[2 * number].close()
        for stream, tokens in list(zip(streams, expected, strict=False))[1::2]:
            stream.run()
            assert stream.completion.token_ids == tokens
        assert engine.stats().blocks_owned == 0


def test_a_fork_goes_on_as_the_first_would_have(path: Path) -> None:
    """Two futures of one past, forked inside a block: each as if it had been alone."""
    with opened(path, 512) as (engine, _):
        ids = np.random.default_rng(5).integers(5, engine.vocab_size, 80).tolist()
        futures = ids[:50] + ids[60:], ids
        expected = [engine.score(future) for future in futures]
        session = engine._loop._session
        limits = session.limits
        pool = BlockPool(limits.num_blocks, BLOCK, limits.recent_blocks)
        first = pool.table()
        first.grow(0, 45)
        session.step(step_inputs([Chunk(ids[:45], 0, first, [44])]))
        tables = first.fork(), first
        for start, stop in ((45, 50), (50, 51), (51, 70)):
            for table in tables:
                assert session.blocks is not None
                session.blocks.copy(table.grow(start, stop))
            chunks = [
                Chunk(future[start:stop], start, table, range(stop - start))
                for future, table in zip(futures, tables, strict=True)
            ]
            found = session.step(step_inputs(chunks)).copy().reshape(2, stop - start, -1)
            for got, logits in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got, logits[start:stop])
