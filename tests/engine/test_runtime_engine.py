"""SpikeEngine over a toy model: batching, capacity, stopping, cancelling, several readers.

The toy keeps token ids where a real session keeps K and V, and computes the logits from whatever it
finds through the block table: a wrong slot, block, length or position changes every later token.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from spikeinfer import SpikeEngine, SpikeError
from spikeinfer.runtime.batch_window import WindowPolicy
from spikeinfer.runtime.block_bytes import BlockBytes
from spikeinfer.runtime.chat import ChatTemplate
from spikeinfer.runtime.kv_tier import TierOptions
from spikeinfer.runtime.loading import LoadedEngine
from spikeinfer.runtime.scheduler import SchedulingPolicy
from spikeinfer.runtime.session import BestLogits, SessionLimits, StepInputs, best_of
from spikeinfer.runtime.step_cost import CostModel, StepCost
from spikeinfer.runtime.stream import TokenStream
from spikeinfer.runtime.text_codec import TextCodec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB = 260
NAN_TOKEN = 250  # makes the toy's logits NaN
FAIL_TOKEN = 251  # makes a step fail
EOS = 257


class ToySession:
    """A deterministic model of the whole history; checks every step against its limits."""

    def __init__(self, **limits: int) -> None:
        sizes = {"max_num_tokens": 16, "max_batch_size": 4, "max_seq_len": 40, "num_blocks": 40}
        self.limits = SessionLimits(vocab_size=VOCAB, block_size=4, **{**sizes, **limits})
        self.pool = np.full(self.limits.num_blocks * 4, -1, np.int64)
        self.blocks = BlockBytes([self.pool.view(np.uint8)], self.limits.num_blocks)
        self.steps: list[StepInputs] = []
        self.greedy_steps = 0  # those that gave no logits
        self.closed = False
        self.pause = 0.0  # seconds in which other threads run, as they do while kernels compute

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        self._check(inputs)
        time.sleep(self.pause)
        self.steps.append(inputs)
        if FAIL_TOKEN in inputs.tokens:
            raise SpikeError("SPK616", "engine", "toy failure.", "None.")
        self.pool[inputs.slots] = inputs.tokens
        rows = [self._logits(inputs, int(row)) for row in inputs.logit_rows]
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def best(self, inputs: StepInputs) -> BestLogits:
        self.greedy_steps += 1
        return best_of(self.step(inputs))

    def close(self) -> None:
        self.closed = True

    def _logits(self, inputs: StepInputs, row: int) -> NDArray[np.float32]:
        b = int(np.searchsorted(inputs.seq_starts, row, side="right")) - 1
        last = int(inputs.kv_lens[b] - (inputs.seq_starts[b + 1] - row)) + 1
        index = np.arange(last)
        history = self.pool[inputs.block_tables[b, index // 4] * 4 + index % 4]
        assert inputs.positions[row] == last - 1
        assert history.min() >= 0
        if NAN_TOKEN in history:
            return np.full(VOCAB, np.nan, np.float32)
        seed = hash(tuple(history.tolist())) % 2**32
        logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
        logits[248:] = -9  # the special ones only when asked for
        return logits

    def _check(self, inputs: StepInputs) -> None:
        arrays = list(inputs.arrays().values())
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays)
        assert 1 <= inputs.tokens.size <= self.limits.max_num_tokens
        assert 1 <= inputs.kv_lens.size <= self.limits.max_batch_size
        assert inputs.kv_lens.max() <= self.limits.max_seq_len
        assert inputs.tokens.shape == inputs.positions.shape == inputs.slots.shape
        assert len(set(inputs.slots.tolist())) == inputs.slots.size
        assert inputs.slots.max() < self.pool.size


def codec() -> TextCodec:
    """One token per byte (ids 0-255), then a BOS put before plain texts, and an EOS."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return TextCodec(tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


def open_toy(
    max_num_tokens: int | None = None,
    with_text: bool = True,
    scheduling: SchedulingPolicy | None = None,
    **limits: int,
) -> tuple[SpikeEngine, ToySession]:
    session, text = ToySession(**limits), codec() if with_text else None
    template = ChatTemplate(TEMPLATE, {}) if with_text else None
    loaded = LoadedEngine(session, text, template, text.eos_ids if text else frozenset((EOS,)))
    return SpikeEngine.from_loaded(loaded, max_num_tokens, scheduling), session


def reference(prompt: list[int], count: int) -> list[int]:
    """The toy's greedy tokens, by itself, one whole history at a time."""
    session, tokens = ToySession(max_num_tokens=64, max_seq_len=64), list(prompt)
    for _ in range(count):
        n = len(tokens)
        index = np.arange(n, dtype=np.int32)
        whole = StepInputs.of(
            tokens=np.array(tokens, np.int32),
            positions=index,
            slots=index,
            seq_starts=np.array([0, n], np.int32),
            kv_lens=np.array([n], np.int32),
            block_tables=np.arange(16, dtype=np.int32)[None],
            logit_rows=np.array([n - 1], np.int32),
        )
        tokens.append(int(session.step(whole)[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 33])
def test_chunks_do_not_change_tokens(chunk: int, length: int) -> None:
    prompt = [(7 * i) % 200 for i in range(length)]
    engine, _ = open_toy(max_num_tokens=chunk)
    done = engine.complete(prompt, max_tokens=6)
    assert done.token_ids == reference(prompt, 6)
    assert (done.finish_reason, done.prompt_tokens) == ("length", length)


@pytest.mark.parametrize("chunk", [2, 5, 16])
@pytest.mark.parametrize("blocks", [10, 40])
def test_a_batch_gives_each_what_it_gets_alone(chunk: int, blocks: int) -> None:
    """Nine ragged prompts through four places; with 10 blocks they also wait for the cache."""
    engine, session = open_toy(max_num_tokens=chunk, num_blocks=blocks)
    prompts = [[i + 1] * n for i, n in enumerate([1, 30, 2, 17, 4, 9, 33, 1, 12])]
    done = engine.generate_batch(prompts, max_tokens=7)
    assert [c.token_ids for c in done] == [reference(p, 7) for p in prompts]
    assert any(step.kv_lens.size > 1 for step in session.steps)
    assert engine._loop.pool.owned == 0
    assert engine._loop.pool.available == blocks


def test_a_seed_gives_one_text_alone_and_in_a_batch() -> None:
    engine, _ = open_toy()
    options = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "seed": 3}
    alone = engine.complete([5, 6], **options).token_ids
    batch = engine.generate_batch([[1], [5, 6], [2, 3, 4], [5, 6]], **options)
    assert batch[1].token_ids == batch[3].token_ids == alone
    assert engine.complete([5, 6], **{**options, "seed": 4}).token_ids != alone


def test_capacity_is_a_clear_error_and_never_an_overrun() -> None:
    engine, _ = open_toy()
    with pytest.raises(SpikeError, match=r"40 tokens, too many.*capacity is 40 tokens") as caught:
        engine.complete([1] * 40)
    assert caught.value.code == "SPK606"
    last = engine.complete([1] * 39, max_tokens=None)
    assert (len(last.token_ids), last.finish_reason) == (1, "length")
    assert last.token_ids == reference([1] * 39, 1)
    full = engine.complete([1, 2], max_tokens=None)
    assert (len(full.token_ids), full.finish_reason) == (38, "length")
    assert full.token_ids == reference([1, 2], 38)


def test_score_gives_every_position_up_to_the_capacity() -> None:
    tokens = [(3 * i) % 200 for i in range(40)]
    engine, session = open_toy()
    logits = engine.score(tokens)
    assert (logits.shape, logits.dtype) == ((40, VOCAB), np.float32)
    assert logits[34:39].argmax(1).tolist() == [reference(tokens[:n], 1)[0] for n in range(35, 40)]
    np.testing.assert_array_equal(engine.score(tokens, chunk_tokens=1), logits)
    assert session.steps[-1].tokens.size == 1
    with pytest.raises(SpikeError, match="SPK606"):
        engine.score([1] * 41)
    assert engine._loop.pool.owned == 0


def test_scoring_waits_for_room() -> None:
    engine, _ = open_toy(num_blocks=10)
    stream = engine.stream([1, 2], max_tokens=None)
    assert next(stream)
    logits = engine.score(list(range(1, 31)))
    assert logits[-1].argmax() == reference(list(range(1, 31)), 1)[0]
    list(stream)
    assert stream.completion.token_ids == reference([1, 2], 38)


@pytest.mark.parametrize("prompt", [[], "", [VOCAB], [-1], [1.5], [{"role": "user"}]])
def test_prompts_that_are_none(prompt: object) -> None:
    engine, _ = open_toy()
    if prompt == "":  # has a BOS: a prompt after all
        assert engine.complete("", max_tokens=1).prompt_tokens == 1
        return
    with pytest.raises(SpikeError) as caught:
        engine.stream(prompt)
    assert caught.value.code == ("SPK605" if prompt == [] else "SPK607")


def test_a_text_has_a_bos_and_a_chat_does_not() -> None:
    engine, session = open_toy()
    engine.complete("hi", max_tokens=1)
    assert session.steps[-1].tokens.tolist() == engine.encode("hi")
    assert engine.decode(session.steps[-1].tokens, skip_special_tokens=False) == "<s>hi"
    engine.complete("hi", max_tokens=1, chat=True)
    assert engine.decode(session.steps[-1].tokens, skip_special_tokens=False) == "u:hi;a:"
    engine.complete([{"role": "system", "content": "x"}], max_tokens=1, chat=True)
    assert engine.decode(session.steps[-1].tokens, skip_special_tokens=False) == "s:x;a:"


def test_stop_tokens_and_end_of_sequence() -> None:
    engine, _ = open_toy()
    expected = reference([1], 9)
    stopped = engine.complete([1], stop_token_ids=[expected[3]])
    assert (stopped.token_ids, stopped.finish_reason) == (expected[:4], "stop")
    assert stopped.text == engine.decode(expected[:3])
    loaded = LoadedEngine(ToySession(), codec(), None, frozenset((expected[2],)))
    engine = SpikeEngine.from_loaded(loaded)
    assert engine.complete([1]).token_ids == expected[:3]
    assert engine.complete([1], ignore_eos=True, max_tokens=9).token_ids == expected


def test_a_stop_string_ends_the_text_before_it() -> None:
    engine, _ = open_toy()
    text = engine.complete([1], max_tokens=12).text
    stop = text[4:7]
    pieces = list(stream := engine.stream([1], max_tokens=12, stop=["never", stop]))
    assert "".join(pieces) == stream.completion.text == text[: text.index(stop)]
    assert stream.completion.finish_reason == "stop"


def test_nan_logits_end_one_request() -> None:
    engine, _ = open_toy()
    good, bad = engine.generate_batch([[1, 2], [NAN_TOKEN]], max_tokens=5)
    assert good.token_ids == reference([1, 2], 5)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error is not None
    assert bad.error.code == "SPK609"
    with pytest.raises(SpikeError, match="SPK609"):
        engine.generate([NAN_TOKEN])


def test_logits_come_to_python_only_if_somebody_needs_them() -> None:
    engine, session = open_toy()
    assert engine.complete([1, 2], max_tokens=5).token_ids == reference([1, 2], 5)
    assert session.greedy_steps == len(session.steps) == 5
    engine.complete([1, 2], max_tokens=5, temperature=0.5, seed=1)
    engine.complete([1, 2], max_tokens=5, presence_penalty=0.5)
    assert (session.greedy_steps, len(session.steps)) == (5, 15)


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"presence_penalty": 0.0}])
def test_nan_logits_end_one_request_of_either_kind(options: dict[str, float]) -> None:
    engine, _ = open_toy()
    streams = [
        engine.stream([NAN_TOKEN], max_tokens=3),
        engine.stream([1, 2], max_tokens=3, **options),
    ]
    for stream in streams:
        stream.submit_locked()
    streams[1].run()
    assert streams[0].completion.finish_reason == "error"
    assert len(streams[1].completion.token_ids) == 3


def test_a_failed_step_ends_its_requests_and_the_engine_lives() -> None:
    engine, _ = open_toy()
    with pytest.raises(SpikeError, match="SPK616"):
        engine.generate([1, FAIL_TOKEN])
    assert engine._loop.pool.owned == 0
    assert engine.complete([1, 2], max_tokens=5).token_ids == reference([1, 2], 5)


def test_closing_a_stream_frees_its_blocks_and_changes_nobody() -> None:
    engine, _ = open_toy()
    with engine.stream([1] * 9, max_tokens=20) as left, engine.stream([3], max_tokens=9) as kept:
        next(left), next(kept)
        owned = engine._loop.pool.owned
        left.close()
        assert engine._loop.pool.owned < owned
        assert left.completion.finish_reason == "cancelled"
        rest = list(kept)
    assert rest
    assert kept.completion.token_ids == reference([3], 9)
    assert engine._loop.pool.owned == 0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "read", "read", "read", "close", "score"]), st.integers(0, 99)
    ),
    max_size=40,
)


@given(actions=ACTIONS, chunk=st.integers(1, 16), blocks=st.integers(10, 30))
@settings(max_examples=60, deadline=None)
def test_any_order_of_opening_reading_and_closing(
    actions: list[tuple[str, int]], chunk: int, blocks: int
) -> None:
    """Every stream read to its end has the tokens it has alone; no block is lost."""
    engine, _ = open_toy(max_num_tokens=chunk, num_blocks=blocks)
    streams: list[tuple[list[int], TokenStream]] = []
    for action, number in actions:
        if action == "open":
            prompt = [number + i for i in range(1 + number % 30)]
            streams.append((prompt, engine.stream(prompt, max_tokens=1 + number % 9)))
        elif action == "score":
            assert engine.score([number, 1])[1].argmax() == reference([number, 1], 1)[0]
        elif streams:
            prompt, stream = streams[number % len(streams)]
            next(stream, None) if action == "read" else stream.close()
    for prompt, stream in streams:
        list(stream)
        done = stream.completion
        expected = reference(prompt, len(done.token_ids))
        assert done.token_ids == expected
        assert done.finish_reason in ("length", "cancelled")
    assert engine._loop.pool.owned == 0
    assert engine._loop.pool.available == blocks


def test_a_dropped_stream_is_swept_before_the_next_step() -> None:
    engine, _ = open_toy()
    stream = engine.stream([1], max_tokens=20)
    next(stream)
    del stream
    engine.complete([2], max_tokens=1)
    assert engine._loop.pool.owned == 0


def test_threads_share_steps() -> None:
    engine, session = open_toy(max_batch_size=8, num_blocks=80)
    session.pause = 0.001
    prompts = [[i + 1] * (i + 1) for i in range(6)]
    results: dict[int, list[int]] = {}
    ready = threading.Barrier(6)

    def work(i: int) -> None:
        ready.wait()
        results[i] = engine.complete(prompts[i], max_tokens=12).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [results[i] for i in range(6)] == [reference(p, 12) for p in prompts]
    assert max(step.kv_lens.size for step in session.steps) > 1


def test_async_twins() -> None:
    engine, _ = open_toy(num_blocks=80)

    async def cancelled() -> None:
        async for _ in engine.astream([9], max_tokens=30):
            await asyncio.sleep(0)
            raise asyncio.CancelledError

    async def run() -> list[str]:
        texts = [engine.agenerate([i], max_tokens=9) for i in range(3)]
        *found, _ = await asyncio.gather(*texts, cancelled(), return_exceptions=True)
        return found

    found = asyncio.run(run())
    assert found == [engine.decode(reference([i], 9)) for i in range(3)]
    engine.complete([1], max_tokens=1)
    assert engine._loop.pool.owned == 0


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    engine, _ = open_toy(with_text=False)
    assert engine.complete([1], max_tokens=3).token_ids == reference([1], 3)
    for call in (
        lambda: engine.stream("text"),
        lambda: engine.generate([1]),
        lambda: engine.stream([1], stop="x"),
        lambda: engine.stream("x", chat=True),
    ):
        with pytest.raises(SpikeError, match="built without tokenizer files"):
            call()


def test_a_base_model_has_no_chat() -> None:
    engine = SpikeEngine.from_loaded(LoadedEngine(ToySession(), codec()))
    with pytest.raises(SpikeError, match="no chat template"):
        engine.stream("hi", chat=True)


def test_too_little_cache_for_a_request_is_said_at_once() -> None:
    engine, _ = open_toy(num_blocks=3)
    assert engine.complete([1], max_tokens=12).token_ids == reference([1], 12)
    with pytest.raises(SpikeError, match="SPK615"):
        engine.stream([1], max_tokens=13)


def test_timings_and_close() -> None:
    engine, session = open_toy()
    done = engine.complete([1] * 20, max_tokens=4)
    assert min(done.timings.queue, done.timings.prefill, done.timings.decode) > 0
    open_stream, unread = (engine.stream([1], max_tokens=20) for _ in range(2))
    next(open_stream)
    engine.close()
    assert session.closed
    assert open_stream.completion.finish_reason == "cancelled"
    for call in (lambda: engine.complete([1]), lambda: next(unread), lambda: engine.score([1])):
        with pytest.raises(SpikeError, match="SPK617"):
            call()


def test_many_long_requests_in_a_small_pool() -> None:
    """64 requests of 38 tokens in room for one of them and a half: all end, with their tokens."""
    engine, _ = open_toy(num_blocks=15, max_batch_size=8)
    prompts = [[i % 32, i // 32 + 1] for i in range(64)]
    done = engine.generate_batch(prompts, max_tokens=36)
    assert [c.token_ids for c in done] == [reference(p, 36) for p in prompts]
    stats = engine.stats()
    assert stats.preemptions == sum(c.preemptions for c in done) > 0
    assert (stats.waiting, stats.running, stats.blocks_owned) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == 15


def test_a_prefix_is_computed_once_and_kept_from_other_salts() -> None:
    engine, session = open_toy(max_num_tokens=40)
    prompt = list(range(30))
    first = engine.complete([*prompt, 1], max_tokens=6)
    again = engine.complete([*prompt, 2], max_tokens=6)
    other = engine.complete([*prompt, 2], max_tokens=6, cache_salt="another tenant")
    assert [c.cached_tokens for c in (first, again, other)] == [0, 28, 0]
    assert first.token_ids == reference([*prompt, 1], 6)
    assert again.token_ids == other.token_ids == reference([*prompt, 2], 6)
    follow_up = [*prompt, 2, *again.token_ids]  # the answer's blocks are known as well
    assert engine.complete(follow_up, max_tokens=1).cached_tokens == 36
    assert engine.stats().cached_prompt_tokens == 28 + 36
    assert engine.stats().hit_rate == (28 + 36) / (3 * 31 + 37)
    assert sum(step.tokens.size for step in session.steps) == engine.stats().tokens


def test_a_session_that_does_not_share_computes_everything() -> None:
    engine, session = open_toy()
    session.blocks = None  # type: ignore[assignment]
    engine = SpikeEngine.from_loaded(engine._loaded)
    off = open_toy(scheduling=SchedulingPolicy(prefix_cache=False))[0]
    for one in (engine, engine, off, off):
        done = one.complete([1] * 30, max_tokens=4)
        assert (done.token_ids, done.cached_tokens) == (reference([1] * 30, 4), 0)
        assert one.stats().blocks_cached == 0


def test_serving_copies_no_block() -> None:
    engine, session = open_toy(num_blocks=12)
    session.blocks.copy = lambda copies: pytest.fail(f"{copies} were copied")  # type: ignore
    engine.generate_batch([[i] * 5 for i in range(4)] + [[0] * 5], max_tokens=30)
    assert engine.stats().preemptions > 0


def test_the_life_of_a_request_in_numbers() -> None:
    engine, _ = open_toy()
    with engine.stream([1] * 20, max_tokens=8) as stream:
        next(stream)
        now = engine.stats()
        assert (now.waiting, now.running, now.requests) == (0, 1, 1)
        assert (now.steps, now.tokens) == (1 + len(stream.completion.token_ids), now.steps + 18)
        assert now.blocks_owned == 6
        assert stream.completion.finish_reason == "cancelled"  # so far
    assert engine.stats().running == engine.stats().blocks_owned == 0
    done = engine.complete([2] * 20, max_tokens=8)
    moments = done.timings.tokens
    assert len(moments) == 8
    assert list(moments) == sorted(moments)
    assert moments[0] == pytest.approx(done.timings.queue + done.timings.prefill)
    assert moments[-1] == pytest.approx(sum((moments[0], done.timings.decode)), abs=0.01)


@pytest.mark.parametrize(
    "option", [{"priority": "urgent"}, {"cache_salt": 7}, {"cache_salt": "\ud800"}]
)
def test_bad_options_of_service(option: dict[str, object]) -> None:
    engine, _ = open_toy()
    with pytest.raises(SpikeError, match=next(iter(option))) as caught:
        engine.stream([1], **option)
    assert caught.value.code == "SPK608"


def test_a_realtime_request_goes_before_batch_ones() -> None:
    engine, _ = open_toy(max_batch_size=1)
    slow = [engine.stream([i], max_tokens=20, priority="batch") for i in range(2)]
    for stream in slow:
        stream.submit_locked()
    engine._loop.step()
    fast = engine.complete([9], max_tokens=5, priority="realtime")
    assert fast.token_ids == reference([9], 5)
    assert engine.stats().preemptions == 1
    assert [len(stream.completion.token_ids) for stream in slow] == [1, 0]
    for number, stream in enumerate(slow):
        stream.run()
        assert stream.completion.token_ids == reference([number], 20)


def test_an_idle_engine_waits_for_company_no_longer_than_its_window() -> None:
    engine, session = open_toy()
    window = WindowPolicy(objective=10.0, least=0.2, most=0.2)
    engine = SpikeEngine.from_loaded(engine._loaded, scheduling=SchedulingPolicy(window=window))
    alone = engine.complete([1], max_tokens=1)
    assert alone.timings.queue >= 0.2
    barrier, results = threading.Barrier(2), []

    def ask(token: int) -> None:
        barrier.wait()
        results.append(engine.complete([token], max_tokens=1))

    threads = [threading.Thread(target=ask, args=(token,)) for token in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert session.steps[-1].kv_lens.size == 2
    assert engine.stats().steps == 2


def open_tiered(directory: Path, token_seconds: float, size: int = 1 << 20) -> SpikeEngine:
    """A toy with room for little more than a sequence, and steps said to cost so much a token."""
    loaded = open_toy(num_blocks=12)[0]._loaded
    engine = SpikeEngine.from_loaded(loaded, kv_tier=TierOptions(directory, size))
    model = engine._loop.scheduler.costs = CostModel(StepCost(0.0, token_seconds, 0.0, 0.0, 0.0))
    model.observe = lambda shape, seconds: None  # type: ignore[method-assign]
    return engine


def test_evicted_prefixes_come_back_from_a_file(tmp_path: Path) -> None:
    engine = open_tiered(tmp_path, token_seconds=1.0)
    first, second = [1] * 32, [2] * 32
    for number, prompt in enumerate((first, second, first, second)):
        done = engine.complete([*prompt, number], max_tokens=4)
        assert done.token_ids == reference([*prompt, number], 4)
        assert done.cached_tokens == (32 if number > 1 else 0)
    stats = engine.stats()
    assert stats.tier_restored >= 2
    assert stats.tier_blocks > 0
    assert not list(tmp_path.iterdir())  # the file has no name
    engine.close()


def test_what_pre_emption_takes_comes_back_from_the_file(tmp_path: Path) -> None:
    """Swapping: eight that don't fit together; their full blocks are read, not computed again."""
    prompts = [[i] * 12 for i in range(1, 9)]
    computed = {}
    for seconds in (1.0, 1e-12):  # a token: dearer than reading it, and cheaper
        engine = open_tiered(tmp_path, seconds)
        done = engine.generate_batch(prompts, max_tokens=20)
        assert [c.token_ids for c in done] == [reference(p, 20) for p in prompts]
        stats = engine.stats()
        assert stats.preemptions > 4
        assert (stats.tier_restored > 0) == (seconds == 1.0)
        computed[seconds] = stats.tokens
        engine.close()
    needed = sum(len(p) + 20 - 1 for p in prompts)
    assert needed <= computed[1.0] < computed[1e-12] - 20


def test_a_flipped_bit_is_computed_again(tmp_path: Path) -> None:
    engine = open_tiered(tmp_path, token_seconds=1.0)
    first, second = [1] * 32, [2] * 32
    for prompt in (first, second):
        engine.complete([*prompt, 9], max_tokens=4)
    tier = engine._loop._tier
    assert tier is not None
    key = next(key for key in engine._loop.pool.table().coming_keys([*first, 8]) if key in tier)
    file, place = tier._file.fileno(), tier._slots[key][0] * 32
    os.pwrite(file, bytes([os.pread(file, 1, place)[0] ^ 1]), place)
    for prompt in (first, second, first):
        done = engine.complete([*prompt, 8], max_tokens=4)
        assert done.token_ids == reference([*prompt, 8], 4)
    assert engine.stats().tier_damaged == 1


def test_a_file_slower_than_computing_is_not_read(tmp_path: Path) -> None:
    engine = open_tiered(tmp_path, token_seconds=1e-12)
    for number in range(4):
        prompt = [1 + number % 2] * 32 + [number]
        assert engine.complete(prompt, max_tokens=4).token_ids == reference(prompt, 4)
    assert engine.stats().tier_blocks > 0
    assert engine.stats().tier_restored == 0


def test_a_small_file_keeps_what_was_evicted_last(tmp_path: Path) -> None:
    engine = open_tiered(tmp_path, token_seconds=1.0, size=3 * 32 + 5)
    for number in range(7):
        prompt = [1 + number % 3] * 32 + [number]
        assert engine.complete(prompt, max_tokens=4).token_ids == reference(prompt, 4)
    assert engine.stats().tier_blocks == 3
    engine.clear_prefix_cache()
    assert engine.stats().tier_blocks == engine.stats().blocks_cached == 0
    assert engine.complete([1] * 32, max_tokens=1).cached_tokens == 0


def test_a_tier_that_can_not_be(tmp_path: Path) -> None:
    for directory, size in ((tmp_path / "missing", 1 << 20), (tmp_path, 31)):
        with pytest.raises(SpikeError, match="SPK618"):
            open_tiered(directory, 1.0, size)


def test_a_tier_where_no_block_is_kept(tmp_path: Path) -> None:
    """Functional engines, and engines without a prefix cache: said, not passed over."""
    tier = TierOptions(tmp_path, 1 << 20)
    loaded = open_toy()[0]._loaded
    off = SchedulingPolicy(prefix_cache=False)
    with pytest.raises(SpikeError, match="SPK618"):
        SpikeEngine.from_loaded(loaded, scheduling=off, kv_tier=tier)
    loaded.session.blocks = None  # type: ignore[misc]
    with pytest.raises(SpikeError, match="SPK618"):
        SpikeEngine.from_loaded(loaded, kv_tier=tier)


def test_policies_of_another_kind() -> None:
    loaded = open_toy()[0]._loaded
    with pytest.raises(SpikeError, match=r"SPK608.*scheduling"):
        SpikeEngine.from_loaded(loaded, scheduling="fast")  # type: ignore[arg-type]
    with pytest.raises(SpikeError, match=r"SPK608.*kv_tier"):
        SpikeEngine.from_loaded(loaded, kv_tier="/tmp")  # type: ignore[arg-type]
