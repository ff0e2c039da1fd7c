"""Structured output: which tokens a JSON schema, a regular expression or a grammar allows next.

The work is llguidance's (MIT; a wheel of 3 MB that needs nothing else), an optional package: pip
install 'spikeinfer[structured]'. A request without these options never imports it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ExitCode, SpikeError
from .sampling_params import SamplingParams
from .text_codec import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 32
# Without blanks between JSON's tokens: much of the text is forced then, and none of it is endless.
# A schema may say otherwise under "x-guidance".
JSON_DEFAULTS = {"whitespace_flexible": False}


class GrammarState:
    """Where one request is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, bool ``[V]``.

        Raises:
            SpikeError: SPK625, the grammar became too complex to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        unpacked = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return unpacked.view(np.bool_)

    def take(self, token: int) -> None:
        """A token that was allowed has come. Raises SpikeError SPK625 as `allowed`."""
        self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write their text; often none."""
        return [] if self.ended else self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _bad_grammar(self._matcher.get_error())


class Grammars:
    """Compiles the grammars of one engine's requests; thread-safe.

    Args:
        codec: the engine's tokenizer.
        vocab_size: width of its logits.
        eos_ids: what ends a text.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, params: SamplingParams) -> GrammarState | None:
        """The beginning of the request's grammar; None when it has none.

        Raises:
            SpikeError: SPK625, it is no grammar; SPK626, the package is missing.
        """
        if not params.structured:
            return None
        with self._lock:
            matcher = self._matcher(_source(params)).deep_copy()
        return GrammarState(matcher, self._vocab_size)

    def _matcher(self, source: str) -> LLMatcher:
        if source not in self._compiled:
            matcher = _library().LLMatcher(self._open_tokenizer(), source, log_level=0)
            if matcher.is_error():
                raise _bad_grammar(matcher.get_error())
            self._compiled[source] = matcher
        self._compiled.move_to_end(source)
        while len(self._compiled) > KEPT_GRAMMARS:
            self._compiled.popitem(last=False)
        return self._compiled[source]

    def _open_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            text, eos = self._codec.to_json(), self._eos_ids or None
            self._tokenizer = _library().LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        return self._tokenizer


def _source(params: SamplingParams) -> str:
    """The grammar in llguidance's own form."""
    library = _library()
    try:
        if params.json_schema is not None:
            schema = params.json_schema
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return str(library.LLMatcher.grammar_from_json_schema(text, defaults=JSON_DEFAULTS))
        if params.regex is not None:
            return str(library.LLMatcher.grammar_from_regex(params.regex))
        return str(library.grammar_from("grammar", params.grammar))
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad_grammar(str(error)) from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise SpikeError(
            "SPK626",
            "structured output",
            "json_schema, regex and grammar need the package llguidance, which is not installed.",
            "pip install 'spikeinfer[structured]'.",
            ExitCode.UNSUPPORTED,
        ) from None
    return llguidance


def _bad_grammar(cause: str) -> SpikeError:
    return SpikeError(
        "SPK625",
        "structured output",
        f"this can't be used as a grammar: {' '.join(cause.split())[:400].rstrip('.')}.",
        "Correct the schema, regular expression or grammar; docs/sampling.md says what they may "
        "contain.",
    )
