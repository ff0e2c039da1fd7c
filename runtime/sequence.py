"""One request on its way: its tokens, its text, its place in the cache, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import SpikeError
from .blocks import BlockTable
from .detokenizer import StreamingDetokenizer
from .grammar import GrammarState
from .logprobs import TokenLogprob
from .prompt_lookup import PromptLookup, Speculation
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
    """

    queue: float
    prefill: float
    decode: float


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


@dataclass
class Clock:
    """Moments of a request, `time.perf_counter` seconds; 0 = not yet."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def timings(self) -> Timings:
        """The spans between the moments; a span that never began is 0."""
        end = self.finished or time.perf_counter()
        started, first = self.started or end, self.first_token or end
        return Timings(started - self.submitted, first - started, end - first)


class Request:
    """A sequence being generated.

    Args:
        prompt: token ids, at least one.
        params: how to choose tokens and when to end.
        limit: most tokens of prompt and output together.
        eos_ids: ids that end the text unless `params.ignore_eos`.
        detokenizer: None when the engine has no tokenizer: then there is no text.
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
        grammar: GrammarState | None = None,
        lookup: PromptLookup | None = None,
    ) -> None:
        self.params = params
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        wanted = limit if params.max_tokens is None else self.prompt_tokens + params.max_tokens
        self.limit = min(limit, wanted)
        self.computed = 0  # tokens whose K and V are in the cache
        self.table: BlockTable | None = None  # given on admission
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
    def cache_tokens(self) -> int:
        """Most tokens it can have in the cache: the last one generated never gets there."""
        return self.limit - 1

    @property
    def next_prompt_logprob(self) -> int:
        """Index of the first token of the prompt whose log probability is wanted and missing."""
        if self.params.prompt_logprobs is None:
            return len(self.tokens)
        known = len(self.prompt_logprobs)
        return known if known < self.prompt_tokens else len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def accept(self, choice: Choice) -> None:
        """Take a generated token, and what the grammar forces after it; may finish the request."""
        self.clock.first_token = self.clock.first_token or time.perf_counter()
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
        self.finish_reason, self.error = reason, error
        self.clock.finished = time.perf_counter()

    def completion(self) -> Completion:
        """What has come so far; final once `finished`."""
        return Completion(
            text="".join(self._text),
            token_ids=self.tokens[self.prompt_tokens :],
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=self.prompt_tokens,
            timings=self.clock.timings(),
            error=self.error,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            prompt_logprobs=self._known_prompt_logprobs(),
            speculation=self.lookup.result if self.lookup else None,
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
