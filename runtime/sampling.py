"""Choosing the next tokens of a batch: every row by the options of its own request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .entropy import bounded_sharpness
from .grammar import GrammarState
from .logits import Candidates, candidates, typical, unsurprising
from .logprobs import TokenLogprob, token_logprobs
from .penalties import TokenCounts, penalise_generated, penalise_repetition
from .sampling_params import SamplingParams
from .session import BestLogits
from .softmax import TILE, Rows, draw_rows, scaled_rows

FloatRow = NDArray[np.float32]


class Choice(NamedTuple):
    """A chosen token, with its log probability where the request asks for it."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler:
    """What sampling remembers of one request: its generator, its counts, mirostat's state.

    Args:
        params: the request's choices.
        prompt: the prompt's ids (the repetition penalty counts them).
        grammar: what the text may be, at its beginning; None = anything.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self._bias = dict(params.logit_bias or {})  # the caller's may change
        self.adjusts = params.penalises or bool(self._bias) or grammar is not None
        self.sharpness = _sharpness(params.temperature)
        self.filters = params.filters
        self._generated = TokenCounts()
        self._seen = TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
        self._most_bits = 2 * (params.mirostat_tau or 0.0)

    @property
    def takes_best(self) -> bool:
        """Whether a row's best logit is all that matters of it."""
        return self.sharpness == math.inf and not self.adjusts and self.params.logprobs is None

    def adjusted(self, row: FloatRow) -> FloatRow:
        """The logits after penalties, bias and grammar, float32 ``[V]``; a copy.

        Raises:
            SpikeError: SPK625, the grammar can't be followed; SPK609, a NaN it might hide.
        """
        params, generated = self.params, self._generated
        if self.grammar is None:
            row = row.copy()
        else:
            peak = float(row[row.argmax()])
            if not math.isfinite(peak):
                raise unusable(peak)
            row = np.where(self.grammar.allowed(), row, np.float32(-np.inf))
        penalise_repetition(row, self._seen.ids, params.repetition_penalty)
        presence, frequency = params.presence_penalty, params.frequency_penalty
        penalise_generated(row, generated.ids, generated.counts, presence, frequency)
        for token, bias in self._bias.items():
            row[token] += bias
        return row

    def uniform(self) -> float:
        """The request's next random number, 0 <= u < 1."""
        return float(self._random.random())

    def draw(self, scaled: FloatRow, weights: FloatRow) -> int:
        """Filter a row of `scaled_rows` and its exponentials, and draw from what is left."""
        params = self.params
        left = candidates(scaled, weights, params.top_k, params.top_p, params.min_p)
        left = typical(left, params.typical_p)
        if params.mirostat_tau is None:
            return left.draw(self.uniform())
        return self._draw_mirostat(left, params.mirostat_tau)

    def count(self, token: int) -> None:
        """A token was generated. Raises SpikeError SPK625, the grammar can't be followed."""
        if self.grammar is not None:
            self.grammar.take(token)
        if self.params.penalises:
            self._generated.add(token)
            self._seen.add(token)

    def _draw_mirostat(self, left: Candidates, tau: float) -> int:
        """Mirostat 2.0: Basu et al. 2021, algorithm 2; surprise is that before its own cut."""
        token = unsurprising(left, self._most_bits).draw(self.uniform())
        index = token if left.ids is None else int(np.searchsorted(left.ids, token))
        surprise = float(left.surprises()[index])
        self._most_bits -= self.params.mirostat_eta * (surprise - tau)
        return token

    @cached_property
    def _random(self) -> np.random.Generator:
        """Made when first drawn from: greedy requests need none, and numpy.random loads slowly."""
        return np.random.Generator(np.random.PCG64(self.params.seed))


def _sharpness(temperature: float) -> float:
    """1 / temperature, inf for 0; float32 holds it, and a logit's product with it.

    Within what float32 tells apart, sharper or flatter than these bounds changes nothing.
    """
    return min(max(1 / temperature, 1e-30), 1e30) if temperature else math.inf


def choose_rows(rows: Rows, samplers: Sequence[Sampler]) -> list[Choice | SpikeError]:
    """Choose a token for every row; an unusable row gives its error and never harms the others.

    Args:
        rows: R rows of logits, float32 ``[V]``; not changed.
        samplers: one for each row.
    """
    adjusting = [i for i, sampler in enumerate(samplers) if sampler.adjusts]
    if not adjusting:
        return _choose(rows, rows, samplers) if samplers else []
    results: dict[int, Choice | SpikeError] = {}
    size = max(1, TILE // rows[0].size)  # no more copies at a time than stay in the cache
    groups = [adjusting[start : start + size] for start in range(0, len(adjusting), size)]
    for group in [[i for i, s in enumerate(samplers) if not s.adjusts], *groups]:
        used: list[FloatRow] = []
        usable: list[int] = []
        for i in group:
            try:
                used.append(samplers[i].adjusted(rows[i]) if samplers[i].adjusts else rows[i])
                usable.append(i)
            except SpikeError as error:
                results[i] = error
        chosen = _choose(used, [rows[i] for i in usable], [samplers[i] for i in usable])
        results.update(zip(usable, chosen, strict=True))
    return [results[i] for i in range(len(samplers))]


def choose_best(best: BestLogits, rows: Sequence[int]) -> list[Choice | SpikeError]:
    """The same as `choose_rows` of samplers that take the best; `rows` of those in `best`."""
    found = [(int(best.ids[row]), float(best.logits[row])) for row in rows]
    return [Choice(token) if math.isfinite(peak) else unusable(peak) for token, peak in found]


def _choose(rows: Rows, raw: Rows, samplers: Sequence[Sampler]) -> list[Choice | SpikeError]:
    """Choose from adjusted rows; `raw` as the model gave them."""
    # numpy's arg max stops at the first NaN.
    tokens = [int(row.argmax()) for row in rows]
    peaks = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    sound = [math.isfinite(peak) for peak in peaks]
    drawn = [i for i, s in enumerate(samplers) if sound[i] and s.sharpness < math.inf]
    if drawn:
        high = np.array(peaks, np.float32)
        simple = [i for i in drawn if not samplers[i].filters]
        filtered = [i for i in drawn if samplers[i].filters]
        _draw_simple(rows, high, samplers, simple, tokens)
        _draw_filtered(rows, high, samplers, filtered, tokens)
    results: list[Choice | SpikeError] = []
    for i, sampler in enumerate(samplers):
        usable = sound[i]
        results.append(_counted(sampler, tokens[i]) if usable else _no_choice(peaks[i], raw[i]))
    _add_logprobs(results, raw, samplers)
    return results


def _counted(sampler: Sampler, token: int) -> Choice | SpikeError:
    try:
        sampler.count(token)
    except SpikeError as error:
        return error
    return Choice(token)


def _draw_simple(
    rows: Rows, peaks: FloatRow, samplers: Sequence[Sampler], which: list[int], tokens: list[int]
) -> None:
    """Temperature alone: all rows together."""
    if which:
        sharpness = np.array([samplers[i].sharpness for i in which], np.float32)
        uniforms = [samplers[i].uniform() for i in which]
        drawn = draw_rows([rows[i] for i in which], peaks[which], sharpness, uniforms)
        for i, token in zip(which, drawn, strict=True):
            tokens[i] = token


def _draw_filtered(
    rows: Rows, peaks: FloatRow, samplers: Sequence[Sampler], which: list[int], tokens: list[int]
) -> None:
    """The passes over whole rows for a tile of them together, the filters row by row."""
    size = max(1, TILE // rows[0].size)
    for start in range(0, len(which), size):
        tile = which[start : start + size]
        own, high = [rows[i] for i in tile], peaks[tile]
        sharpness = _bounded(own, high, [samplers[i] for i in tile])
        finite = [value if value < math.inf else 1.0 for value in sharpness]
        scaled = scaled_rows(own, high, np.array(finite, np.float32))
        for place, (i, weights) in enumerate(zip(tile, np.exp(scaled), strict=True)):
            if sharpness[place] < math.inf:  # else the best token is the only one
                tokens[i] = samplers[i].draw(scaled[place], weights)


def _bounded(rows: list[FloatRow], peaks: FloatRow, samplers: list[Sampler]) -> list[float]:
    """1 / temperature of each row, raised where `max_entropy` asks for it."""
    sharpness = [sampler.sharpness for sampler in samplers]
    bounds = [sampler.params.max_entropy for sampler in samplers]
    which = [i for i, bits in enumerate(bounds) if bits is not None]
    if which:
        shifted = scaled_rows([rows[i] for i in which], peaks[which])
        asked = np.array([sharpness[i] for i in which], np.float64)
        limits = np.array([bounds[i] for i in which], np.float64)
        for i, value in zip(which, bounded_sharpness(shifted, asked, limits), strict=True):
            sharpness[i] = float(value)
    return sharpness


def _add_logprobs(
    results: list[Choice | SpikeError], raw: Rows, samplers: Sequence[Sampler]
) -> None:
    counts = [sampler.params.logprobs for sampler in samplers]
    which = [i for i, count in enumerate(counts) if count is not None]
    if not which:
        return
    chosen = [(i, choice.token) for i in which if isinstance(choice := results[i], Choice)]
    found = token_logprobs(
        [raw[i] for i, _ in chosen],
        [token for _, token in chosen],
        [counts[i] or 0 for i, _ in chosen],
    )
    for (i, token), logprob in zip(chosen, found, strict=True):
        results[i] = Choice(token, logprob)


def _no_choice(peak: float, raw: FloatRow) -> SpikeError:
    """The error of a row without a finite best logit: the engine's fault, or the request's."""
    given = float(raw[raw.argmax()])
    if not math.isfinite(given):
        return unusable(given)
    return SpikeError(
        "SPK608",
        "sampling",
        f"logit_bias, penalties and grammar leave no token to choose: the best logit was {given} "
        f"and is {peak} after them.",
        "Ban fewer tokens, or give smaller values.",
    )


def unusable(logit: float) -> SpikeError:
    """The error of a row whose best logit is NaN or infinite: SPK609."""
    return SpikeError(
        "SPK609",
        "sampling",
        f"the model's best logit is {logit}: there is no distribution to choose from.",
        "The engine overflowed on this prompt; check it with `spike golden check`, "
        "or build it with a wider dtype.",
    )
