"""What a request asks of sampling.

Defaults: greedy, no penalties. Nothing is taken from the checkpoint's generation_config.json behind
the caller's back; `SpikeEngine.generation_defaults` offers its values for passing on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from ..errors import SpikeError
from .checks import as_float

Speculative = Literal["off", "prompt_lookup", "auto"]

MOST_LOGPROBS = 1000

_WHOLE_OPTIONS = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_REAL_OPTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "mirostat_eta",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_OPTIONAL_REALS = ("max_entropy", "mirostat_tau")
_GRAMMARS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends; docs/sampling.md has the formulas.

    They are applied in this order: penalties, `logit_bias`, `temperature`, `max_entropy`, `top_k`,
    `top_p`, `min_p`, `typical_p`, mirostat.

    Attributes:
        max_tokens: at most this many generated tokens; None = until the engine's capacity.
        temperature: 0 = greedy (all that follows up to mirostat then changes nothing).
        max_entropy: bits; where the distribution has more, the temperature is lowered until it
            doesn't. None = off.
        top_k: keep the k most likely tokens; 0 = off.
        top_p: keep the most likely tokens up to this mass, in (0, 1]; 1 = off.
        min_p: keep tokens of at least this fraction of the best one's probability; 0 = off.
        typical_p: keep the tokens whose surprise is nearest to the entropy, up to this mass, in
            (0, 1]; 1 = off.
        mirostat_tau: bits of surprise that mirostat 2.0 steers towards; None = off.
        mirostat_eta: how fast it does, in (0, 1].
        repetition_penalty: > 0; above 1 discourages ids of the prompt and the output.
        presence_penalty: subtracted from the logit of every id already generated.
        frequency_penalty: the same for each time it was generated.
        logit_bias: added to the logits of these ids; -inf bans one.
        seed: same seed, same prompt, same engine: same text, whatever else is in the batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end it, besides the model's end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids (benchmarks).
        logprobs: record the log probability of each chosen token, and this many of the most likely
            ones beside it; None = none. They are the model's own, before all of the above.
        prompt_logprobs: the same for the tokens of the prompt.
        json_schema: the text is JSON that this schema (a mapping, or JSON text) accepts.
        regex: the whole text matches it.
        grammar: the text is of this context-free grammar (Lark's or GBNF's syntax). At most one of
            these three; the text ends where they say so.
        speculative: ``prompt_lookup`` = let the model check several tokens at a time, taken from
            earlier in the text, as long as enough of them are right; the answer is the same.
            ``auto`` = only where other requests of the step don't lose by it. ``off`` = never.

    Raises:
        SpikeError: SPK608, a value outside its range.
    """

    max_tokens: int | None = 512
    temperature: float = 0.0
    max_entropy: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    mirostat_tau: float | None = None
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    speculative: Speculative = "off"

    def __post_init__(self) -> None:
        _require(_is_a(self.top_k, Integral), "top_k", self, "a whole number")
        for name in _WHOLE_OPTIONS:
            value = getattr(self, name)
            _require(value is None or _is_a(value, Integral), name, self, "a whole number")
        for name in _REAL_OPTIONS:
            _require(_is_a(getattr(self, name), Real), name, self, "a number")
        for name in _OPTIONAL_REALS:
            value = getattr(self, name)
            _require(value is None or _is_a(value, Real), name, self, "a number or None")
        _require(_is_list_of(self.stop_token_ids, Integral), "stop_token_ids", self, "token ids")
        strings = self.stop is None or isinstance(self.stop, str) or _is_list_of(self.stop, str)
        _require(strings, "stop", self, "a string or a list of strings")
        _require(_is_bias(self.logit_bias), "logit_bias", self, "token ids with a number each")
        self._check_structure()
        known = self.speculative in get_args(Speculative)
        _require(known, "speculative", self, " or ".join(get_args(Speculative)))
        self._check_ranges()

    def _check_structure(self) -> None:
        schema = self.json_schema
        _require(schema is None or isinstance(schema, str | Mapping), "json_schema", self,
                 "a mapping or JSON text")  # fmt: skip
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        for name in given:
            text = name == "json_schema" or isinstance(getattr(self, name), str)
            _require(text, name, self, "a string")
        if len(given) > 1:
            raise SpikeError(
                "SPK608",
                "sampling",
                f"{' and '.join(given)} were given together; a text can follow one of them.",
                f"Give one of {', '.join(_GRAMMARS)}.",
            )

    def _check_ranges(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self, "at least 1")
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self, ">= 0")
        bits = self.max_entropy
        _require(bits is None or (_finite(bits) and bits >= 0), "max_entropy", self, "bits, >= 0")
        _require(self.top_k >= 0, "top_k", self, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self, "between 0 and 1")
        _require(0 < self.typical_p <= 1, "typical_p", self, "above 0 and at most 1")
        tau = self.mirostat_tau
        _require(tau is None or (_finite(tau) and tau > 0), "mirostat_tau", self, "bits, above 0")
        _require(0 < self.mirostat_eta <= 1, "mirostat_eta", self, "above 0 and at most 1")
        penalty = self.repetition_penalty
        _require(_finite(penalty) and penalty > 0, "repetition_penalty", self, "above 0")
        _require(_finite(self.presence_penalty), "presence_penalty", self, "a finite number")
        _require(_finite(self.frequency_penalty), "frequency_penalty", self, "a finite number")
        _require(self.seed is None or self.seed >= 0, "seed", self, "0 or more")
        _require("" not in self.stop_strings, "stop", self, "strings that are not empty")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            wanted = f"0 to {MOST_LOGPROBS}, or None"
            _require(count is None or 0 <= count <= MOST_LOGPROBS, name, self, wanted)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they were given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalises(self) -> bool:
        """Whether any penalty changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def structured(self) -> bool:
        """Whether a grammar says what the text may be."""
        return (self.json_schema, self.regex, self.grammar) != (None, None, None)

    @property
    def filters(self) -> bool:
        """Whether drawing needs more than a temperature."""
        off = (self.max_entropy, self.top_k, self.top_p, self.min_p, self.typical_p)
        return off != (None, 0, 1, 0, 1) or self.mirostat_tau is not None


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list_of(values: object, kind: type) -> bool:
    if isinstance(values, str) or not isinstance(values, Collection):
        return False
    return all(_is_a(value, kind) for value in values)


def _is_bias(bias: object) -> bool:
    if bias is None:
        return True
    if not isinstance(bias, Mapping) or not _is_list_of(bias.keys(), Integral):
        return False
    return all(_is_a(v, Real) and (v == -math.inf or _finite(v)) for v in bias.values())


def _finite(value: float) -> bool:
    return math.isfinite(as_float(value))


def _require(holds: bool, name: str, params: SamplingParams, wanted: str) -> None:
    if not holds:
        raise SpikeError(
            "SPK608",
            "sampling",
            f"{name}={getattr(params, name)!r} is out of range.",
            f"Give {wanted}.",
        )
