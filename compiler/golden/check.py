"""The check: an engine's logits against a golden set, as one report that goes into evidence.json.

A scorer is any callable that takes T token ids and returns logits float32 `[T, V]`, one row per
position (teacher forcing). This file knows nothing of engines, sessions or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...errors import SpikeError
from .metrics import Comparison, compare_stored
from .sets import Float32, GoldenSet
from .thresholds import Thresholds

Scorer = Callable[[list[int]], Float32]
# Below this lead (nats) two correct implementations may pick different tokens.
NEAR_TIE = 0.05


@dataclass(frozen=True)
class Divergence:
    """Where a greedy continuation first leaves the source's.

    Attributes:
        prompt: its name.
        step: 0 for the first generated token.
        expected: the source's token.
        found: the engine's.
        margin: the source's lead of first over second, nats.
    """

    prompt: str
    step: int
    expected: int
    found: int
    margin: float


@dataclass(frozen=True)
class GoldenReport:
    """What a check measured. KL in nats, over `positions` positions of `sequences` sequences, of
    which `continuations` end in a greedy continuation by the source.

    `logit_error` is over the compared logits: all of them when the reference was computed on the
    fly, the stored ones (likeliest and probes) otherwise. `decode_error` is None when the second
    scorer wasn't given. `failures` says in words which limits were passed; empty means passed.
    """

    golden: str
    stored: bool
    sequences: int
    positions: int
    mean_kl: float
    median_kl: float
    p99_kl: float
    max_kl: float
    worst: str
    top1: float
    logit_error: float
    source_perplexity: float
    engine_perplexity: float
    perplexity_ratio: float
    continuations: int
    divergences: tuple[Divergence, ...]
    decode_error: float | None
    thresholds: Thresholds
    failures: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """No limit was passed."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain values for `evidence.json`; an infinite figure becomes the text ``inf``."""
        values = {**asdict(self), "passed": self.passed}
        return {
            name: str(value) if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in values.items()
        }

    def summary(self) -> str:
        """One line for a terminal."""
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"golden {self.golden}: {verdict}, mean KL {self.mean_kl:.2g} "
            f"(median {self.median_kl:.2g}, p99 {self.p99_kl:.2g}), "
            f"top-1 {self.top1:.1%}, perplexity x{self.perplexity_ratio:.4f}, "
            f"{len(self.divergences)}/{self.continuations} continuations differ, "
            f"{self.positions} positions"
        )


def check(
    golden: GoldenSet, score: Scorer, thresholds: Thresholds, decode: Scorer | None = None
) -> GoldenReport:
    """Compare a scorer with a stored set.

    Args:
        golden: the set.
        score: engine under test, the whole sequence at once.
        thresholds: limits.
        decode: the same engine token by token; compared with `score`, not with the set.

    Raises:
        SpikeError: SPK544 if logits have another shape than tokens and vocabulary ask for.
    """
    comparisons, decode_error = [], None
    for prompt in golden.prompts:
        tokens = list(prompt.sequence)
        logits = scored(score, tokens, golden.vocab_size)
        comparisons.append(compare_stored(prompt, golden.probe_ids, logits))
        if decode is not None:
            stepped = scored(decode, tokens, golden.vocab_size)
            decode_error = max(decode_error or 0.0, largest_difference(logits, stepped))
    return summarise(golden.name, True, comparisons, thresholds, decode_error)


def scored(score: Scorer, tokens: list[int], vocab_size: int) -> Float32:
    """Logits of `tokens`, checked for their shape."""
    logits = np.asarray(score(tokens), dtype=np.float32)
    if logits.shape != (len(tokens), vocab_size):
        raise SpikeError(
            "SPK544",
            "golden",
            f"{len(tokens)} tokens gave logits of shape {list(logits.shape)}, "
            f"expected [{len(tokens)}, {vocab_size}].",
            "The set belongs to another model, or the engine was built from another one.",
        )
    return logits


def largest_difference(a: Float32, b: Float32) -> float:
    """Largest absolute difference in float64; NaN anywhere gives infinity."""
    difference = np.abs(a.astype(np.float64) - b).max()
    return float(difference) if np.isfinite(difference) else float("inf")


def summarise(
    name: str,
    stored: bool,
    comparisons: Sequence[Comparison],
    thresholds: Thresholds,
    decode_error: float | None,
) -> GoldenReport:
    """Pool the positions of all sequences and hold them against the limits."""
    # A NaN in the engine's logits must fail every limit, not slip through a comparison.
    kl = np.nan_to_num(np.concatenate([c.kl for c in comparisons]), nan=np.inf)
    errors = np.nan_to_num(np.concatenate([c.logit_error for c in comparisons]), nan=np.inf)
    source_nll = np.concatenate([c.source_nll for c in comparisons])
    engine_nll = np.nan_to_num(np.concatenate([c.engine_nll for c in comparisons]), nan=np.inf)
    source_perplexity = float(np.exp(source_nll.mean()))
    with np.errstate(over="ignore"):
        engine_perplexity = float(np.exp(engine_nll.mean()))
    report = GoldenReport(
        golden=name,
        stored=stored,
        sequences=len(comparisons),
        positions=int(kl.size),
        mean_kl=float(kl.mean()),
        median_kl=float(np.median(kl)),
        p99_kl=float(np.sort(kl)[int(0.99 * (kl.size - 1))]),
        max_kl=float(kl.max()),
        worst=_worst(comparisons),
        top1=float(np.concatenate([c.agrees for c in comparisons]).mean()),
        logit_error=float(errors.max()),
        source_perplexity=source_perplexity,
        engine_perplexity=engine_perplexity,
        perplexity_ratio=engine_perplexity / source_perplexity,
        continuations=sum(c.greedy_from < c.kl.size for c in comparisons),
        divergences=tuple(d for c in comparisons if (d := first_divergence(c)) is not None),
        decode_error=decode_error,
        thresholds=thresholds,
    )
    return GoldenReport(**{**vars(report), "failures": _failures(report)})


def _worst(comparisons: Sequence[Comparison]) -> str:
    """Where the largest KL was: `prompt@position`."""
    peaks = [np.nan_to_num(c.kl, nan=np.inf) for c in comparisons]
    index = int(np.argmax([peak.max() for peak in peaks]))
    return f"{comparisons[index].name}@{comparisons[index].first + int(peaks[index].argmax())}"


def first_divergence(comparison: Comparison) -> Divergence | None:
    """The first greedy token that differs where the source was not near a tie.

    Teacher forcing gives the same answer as free running up to that token, and beyond a near tie
    it goes on along the source's path, where free running could only compare different texts.
    """
    start = comparison.greedy_from
    # The last row's token was never appended to the sequence; it isn't part of the continuation.
    for row in range(max(start, 0), comparison.kl.size - 1):
        expected, found = int(comparison.source_top[row]), int(comparison.engine_top[row])
        if expected != found and comparison.margins[row] >= NEAR_TIE:
            margin = float(comparison.margins[row])
            return Divergence(comparison.name, row - start, expected, found, margin)
    return None


def _failures(report: GoldenReport) -> tuple[str, ...]:
    """Each passed limit in words."""
    limits = report.thresholds
    upper: list[tuple[str, float | None, float | None]] = [
        ("mean KL", report.mean_kl, limits.mean_kl),
        ("p99 KL", report.p99_kl, limits.p99_kl),
        (f"max KL (at {report.worst})", report.max_kl, limits.max_kl),
        ("logit error", report.logit_error, limits.logit_error),
        ("perplexity ratio", report.perplexity_ratio, limits.perplexity_ratio),
        ("divergent continuations", float(len(report.divergences)), limits.divergent_prompts),
        ("prefill-decode difference", report.decode_error, limits.decode_error),
    ]
    failures = [
        f"{name} {value:.4g} is over {limit:.4g}"
        for name, value, limit in upper
        if value is not None and limit is not None and not value <= limit
    ]
    if not report.top1 >= limits.top1:
        failures.append(f"top-1 agreement {report.top1:.2%} is under {limits.top1:.2%}")
    return tuple(failures)
