"""What a request asks of sampling, and the sampler that carries it out.

Defaults: greedy, no penalties. Nothing is taken from the checkpoint's generation_config.json behind
the caller's back; `SpikeEngine.generation_defaults` offers its values for passing on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .logits import candidates, penalise_generated, penalise_repetition
from .session import BestLogits

_REAL_OPTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_tokens: at most this many generated tokens; None = until the engine's capacity.
        temperature: 0 = greedy (the filters below then change nothing).
        top_k: keep the k most likely tokens; 0 = off.
        top_p: keep the most likely tokens up to this mass, in (0, 1]; 1 = off.
        min_p: keep tokens of at least this fraction of the best one's probability; 0 = off.
        repetition_penalty: > 0; above 1 discourages ids of the prompt and the output.
        presence_penalty: subtracted from the logit of every id already generated.
        frequency_penalty: the same for each time it was generated.
        seed: same seed, same prompt, same engine: same text, whatever else is in the batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end it, besides the model's end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids (benchmarks).

    Raises:
        SpikeError: SPK608, a value outside its range.
    """

    max_tokens: int | None = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "max_tokens", "seed"):
            value = getattr(self, name)
            absent = value is None and name != "top_k"
            _require(absent or _is_a(value, Integral), name, self, "a whole number")
        for name in _REAL_OPTIONS:
            _require(_is_a(getattr(self, name), Real), name, self, "a number")
        _require(_is_list_of(self.stop_token_ids, Integral), "stop_token_ids", self, "token ids")
        strings = self.stop is None or isinstance(self.stop, str) or _is_list_of(self.stop, str)
        _require(strings, "stop", self, "a string or a list of strings")
        self._check_ranges()

    def _check_ranges(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self, "at least 1")
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self, ">= 0")
        _require(self.top_k >= 0, "top_k", self, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self, "between 0 and 1")
        penalty = self.repetition_penalty
        _require(_finite(penalty) and penalty > 0, "repetition_penalty", self, "above 0")
        _require(_finite(self.presence_penalty), "presence_penalty", self, "a finite number")
        _require(_finite(self.frequency_penalty), "frequency_penalty", self, "a finite number")
        _require(self.seed is None or self.seed >= 0, "seed", self, "0 or more")
        _require("" not in self.stop_strings, "stop", self, "strings that are not empty")

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


class TokenCounts:
    """Distinct token ids and how often each came, as arrays that grow."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        self._size = ids.size
        self._places = {int(token): place for place, token in enumerate(ids)}
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.concatenate([counts, np.zeros(64, np.int64)])

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct ids, int64 ``[N]``."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `ids` came, int64 ``[N]``."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count one more."""
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


class Sampler:
    """Chooses the tokens of one request: its own generator, its own counts.

    Args:
        params: the request's choices.
        prompt: the prompt's ids (the repetition penalty counts them).
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._generated = TokenCounts()
        self._seen = TokenCounts(prompt if params.repetition_penalty != 1.0 else ())

    @property
    def takes_best(self) -> bool:
        """Whether the best logit of a row is all that matters of it."""
        return self._params.temperature == 0 and not self._params.penalises

    def choose(self, row: NDArray[np.float32]) -> int:
        """Draw the next token from its logits, float32 ``[V]`` (not changed).

        Raises:
            SpikeError: SPK609, the row has a NaN or nothing above -inf.
        """
        params = self._params
        if params.penalises:
            row = self._penalised(row)
        token = int(row.argmax())  # numpy's arg max stops at the first NaN
        check_best(float(row[token]))
        if params.temperature > 0:
            left = candidates(row, params.temperature, params.top_k, params.top_p, params.min_p)
            token = left.draw(self._random.random())
        if params.penalises:
            self._generated.add(token)
            self._seen.add(token)
        return token

    @cached_property
    def _random(self) -> np.random.Generator:
        """Made when first drawn from: greedy requests need none, and numpy.random loads slowly."""
        return np.random.Generator(np.random.PCG64(self._params.seed))

    def _penalised(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        params, row, generated = self._params, row.copy(), self._generated
        penalise_repetition(row, self._seen.ids, params.repetition_penalty)
        presence, frequency = params.presence_penalty, params.frequency_penalty
        penalise_generated(row, generated.ids, generated.counts, presence, frequency)
        return row


def choose_rows(logits: NDArray[np.float32], samplers: Sequence[Sampler]) -> list[int | SpikeError]:
    """Choose a token for every row; an unusable row gives its error and never harms the others.

    Args:
        logits: float32 ``[R, V]``.
        samplers: one for each row.
    """
    chosen: list[int | SpikeError] = []
    for row, sampler in zip(logits, samplers, strict=True):
        try:
            chosen.append(sampler.choose(row))
        except SpikeError as error:
            chosen.append(error)
    return chosen


def choose_best(best: BestLogits) -> list[int | SpikeError]:
    """The same as `choose_rows` of samplers that take the best."""
    chosen: list[int | SpikeError] = list(best.ids.tolist())
    for row, logit in enumerate(best.logits.tolist()):
        try:
            check_best(logit)
        except SpikeError as error:
            chosen[row] = error
    return chosen


def check_best(logit: float) -> None:
    """Refuse a row whose best logit is NaN (numpy's arg max finds one if there is one) or infinite.

    Raises:
        SpikeError: SPK609.
    """
    if not math.isfinite(logit):
        raise SpikeError(
            "SPK609",
            "sampling",
            f"the model's best logit is {logit}: there is no distribution to choose from.",
            "The engine overflowed on this prompt; check it with `spike golden check`, "
            "or build it with a wider dtype.",
        )


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list_of(values: object, kind: type) -> bool:
    if isinstance(values, str) or not isinstance(values, Collection):
        return False
    return all(_is_a(value, kind) for value in values)


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(holds: bool, name: str, params: SamplingParams, wanted: str) -> None:
    if not holds:
        raise SpikeError(
            "SPK608",
            "sampling",
            f"{name}={getattr(params, name)!r} is out of range.",
            f"Give {wanted}.",
        )
