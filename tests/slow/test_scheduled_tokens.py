"""200 prompts on SmolLM2: the same greedy tokens alone, batched, chunked, cached, pre-empted."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from spikeinfer import SpikeEngine
from spikeinfer.driver import BuildRequest, build

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct"
PROMPTS, TOKENS = 200, 12


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


def prompts_for(engine: SpikeEngine) -> list[list[int]]:
    """Words of our own documents; every second prompt begins with the same page."""
    rng = np.random.default_rng(11)
    page = engine.encode((MODEL.parents[2] / "README.md").read_text("utf-8"))
    start, text = page[:100], page[100:]
    cuts = zip(
        rng.integers(0, len(text) - 200, PROMPTS), rng.integers(1, 120, PROMPTS), strict=True
    )
    parts = [text[at : at + length] for at, length in cuts]
    return [start + part if i % 2 else part for i, part in enumerate(parts)]


def test_200_prompts(path: Path) -> None:
    with SpikeEngine(path) as engine:
        prompts = prompts_for(engine)
        expected = [
            engine.complete(p, max_tokens=TOKENS, ignore_eos=True, cache_salt=str(i)).token_ids
            for i, p in enumerate(prompts)
        ]
    assert len({tuple(tokens) for tokens in expected}) > PROMPTS // 2
    for chunk, batch in ((16, 8), (64, 32), (512, 32)):
        with SpikeEngine(path, max_num_tokens=chunk) as engine:
            for known in (False, True):
                done = []
                for at in range(0, PROMPTS, batch):
                    part = prompts[at : at + batch]
                    done += engine.generate_batch(part, max_tokens=TOKENS, ignore_eos=True)
                assert [completion.token_ids for completion in done] == expected
                assert not known or sum(completion.cached_tokens for completion in done) > 10_000


def test_pre_emption_and_cancelled_neighbours(path: Path) -> None:
    moments = random.Random(1)
    with SpikeEngine(path) as engine:
        prompts = prompts_for(engine)[:48]
        expected = [
            engine.complete(p, max_tokens=TOKENS, ignore_eos=True, cache_salt=str(i)).token_ids
            for i, p in enumerate(prompts)
        ]
        streams = [engine.stream(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts]
        scheduler = engine._loop.scheduler
        for stream in streams:
            stream.submit_locked()
        for number in range(0, 48, 3):
            engine._loop.step()
            streams[number].close()
            if scheduler.running:
                scheduler.preempt(moments.choice(scheduler.running))
        for number, stream in enumerate(streams):
            if number % 3:
                stream.run()
                assert stream.completion.token_ids == expected[number]
        assert scheduler.preemptions > 5
        assert engine.stats().blocks_owned == 0
