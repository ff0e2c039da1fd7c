"""Drafts on real engines: what a rejected draft left in the cache never changes an answer.

The drafts are planted: the right continuation, with every third token or so wrong. Log
probabilities are compared to the bit: they show the cache's content where tokens might hide it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikeinfer import SpikeEngine
from spikeinfer.driver import BuildRequest, build
from spikeinfer.runtime.prompt_lookup import PromptLookup

TINY = Path(__file__).parents[2] / ".cache" / "models" / "tiny-llama"
ENGINES: dict[str, dict[str, Any]] = {
    # int8 codes each token alone, as f16 does.
    "f16": {"enable_streaming": True, "kv_cache_dtype": "f16", "tokens_per_block": 8},
    # Keys of 32 tokens are coded together, from rows that a sequence keeps until then.
    "int4": {"enable_streaming": True, "kv_cache_dtype": "int4", "tokens_per_block": 32},
}
LENGTHS = (1, 7, 30, 31, 32, 33, 60)
OPTIONS: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("drafts") / "engine"
    options = {"quantization": "q8_0", "max_num_tokens": 24, **ENGINES[request.param]}
    build(BuildRequest(TINY, out, golden="off", **options))
    with SpikeEngine(out, max_seq_len=128) as engine:
        yield engine


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_planted_drafts_change_nothing(
    engine: SpikeEngine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(5, 300, length).tolist() for length in LENGTHS]
    expected = [engine.complete(prompt, **OPTIONS, **options) for prompt in prompts]
    answers = {tuple(p): p + done.token_ids for p, done in zip(prompts, expected, strict=True)}

    def planted(self: PromptLookup, tokens: list[int], most: int, load: int) -> list[int]:
        answer = next(a for p, a in answers.items() if tuple(tokens[: len(p)]) == p)
        assert answer[: len(tokens)] == tokens
        right = np.array(answer[len(tokens) : len(tokens) + min(most, int(rng.integers(0, 8)))])
        wrong = rng.random(right.size) < 0.3
        return np.where(wrong, (right + 1) % 300, right).tolist()

    monkeypatch.setattr(PromptLookup, "propose", planted)
    found = [engine.complete(p, **OPTIONS, **options, speculative="auto") for p in prompts]
    found += engine.generate_batch(prompts, **OPTIONS, **options, speculative="auto")
    for one, other in zip(found, [*expected, *expected], strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.speculation is not None
        assert 0 < one.speculation.accepted < one.speculation.drafted


def test_drafts_of_the_runtime_itself(engine: SpikeEngine) -> None:
    prompt = [9, 8, 7, 6, 5] * 4
    expected = engine.complete(prompt, **OPTIONS)
    found = engine.complete(prompt, **OPTIONS, speculative="prompt_lookup")
    assert found.token_ids == expected.token_ids
    assert found.speculation is not None
    assert found.speculation.drafted > 0
