"""One request on its way: its tokens, its text, its place in the cache, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import SpikeError
from .blocks import BlockTable
from .detokenizer import StreamingDetokenizer
from .grammar import GrammarState
from .logprobs import TokenLogprob
from .prompt_lookup import PromptLookup, Speculation
from .qos import Qos
from .sampling import Choice, Sampler
from .sampling_params import SamplingParams
from .stop import StopMatcher

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Timings:
    """Where a request's time went, in seconds.

    Attributes:
        queue: from submission to the first step it took part in.
        prefill: from there to its first token.
        decode: from its first token to its last.
        tokens: of each generated token, from submission to when it was chosen; 0 for those at the
            beginning that a grammar forced before anything ran. The spans count from the first one
            that the model chose.
    """

    queue: float
    prefill: float
    decode: float
    tokens: tuple[float, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What a request gave.

    Attributes:
        text: the generated text, without stop string or special tokens; empty without a tokenizer.
        token_ids: every generated id, the one that ended it included.
        finish_reason: ``stop`` (end of sequence, stop token or stop string), ``length``
            (`max_tokens` or the engine's capacity), ``cancelled``, ``error``.
        prompt_tokens: length of the prompt.
        timings: where the time went.
        error: why, when the reason is ``error``.
        cached_tokens: of the prompt, those found in the prefix cache.
        preemptions: how often it lost its place in the cache and was computed again.
        logprobs: of each of `token_ids`; None unless asked for.
        prompt_logprobs: of each token of the prompt, None for the first, before which there is
            nothing; None unless asked for.
        speculation: what drafts did; None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings
    error: SpikeError | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Piece:
    """A part of the answer as it was streamed.

    Attributes:
        text: may be empty: a token that ends the text, or an engine without a tokenizer.
        token_ids: what came since the piece before; of some the text may still be held back.
        logprobs: of `token_ids`; empty unless asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]


class Clock:
    """Moments of a request, seconds of the loop's clock; None = not yet."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self.submitted = self.now()
        self.started: float | None = None
        self.finished: float | None = None
        self.tokens: list[float] = []
        self._forced = 0  # tokens that were there before the request was submitted

    @property
    def first(self) -> float | None:
        """When the first token came that the model chose."""
        return self.tokens[self._forced] if len(self.tokens) > self._forced else None

    def submit(self, now: Callable[[], float], moment: float) -> None:
        """The request has entered the queue; from here on this is its clock."""
        self.now, self.submitted = now, moment
        self._forced = len(self.tokens)
        self.tokens = [moment] * self._forced

    def start(self, now: float) -> None:
        """It takes part for the first time; later times change nothing."""
        self.started = now if self.started is None else self.started

    def timings(self) -> Timings:
        """The spans between the moments; a span that never began is 0."""
        end = self.now() if self.finished is None else self.finished
        started = end if self.started is None else self.started
        first = end if self.first is None else self.first
        since = tuple(moment - self.submitted for moment in self.tokens)
        return Timings(started - self.submitted, max(0.0, first - started), end - first, since)


class Request:
    """A sequence being generated.

    Args:
        prompt: token ids, at least one.
        params: how to choose tokens and when to end.
        limit: most tokens of prompt and output together.
        eos_ids: ids that end the text unless `params.ignore_eos`.
        detokenizer: None when the engine has no tokenizer: then there is no text.
        qos: its class of service.
        cache_salt: prefixes are shared with requests of the same salt only.
        grammar: what the text may be, at its beginning; what it forces there has already come when
            the request is made.
        lookup: where drafts come from; None = there are none.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        limit: int,
        eos_ids: Collection[int],
        detokenizer: StreamingDetokenizer | None,
        qos: Qos = "interactive",
        cache_salt: str = "",
        grammar: GrammarState | None = None,
        lookup: PromptLookup | None = None,
    ) -> None:
        self.params = params
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        wanted = limit if params.max_tokens is None else self.prompt_tokens + params.max_tokens
        self.limit = min(limit, wanted)
        self.computed = 0  # tokens whose K and V are in the cache
        self.table: BlockTable | None = None  # while it runs
        self.qos: Qos = qos
        self.cache_salt = cache_salt
        self.scores_prompt = params.prompt_logprobs is not None  # every token's logits are wanted
        self.rank = (0.0, 0)  # the scheduler's
        self.ordered = False  # whether its expected length has been asked for, or it has run
        self.delayed = False  # whether it ranks behind its submission by its expected length
        self._known = 0  # tokens it had when it was let in
        self.cached_tokens = 0
        self.preemptions = 0
        self.counted = False  # in the engine's numbers, once it has a token
        self.lookup = lookup
        self.sampler = Sampler(params, self.tokens, grammar)
        self.clock = Clock()
        self.finish_reason: FinishReason | None = None
        self.abandoned = False  # nobody reads it any more; set without the lock
        self.error: SpikeError | None = None
        self.pieces: deque[Piece] = deque()  # not fetched yet
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self._shown = self.prompt_tokens  # tokens that are in pieces
        self._text: list[str] = []
        self._stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop_strings)
        # Forced tokens have no log probability: where those are wanted, the model is asked.
        self._forces = params.logprobs is None and params.prompt_logprobs is None
        self._take_forced()

    @property
    def pending(self) -> int:
        """Tokens that are known but not in the cache: the rest of the prompt, or one."""
        return len(self.tokens) - self.computed

    @property
    def catching_up(self) -> bool:
        """Whether tokens it came with are still to be computed: a prompt, or all before a
        pre-emption. Its table has room for them."""
        return self.computed < self._known

    @property
    def cache_tokens(self) -> int:
        """Most tokens it can have in the cache: the last one generated never gets there."""
        return self.limit - 1

    @property
    def next_prompt_logprob(self) -> int:
        """Index of the first token of the prompt whose log probability is wanted and missing; with
        none, one behind all known tokens."""
        known = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is None or known == self.prompt_tokens:
            return len(self.tokens)
        return known

    @property
    def reuses_prefix(self) -> bool:
        """Whether tokens that others have computed need not be computed again."""
        return not self.scores_prompt

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def enter_cache(self, table: BlockTable, now: float) -> None:
        """It runs from now on, with these blocks: room for all its tokens, some computed."""
        self.table, self.computed = table, table.committed
        self._known = len(self.tokens)
        if self.clock.started is None:
            self.cached_tokens = min(self.computed, self.prompt_tokens)
        self.clock.start(now)
        self.ordered = True

    def give_up_cache(self) -> None:
        """It runs no more: its blocks go back, its tokens have to be computed again."""
        assert self.table is not None
        self.table.release()
        self.table, self.computed = None, 0
        self.preemptions += 1

    def skip_known(self) -> None:
        """Pass over prompt tokens that somebody else has computed since it was let in."""
        if self.table is not None and self.reuses_prefix and self.computed == self.table.committed:
            known = self.table.adopt(self.tokens)
            if not self.preemptions:
                found = min(known, self.prompt_tokens) - min(self.computed, self.prompt_tokens)
                self.cached_tokens += found
            self.computed = known

    def advance(self, count: int) -> None:
        """The next `count` tokens are in the cache for good."""
        self.computed += count
        if self.table is not None:
            self.table.commit(self.tokens, self.computed)

    def accept(self, choice: Choice) -> None:
        """Take a generated token, and what the grammar forces after it; may finish the request."""
        self._take(choice)
        self._take_forced()

    def _take_forced(self) -> None:
        """Take the tokens that the grammar leaves no choice about: no step is needed for them."""
        grammar = self.sampler.grammar
        if grammar is None or self.finished:
            return
        for token in grammar.forced() if self._forces else ():
            try:
                self.sampler.count(token)
            except SpikeError as error:
                self.finish("error", error)
            else:
                self._take(Choice(token))
            if self.finished:
                return
        if grammar.ended:
            self.finish("stop")

    def _take(self, choice: Choice) -> None:
        token = choice.token
        self.clock.tokens.append(self.clock.now())
        self.tokens.append(token)
        if choice.logprob is not None:
            self.logprobs.append(choice.logprob)
        if token in self._stop_ids:
            self.finish("stop")
            return
        if self._detokenizer is not None:
            self._show(self._matcher.push(self._detokenizer.push(token)))
        else:
            self._add_piece("")
        if self._matcher.stopped:
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")

    def finish(self, reason: FinishReason, error: SpikeError | None = None) -> None:
        """End it, show the text still held back, free its blocks; ending twice changes nothing."""
        if self.finished:
            return
        if self._detokenizer is not None and not self._matcher.stopped:
            self._show(self._matcher.push(self._detokenizer.finish()))
            self._show(self._matcher.finish())
            reason = "stop" if self._matcher.stopped and reason == "length" else reason
        if self._shown < len(self.tokens):
            self._add_piece("")
        if self.table is not None:
            self.table.release()
            self.table = None
        self.error = error
        self.clock.finished = self.clock.now()
        self.finish_reason = reason  # last: readers in other threads look at it without the lock

    def completion(self) -> Completion:
        """What has come so far; final once `finished`."""
        return Completion(
            text="".join(self._text),
            token_ids=self.tokens[self.prompt_tokens :],
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=self.prompt_tokens,
            timings=self.clock.timings(),
            error=self.error,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            prompt_logprobs=self._known_prompt_logprobs(),
            speculation=None if self.lookup is None else self.lookup.result,
        )

    def _known_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        return None if self.params.prompt_logprobs is None else list(self.prompt_logprobs)

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._add_piece(text)

    def _add_piece(self, text: str) -> None:
        fresh = slice(self._shown, None)
        logprobs = self.logprobs[self._shown - self.prompt_tokens :]
        self.pieces.append(Piece(text, self.tokens[fresh], logprobs))
        self._shown = len(self.tokens)
