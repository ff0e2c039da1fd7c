"""Turns over a session of fakes: who gets which rows; log probabilities of prompts and answers."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
from spikeinfer import SpikeError
from spikeinfer.runtime.loop import BatchLoop
from spikeinfer.runtime.prompt_lookup import PromptLookup
from spikeinfer.runtime.sampling_params import SamplingParams
from spikeinfer.runtime.sequence import Completion, Request
from spikeinfer.runtime.session import BestLogits, SessionLimits, StepInputs, best_of
from spikeinfer.runtime.step_cost import StepShape

VOCAB = 23


def logits_after(tokens: list[int], memory: int = 3) -> np.ndarray:
    """A model of its own: what comes depends on the last few tokens."""
    return np.random.default_rng(tokens[-memory:]).normal(0, 2, VOCAB).astype(np.float32)


class FakeSession:
    """Keeps every sequence's tokens in its slots, as a cache would, and looks them up there."""

    def __init__(self, max_num_tokens: int = 64, num_blocks: int = 64, **limits: Any) -> None:
        self.limits = SessionLimits(VOCAB, max_num_tokens, 8, 64, num_blocks, 4, **limits)
        self.slots = np.full(num_blocks * 4, -1)
        self.steps: list[StepInputs] = []
        self.blocks = None
        self.memory = 3
        self.poisoned: list[int] | None = None

    def step(self, inputs: StepInputs) -> np.ndarray:
        self.steps.append(inputs)
        self.slots[inputs.slots] = inputs.tokens
        rows = [self.row(inputs, int(t)) for t in inputs.logit_rows]
        return np.stack(rows) if rows else np.empty((0, VOCAB), np.float32)

    def best(self, inputs: StepInputs) -> BestLogits:
        return best_of(self.step(inputs))

    def row(self, inputs: StepInputs, t: int) -> np.ndarray:
        b = int(np.searchsorted(inputs.seq_starts, t, side="right")) - 1
        at = np.arange(int(inputs.positions[t]) + 1)
        table = inputs.block_tables[b, self.limits.recent_blocks :]
        known = self.slots[table[at // 4] * 4 + at % 4].tolist()
        row = logits_after(known, self.memory)
        if known == self.poisoned:
            row[3] = np.nan
        return row

    def close(self) -> None:
        pass


def run(session: FakeSession, *prompts: list[int], **options: Any) -> list[Completion]:
    """All of them in one loop."""
    loop = BatchLoop(session)
    params = SamplingParams(**{"max_tokens": 8, **options})
    requests = [
        Request(prompt, params, 64, (), None, lookup=PromptLookup.start(params, session.limits))
        for prompt in prompts
    ]
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


def test_scored_prompts_share_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone may have ten rows; six of them together have no more."""
    monkeypatch.setattr("spikeinfer.runtime.loop.LOGITS_BYTES", 4 * VOCAB * 10)
    prompts = [[i, *range(14)] for i in range(6)]
    session = FakeSession()
    found = run(session, *prompts, prompt_logprobs=1, max_tokens=2)
    assert max(inputs.logit_rows.size for inputs in session.steps) <= 10 + 6
    expected = run(FakeSession(), *prompts, max_tokens=2)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [len(c.prompt_logprobs or ()) for c in found] == [15] * 6


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


DRAFT = 4
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.6, "seed": 7}


@pytest.mark.parametrize("speculative", ["prompt_lookup", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        SAMPLED,
        {**SAMPLED, "top_p": 0.7, "max_entropy": 1.5},
        {**SAMPLED, "mirostat_tau": 2.0},
        {**GREEDY, "repetition_penalty": 1.1, "presence_penalty": 0.1},
        {**GREEDY, "stop_token_ids": [5, 11]},
        {**SAMPLED, "logprobs": 1, "prompt_logprobs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [3, 64])
def test_drafts_change_no_answer(speculative: str, options: dict[str, Any], budget: int) -> None:
    prompts = [[1, 2, 3] * 5, [4, 4, 4, 4, 4, 4], [9], list(range(12)) * 2]
    options = {**options, "max_tokens": 36}
    plain, drafted = FakeSession(budget), FakeSession(budget)
    expected = run(plain, *prompts, **options)
    found = run(drafted, *prompts, speculative=speculative, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
        assert other.speculation is None
        assert one.speculation is not None
        assert 0 <= one.speculation.accepted <= one.speculation.drafted
    assert max(inputs.tokens.size for inputs in drafted.steps) <= budget


def test_right_drafts_save_steps() -> None:
    plain, drafted = FakeSession(), FakeSession()
    plain.memory = drafted.memory = 1  # so that a greedy text soon goes round
    expected = run(plain, [1, 2], max_tokens=60)[0]
    found = run(drafted, [1, 2], max_tokens=60, speculative="prompt_lookup")[0]
    assert found.token_ids == expected.token_ids
    assert found.speculation is not None
    assert found.speculation.accepted > 20
    assert len(drafted.steps) == len(plain.steps) - found.speculation.accepted


def test_a_full_sequence_gets_no_drafts_beyond_its_end() -> None:
    for most in range(1, 20):
        done = run(FakeSession(), [3, 3, 3, 3, 3], max_tokens=most, speculative="prompt_lookup")[0]
        assert len(done.token_ids) == most


def test_drafts_are_counted_before_a_reader_can_see_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Completion] = []
    finish = Request.finish

    def watched(request: Request, *arguments: Any) -> None:
        finish(request, *arguments)
        seen.append(request.completion())

    monkeypatch.setattr(Request, "finish", watched)
    for most in range(5, 40):
        session = FakeSession()
        session.memory = 1
        done = run(session, [1, 2], max_tokens=most, speculative="prompt_lookup")[0]
        assert seen.pop().speculation == done.speculation
        assert not seen


class GroupedSession(FakeSession):
    """Codes the cache of four tokens together once they are there: none of them may change then."""

    def step(self, inputs: StepInputs) -> np.ndarray:
        for b, (first, last) in enumerate(itertools.pairwise(inputs.seq_starts.tolist())):
            done = int(inputs.kv_lens[b]) - (last - first)
            for position in inputs.positions[first:last].tolist():
                assert position >= self.coded.get(int(inputs.block_tables[b, 0]), 0)
            group = int(inputs.kv_lens[b]) // 4 * 4
            self.coded[int(inputs.block_tables[b, 0])] = group
            assert done % 4 + last - first > 0
        return super().step(inputs)

    coded: dict[int, int]


def test_drafts_never_complete_a_group_that_is_coded_together() -> None:
    expected = run(FakeSession(), [1, 2, 3] * 4, max_tokens=40, **SAMPLED)[0]
    session = GroupedSession(group_tokens=4)
    session.coded = {}
    found = run(session, [1, 2, 3] * 4, max_tokens=40, speculative="prompt_lookup", **SAMPLED)[0]
    assert found.token_ids == expected.token_ids
    assert found.speculation is not None
    assert found.speculation.drafted > 0


def test_a_functional_engine_takes_no_drafts() -> None:
    options = {"max_tokens": 40, "speculative": "prompt_lookup"}
    done = run(FakeSession(group_tokens=0), [1, 2, 3] * 4, **options)[0]
    assert done.speculation is not None
    assert done.speculation.drafted == 0
    assert "functional" in done.speculation.off


def test_drafts_leave_the_distribution_as_it_is() -> None:
    """Chi-square of the third token over 2,000 seeds: it is drafted, and mostly rejected."""
    prompt, count = [1, 2, 3, DRAFT, 5, 1, 2, 3], 2000
    weights = np.exp(logits_after(prompt).astype(np.float64))
    first = weights / weights.sum()
    counts, after = np.zeros(VOCAB), np.zeros(VOCAB)
    accepted = 0
    for seed in range(count):
        options = {"max_tokens": 2, "temperature": 1.0, "seed": seed}
        done = run(FakeSession(), prompt, speculative="prompt_lookup", **options)[0]
        counts[done.token_ids[0]] += 1
        if done.token_ids[0] == DRAFT:  # the draft: the second token comes from its own row
            after[done.token_ids[1]] += 1
        assert done.speculation is not None
        accepted += done.speculation.accepted
    assert accepted == counts[DRAFT] > 150  # one draft fits into two tokens
    weights = np.exp(logits_after([*prompt, DRAFT]).astype(np.float64))
    for found, share in ((counts, first), (after, weights / weights.sum())):
        expected = found.sum() * share
        common = expected >= 5
        statistic = ((found - expected)[common] ** 2 / expected[common]).sum()
        # 99.99% of a chi-square of 22 degrees of freedom; fewer are tested.
        assert statistic < 54


class InterruptedSession(FakeSession):
    """Ctrl-C arrives while its fourth step computes: the cache is written, nobody gets logits."""

    def step(self, inputs: StepInputs) -> np.ndarray:
        logits = super().step(inputs)
        if len(self.steps) == 4:
            raise KeyboardInterrupt
        return logits


def started(session: FakeSession, *prompts: list[int]) -> tuple[BatchLoop, list[Request]]:
    loop = BatchLoop(session)
    requests = [Request(p, SamplingParams(max_tokens=8), 64, (), None) for p in prompts]
    for request in requests:
        loop.add(request)
    return loop, requests


def test_an_interrupt_while_a_step_computes_costs_nobody_a_token() -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    expected = [done.token_ids for done in run(FakeSession(), *prompts)]
    loop, requests = started(InterruptedSession(), *prompts)
    interrupts = 0
    while not loop.idle:
        try:
            loop.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert [request.completion().token_ids for request in requests] == expected
    assert loop.pool.owned == 0


def test_an_interrupt_while_tokens_are_given_out_ends_the_requests_of_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    loop, requests = started(FakeSession(), [1, 2], [3])
    loop.step()
    with monkeypatch.context() as patch:
        patch.setattr("spikeinfer.runtime.turn.choose_best", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert loop.idle
    assert [request.completion().finish_reason for request in requests] == ["error", "error"]
    assert loop.pool.owned == 0


class FailingSession(FakeSession):
    """Its third step fails."""

    def step(self, inputs: StepInputs) -> np.ndarray:
        logits = super().step(inputs)
        if len(self.steps) == 3:
            raise RuntimeError("broken")
        return logits


def test_a_failed_step_teaches_nothing_and_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, requests = started(FailingSession(), [1, 2], [3])
    shapes: list[StepShape] = []
    monkeypatch.setattr(
        loop.scheduler.costs, "observe", lambda shape, seconds: shapes.append(shape)
    )
    while not loop.idle:
        loop.step()
    assert [request.completion().finish_reason for request in requests] == ["error", "error"]
    assert len(shapes) == loop.stats().steps == 2
    assert loop.stats().tokens == sum(shape.tokens for shape in shapes)


@pytest.mark.parametrize(
    "where",
    ["turn.Turn.draft", "scheduler.Scheduler._prompts", "scheduler.Scheduler._seat"],
)
def test_a_fault_in_planning_ends_who_is_there_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("fault")

    loop, requests = started(FakeSession(), [1, 2], [3])
    loop.step()
    loop.add(Request([9], SamplingParams(max_tokens=4), 64, (), None))
    with monkeypatch.context() as patch:
        patch.setattr(f"spikeinfer.runtime.{where}", broken)
        loop.step()
    assert loop.idle
    for request in requests:
        error = request.completion().error
        assert error is not None
        assert (error.code, "fault" in str(error)) == ("SPK616", True)
    assert (loop.pool.owned, loop.pool.available) == (0, loop.pool.num_blocks)
    fresh = Request([1, 2], SamplingParams(max_tokens=4), 64, (), None)
    loop.add(fresh)
    while not loop.idle:
        loop.step()
    assert fresh.completion().token_ids == run(FakeSession(), [1, 2], max_tokens=4)[0].token_ids


def test_an_interrupt_while_planning_costs_nobody_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any call that planning makes of its own."""
    prompts = [[1, 2, 3], [4, 5], [6]]
    expected = [done.token_ids for done in run(FakeSession(), *prompts)]
    names = ["blocks.BlockTable.grow", "sequence.Request.enter_cache", "turn.Turn.draft",
             "scheduler.Scheduler._decoding", "blocks.BlockPool.take"]  # fmt: skip
    for name, after in itertools.product(names, range(3)):
        loop, requests = started(FakeSession(), *prompts)
        for _ in range(after):
            loop.step()
        with monkeypatch.context() as patch:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(f"spikeinfer.runtime.{name}", interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                loop.step()
        while not loop.idle:
            loop.step()
        assert [request.completion().token_ids for request in requests] == expected
        assert (loop.pool.owned, loop.pool.available) == (0, loop.pool.num_blocks)
