"""200 prompts on SmolLM2: the same greedy tokens alone, batched, chunked, cached, pre-empted."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from spikeinfer import SpikeEngine
from spikeinfer.driver import BuildRequest, build
from spikeinfer.runtime.stream import TokenStream

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct"
PROMPTS, TOKENS = 200, 12
LONG_PROMPT, LONG_TOKENS = 280, 100

Ids = list[int]


@pytest.fixture(scope="module", params=["f16", "int4"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "engine"
    build(
        BuildRequest(
            MODEL,
            out,
            quantization="q4_k_m",
            enable_streaming=True,
            kv_cache_dtype=request.param,
            max_num_tokens=512,
            max_batch_size=32,
            max_seq_len=512,
            golden="off",
        )
    )
    return out


def page(engine: SpikeEngine) -> Ids:
    """Our own documents."""
    return engine.encode((MODEL.parents[2] / "README.md").read_text("utf-8"))


def prompts_for(engine: SpikeEngine) -> list[Ids]:
    """Words of our own documents; every second prompt begins with the same page."""
    rng = np.random.default_rng(11)
    start, text = page(engine)[:100], page(engine)[100:]
    cuts = zip(
        rng.integers(0, len(text) - 200, PROMPTS), rng.integers(1, 120, PROMPTS), strict=True
    )
    parts = [text[at : at + length] for at, length in cuts]
    return [start + part if i % 2 else part for i, part in enumerate(parts)]


def one_by_one(engine: SpikeEngine, prompts: list[Ids], tokens: int) -> list[Ids]:
    """What each gets alone, with nothing cached."""
    options = {"max_tokens": tokens, "ignore_eos": True}
    done = [engine.complete(p, cache_salt=str(i), **options) for i, p in enumerate(prompts)]
    assert engine.stats().cached_prompt_tokens == 0
    return [completion.token_ids for completion in done]


@pytest.fixture(scope="module")
def alone(path: Path) -> tuple[list[Ids], list[Ids]]:
    """The prompts, and what each gets alone."""
    with SpikeEngine(path) as engine:
        prompts = prompts_for(engine)
        expected = one_by_one(engine, prompts, TOKENS)
    assert len({tuple(tokens) for tokens in expected}) > PROMPTS // 2
    return prompts, expected


@pytest.mark.parametrize(("chunk", "batch"), [(16, 8), (64, 32), (512, 32)])
def test_batches_chunks_and_cached_prefixes(
    path: Path, alone: tuple[list[Ids], list[Ids]], chunk: int, batch: int
) -> None:
    prompts, expected = alone
    with SpikeEngine(path, max_num_tokens=chunk) as engine:
        for known in (False, True):
            done = []
            for at in range(0, PROMPTS, batch):
                part = prompts[at : at + batch]
                done += engine.generate_batch(part, max_tokens=TOKENS, ignore_eos=True)
            assert [completion.token_ids for completion in done] == expected
            assert not known or sum(completion.cached_tokens for completion in done) > 10_000


def submitted(engine: SpikeEngine, prompts: list[Ids], tokens: int) -> list[TokenStream]:
    streams = [engine.stream(p, max_tokens=tokens, ignore_eos=True) for p in prompts]
    for stream in streams:
        stream.submit_locked()
    return streams


def test_pre_emption_and_cancelled_neighbours(
    path: Path, alone: tuple[list[Ids], list[Ids]]
) -> None:
    """Every fifth request is cancelled on its way; anybody may lose its blocks at any step."""
    prompts, expected = alone
    moments = random.Random(1)
    with SpikeEngine(path, max_num_tokens=256) as engine:
        streams = submitted(engine, prompts, TOKENS)
        scheduler, doomed = engine._loop.scheduler, list(range(0, PROMPTS, 5))
        while not engine._loop.idle:
            engine._loop.step()
            running = scheduler.running
            if running and moments.random() < 0.2:
                scheduler.preempt(moments.choice(running))
            if doomed and moments.random() < 0.4:
                streams[doomed.pop(0)].close()
        done = [stream.completion for stream in streams]
        for number, completion in enumerate(done):
            if completion.finish_reason == "cancelled":
                assert number % 5 == 0
                tokens = completion.token_ids
                assert tokens == expected[number][: len(tokens)]
            else:
                assert completion.token_ids == expected[number]
        assert sum(completion.finish_reason == "cancelled" for completion in done) > 10
        assert scheduler.preemptions == sum(completion.preemptions for completion in done) > 10
        assert engine.stats().blocks_owned == 0


def test_64_long_requests_in_a_cache_for_three_prompts(path: Path) -> None:
    """None is refused, none waits for ever, and none gets other tokens than alone.

    Three are let in, each with a block to spare; not all of them can end without another's blocks.
    """
    with SpikeEngine(path) as engine:
        text = page(engine)
        prompts = [text[13 * i : 13 * i + LONG_PROMPT] for i in range(64)]
        assert len({tuple(prompt[:32]) for prompt in prompts}) == 64  # nothing to share
        expected = one_by_one(engine, prompts, LONG_TOKENS)
        blocks = engine._loop._session.blocks
        assert blocks is not None
        begun = engine._loop.pool.blocks_for(LONG_PROMPT) + 1
        assert begun < engine._loop.pool.blocks_for(LONG_PROMPT + LONG_TOKENS)
        memory = blocks.block_bytes * 3 * begun
    with SpikeEngine(path, kv_cache_memory=memory) as engine:
        streams = submitted(engine, prompts, LONG_TOKENS)
        while not engine._loop.idle:
            engine._loop.step()
        assert [stream.completion.token_ids for stream in streams] == expected
        assert all(stream.completion.finish_reason == "length" for stream in streams)
        assert engine.stats().preemptions > 10
        assert engine.stats().blocks_owned == 0
