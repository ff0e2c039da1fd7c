"""The golden gate on the emitted engine, and what it leaves in evidence.json."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..engine import Evidence, Measurement
from ..engine.config import MIXED
from ..frontend.checkpoint import Checkpoint
from ..golden import (
    CACHES,
    GoldenReport,
    GoldenSet,
    Scorer,
    Thresholds,
    check,
    gate,
    thresholds_for,
)
from ..quantize import Quantization
from .progress import Progress
from .request import BuildRequest
from .source import rebuilt

FLOAT_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
TOKENS, BUDGET_TOKENS = 384, 1024
"""Of held-out text; a budget is kept or missed by a few percent, so it is measured on more."""
MEAN_KL = "mean KL (nats)"


@dataclass(frozen=True)
class Scorers:
    """The engine under test: whole sequences at once, and token by token."""

    prefill: Scorer
    decode: Scorer
    max_seq_len: int


def limits(request: BuildRequest, quantization: Quantization, kv_format: str) -> Thresholds:
    """Thresholds of this build: the looser one of weights and cache, then the recipe's."""
    if request.budgeted:
        budget = {} if request.max_kl is None else {"mean_kl": request.max_kl}
        return thresholds_for(MIXED, "float32").override({**budget, **request.thresholds})
    weights = thresholds_for(FLOAT_NAMES.get(quantization.value, quantization.value), "float32")
    names = {"mean_kl", "p99_kl", "perplexity_ratio"}
    if kv_format in CACHES and kv_format != "f16":
        cache = thresholds_for(CACHES[kv_format], "float32")
        looser = {n: max(getattr(weights, n), getattr(cache, n)) for n in names}
        looser["top1"] = min(weights.top1, cache.top1)
        decode = (weights.decode_error, cache.decode_error)
        looser["decode_error"] = max(d for d in decode if d is not None)
        weights = weights.override(looser)
    elif kv_format == "f16" and quantization is Quantization.F32:
        weights = thresholds_for("float16", "float32")
    return weights.override(request.thresholds)


def measure(
    request: BuildRequest,
    checkpoint: Checkpoint,
    thresholds: Thresholds,
    open_scorers: Callable[[], Scorers],
    progress: Progress,
) -> Evidence:
    """Runs the gate that the request asks for."""
    if request.golden == "off":
        return Evidence("off", reason="--golden off")
    scorers = open_scorers()
    if request.golden == "auto":
        report = gate(
            checkpoint.path,
            scorers.prefill,
            thresholds,
            scorers.decode,
            max_tokens=BUDGET_TOKENS if request.budgeted else TOKENS,
            max_length=scorers.max_seq_len,
            progress=_ticks(progress),
            rebuilt=rebuilt(checkpoint),
        )
        return evidence_of(report, "", {"source": "transformers float32, recorded on the fly"})
    path = Path(request.golden)
    golden = GoldenSet.load(path)
    report = check(golden, scorers.prefill, thresholds, scorers.decode)
    made = {k: str(v) for k, v in dataclasses.asdict(golden.made).items()}
    return evidence_of(report, hashlib.sha256(path.read_bytes()).hexdigest(), made)


def mean_kl(evidence: Evidence) -> float:
    """The measured divergence that a budget is about, in nats."""
    return next(m.value for m in evidence.measurements if m.name == MEAN_KL)


def _ticks(progress: Progress) -> Callable[[int, int], None]:
    seen = 0

    def tick(done: int, total: int) -> None:
        nonlocal seen
        if seen == 0:
            progress.phase("golden gate", total, "sequences")
        progress.advance(done - seen)
        seen = done

    return tick


def evidence_of(report: GoldenReport, set_hash: str, reference: dict[str, str]) -> Evidence:
    """The report's figures against their limits."""
    t = report.thresholds
    rows = [
        Measurement(MEAN_KL, report.mean_kl, t.mean_kl),
        Measurement("median KL (nats)", report.median_kl),
        Measurement("p99 KL (nats)", report.p99_kl, t.p99_kl),
        Measurement("max KL (nats)", report.max_kl, t.max_kl),
        Measurement("top-1 agreement", report.top1, t.top1, "higher"),
        Measurement("largest logit error", report.logit_error, t.logit_error),
        Measurement("perplexity ratio", report.perplexity_ratio, t.perplexity_ratio),
        Measurement("divergent continuations", len(report.divergences), t.divergent_prompts),
    ]
    if report.decode_error is not None:
        rows.append(Measurement("prefill - decode", report.decode_error, t.decode_error))
    rows = [row.storable() for row in rows]
    return Evidence(
        "passed" if report.passed else "failed",
        golden_set=report.golden,
        set_hash=set_hash,
        reference=reference,
        measurements=tuple(rows),
        reason="; ".join(report.failures),
    )
