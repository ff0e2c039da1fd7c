"""Turns over a session of fakes: who gets which rows; log probabilities of prompts and answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from spikeinfer import SpikeError
from spikeinfer.runtime.loop import BatchLoop
from spikeinfer.runtime.sampling_params import SamplingParams
from spikeinfer.runtime.sequence import Completion, Request
from spikeinfer.runtime.session import SessionLimits, StepInputs

VOCAB = 23


def logits_after(tokens: list[int]) -> np.ndarray:
    """A model of its own: what comes depends on the last three tokens."""
    return np.random.default_rng(tokens[-3:]).normal(0, 2, VOCAB).astype(np.float32)


class FakeSession:
    """Keeps every sequence's tokens in its slots, as a cache would, and looks them up there."""

    def __init__(self, max_num_tokens: int = 64, num_blocks: int = 64, **limits: Any) -> None:
        self.limits = SessionLimits(VOCAB, max_num_tokens, 8, 64, num_blocks, 4, **limits)
        self.slots = np.full(num_blocks * 4, -1)
        self.steps: list[StepInputs] = []
        self.poisoned: list[int] | None = None

    def step(self, inputs: StepInputs) -> np.ndarray:
        self.steps.append(inputs)
        self.slots[inputs.slots] = inputs.tokens
        rows = [self.row(inputs, int(t)) for t in inputs.logit_rows]
        return np.stack(rows) if rows else np.empty((0, VOCAB), np.float32)

    def row(self, inputs: StepInputs, t: int) -> np.ndarray:
        b = int(np.searchsorted(inputs.seq_starts, t, side="right")) - 1
        at = np.arange(int(inputs.positions[t]) + 1)
        table = inputs.block_tables[b, self.limits.recent_blocks :]
        known = self.slots[table[at // 4] * 4 + at % 4].tolist()
        row = logits_after(known)
        if known == self.poisoned:
            row[3] = np.nan
        return row

    def close(self) -> None:
        pass


def run(session: FakeSession, *prompts: list[int], **options: Any) -> list[Completion]:
    """All of them in one loop."""
    loop = BatchLoop(session)
    params = SamplingParams(**{"max_tokens": 8, **options})
    requests = [Request(prompt, params, 64, (), None) for prompt in prompts]
    for request in requests:
        loop.add(request)
    while not loop.idle:
        loop.step()
    assert loop.pool.owned == 0
    return [request.completion() for request in requests]


def expected_logprob(context: list[int], token: int) -> float:
    row = logits_after(context).astype(np.float64)
    return float(row[token] - np.log(np.exp(row).sum()))


@pytest.mark.parametrize("budget", [2, 5, 64])
def test_prompts_are_scored_in_any_chunks(budget: int) -> None:
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1]]
    session = FakeSession(budget)
    for done, prompt in zip(run(session, *prompts, prompt_logprobs=2), prompts, strict=True):
        assert done.prompt_logprobs is not None
        assert done.logprobs is None
        first, *rest = done.prompt_logprobs
        assert first is None
        assert [one.token_id for one in rest if one] == prompt[1:]
        for at, one in enumerate(rest, 1):
            assert one is not None
            assert one.logprob == pytest.approx(expected_logprob(prompt[:at], prompt[at]), abs=1e-5)
            assert len(one.top) == 2
        plain = run(FakeSession(), prompt)[0]
        assert plain.token_ids == done.token_ids
        assert plain.prompt_logprobs is None


def test_only_rows_that_are_asked_for_are_computed() -> None:
    session = FakeSession(5)
    run(session, [1, 2, 3, 4, 5, 6, 7], max_tokens=1)
    assert [inputs.logit_rows.tolist() for inputs in session.steps] == [[], [1]]


def test_generated_tokens_have_their_log_probabilities() -> None:
    done = run(FakeSession(), [5, 6], logprobs=1, temperature=1.5, seed=3)[0]
    assert done.logprobs is not None
    tokens = [5, 6, *done.token_ids]
    assert [one.token_id for one in done.logprobs] == done.token_ids
    for at, one in enumerate(done.logprobs, 2):
        assert one.logprob == pytest.approx(expected_logprob(tokens[:at], tokens[at]), abs=1e-5)
        assert one.top[0][0] == int(logits_after(tokens[:at]).argmax())


def test_a_poisoned_prompt_ends_alone() -> None:
    session = FakeSession()
    session.poisoned = [1, 9]
    bad, good = run(session, [1, 9, 2, 3], [4, 5, 6], prompt_logprobs=0)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, SpikeError)
    assert bad.error.code == "SPK609"
    assert good.finish_reason == "length"
    assert good.token_ids == run(FakeSession(), [4, 5, 6])[0].token_ids


def test_pieces_hold_every_token_once_with_its_log_probability() -> None:
    params = SamplingParams(max_tokens=6, logprobs=0)
    request, loop = Request([1, 2], params, 64, (), None), BatchLoop(FakeSession())
    loop.add(request)
    while not loop.idle:
        loop.step()
    tokens = [token for piece in request.pieces for token in piece.token_ids]
    logprobs = [one for piece in request.pieces for one in piece.logprobs]
    assert tokens == request.completion().token_ids
    assert logprobs == request.completion().logprobs
