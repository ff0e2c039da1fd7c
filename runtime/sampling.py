"""Choosing the next tokens of a batch: every row by the options of its own request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .entropy import bounded_sharpness
from .logits import Candidates, candidates, typical, unsurprising
from .logprobs import TokenLogprob, token_logprobs
from .penalties import TokenCounts, penalise_generated, penalise_repetition
from .sampling_params import SamplingParams
from .softmax import TILE, Rows, draw_rows, scaled_rows

FloatRow = NDArray[np.float32]


@dataclass(frozen=True)
class Choice:
    """A chosen token, with its log probability where the request asks for it."""

    token: int
    logprob: TokenLogprob | None = None


class Sampler:
    """What sampling remembers of one request: its generator, its counts, mirostat's state.

    Args:
        params: the request's choices.
        prompt: the prompt's ids (the repetition penalty counts them).
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self.adjusts = params.penalises or bool(params.logit_bias)
        self._generated = TokenCounts()
        self._seen = TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
        self._most_bits = 2 * (params.mirostat_tau or 0.0)

    def adjusted(self, row: FloatRow) -> FloatRow:
        """The logits after penalties and bias, float32 ``[V]``; a copy."""
        params, row, generated = self.params, row.copy(), self._generated
        penalise_repetition(row, self._seen.ids, params.repetition_penalty)
        presence, frequency = params.presence_penalty, params.frequency_penalty
        penalise_generated(row, generated.ids, generated.counts, presence, frequency)
        for token, bias in (params.logit_bias or {}).items():
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
        """A token was generated."""
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


def choose_rows(rows: Rows, samplers: Sequence[Sampler]) -> list[Choice | SpikeError]:
    """Choose a token for every row; an unusable row gives its error and never harms the others.

    Args:
        rows: R rows of logits, float32 ``[V]``; not changed.
        samplers: one for each row.
    """
    if not samplers:
        return []
    plain = isinstance(rows, np.ndarray) and not any(sampler.adjusts for sampler in samplers)
    used = rows if plain else [_adjusted(r, s) for r, s in zip(rows, samplers, strict=True)]
    # numpy's arg max stops at the first NaN.
    best = used.argmax(axis=1) if isinstance(used, np.ndarray) else [r.argmax() for r in used]
    peaks = np.array([row[token] for row, token in zip(used, best, strict=True)], np.float32)
    sound = np.isfinite(peaks).tolist()
    tokens = [int(token) for token in best]
    drawn = [i for i, s in enumerate(samplers) if sound[i] and s.params.temperature > 0]
    simple = [i for i in drawn if not samplers[i].params.filters]
    _draw_simple(used, peaks, samplers, simple, tokens)
    _draw_filtered(used, peaks, samplers, [i for i in drawn if samplers[i].params.filters], tokens)
    for sampler, token, usable in zip(samplers, tokens, sound, strict=True):
        if usable:
            sampler.count(token)
    return _results(rows, samplers, tokens, peaks)


def _adjusted(row: FloatRow, sampler: Sampler) -> FloatRow:
    if not sampler.adjusts or not math.isfinite(row[row.argmax()]):
        return row  # a NaN must not be hidden by a ban
    return sampler.adjusted(row)


def _draw_simple(
    rows: Rows, peaks: FloatRow, samplers: Sequence[Sampler], which: list[int], tokens: list[int]
) -> None:
    """Temperature alone: all rows together."""
    if which:
        sharpness = _sharpness(samplers, which).astype(np.float32)
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
        own = [rows[i] for i in tile]
        sharpness = _bounded(own, peaks[tile], [samplers[i] for i in tile])
        finite = np.where(np.isinf(sharpness), 1.0, sharpness).astype(np.float32)
        scaled = scaled_rows(own, peaks[tile], finite)
        weights = np.exp(scaled)
        for place, i in enumerate(tile):
            if sharpness[place] < np.inf:  # else the best token is the only one
                tokens[i] = samplers[i].draw(scaled[place], weights[place])


def _sharpness(samplers: Sequence[Sampler], which: Sequence[int]) -> NDArray[np.float64]:
    return 1 / np.array([samplers[i].params.temperature for i in which], np.float64)


def _bounded(rows: list[FloatRow], peaks: FloatRow, samplers: list[Sampler]) -> NDArray[np.float64]:
    """1 / temperature of each row, raised where `max_entropy` asks for it."""
    sharpness = _sharpness(samplers, range(len(samplers)))
    bounds = [s.params.max_entropy for s in samplers]
    which = [i for i, bits in enumerate(bounds) if bits is not None]
    if which:
        shifted = scaled_rows([rows[i] for i in which], peaks[which])
        limits = np.array([bounds[i] for i in which], np.float64)
        sharpness[which] = bounded_sharpness(shifted, sharpness[which], limits)
    return sharpness


def _results(
    rows: Rows, samplers: Sequence[Sampler], tokens: list[int], peaks: FloatRow
) -> list[Choice | SpikeError]:
    results: list[Choice | SpikeError] = [
        Choice(token) if math.isfinite(peak) else unusable(float(peak))
        for token, peak in zip(tokens, peaks, strict=True)
    ]
    which = [
        i
        for i, result in enumerate(results)
        if isinstance(result, Choice) and samplers[i].params.logprobs is not None
    ]
    counts = [samplers[i].params.logprobs or 0 for i in which]
    found = token_logprobs([rows[i] for i in which], [tokens[i] for i in which], counts)
    for i, logprob in zip(which, found, strict=True):
        results[i] = Choice(tokens[i], logprob)
    return results


def unusable(logit: float) -> SpikeError:
    """The error of a row whose best logit is NaN or infinite: SPK609."""
    return SpikeError(
        "SPK609",
        "sampling",
        f"the model's best logit is {logit}: there is no distribution to choose from.",
        "The engine overflowed on this prompt; check it with `spike golden check`, "
        "or build it with a wider dtype.",
    )
