"""How far an engine may be from its source, per storage format.

The figures are two to three times what was measured on real checkpoints (KL and top-1 of the same
format by llama.cpp: q4_k_m 0.045 and 88% on a 135M model, 0.005 and 96% on a 270M one; bf16 weights
0.0009 and 98%; by us on the 135M one: q4_k_s 0.056 and 85%, q3_k_m 0.11 and 76%, q2_k 0.46 and 61%,
q5_k_m 0.083 and 83%, q4_0 0.36 and 67%, for that checkpoint came off a grid of q4_1, which neither
hits), so that they catch a wrong reading, not a hard model. Random tiny models are far more
sensitive to 4-bit error: check them unquantised.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ...errors import SpikeError


@dataclass(frozen=True)
class Thresholds:
    """Limits of one golden check; None leaves a figure unchecked.

    Attributes:
        mean_kl: largest mean KL(source || engine), nats.
        p99_kl: largest 99th percentile of KL, nats.
        max_kl: largest KL at any position, nats.
        top1: smallest share of positions where both put the same token first.
        logit_error: largest absolute difference of any compared logit.
        perplexity_ratio: largest perplexity of the engine over the source's.
        divergent_prompts: how many greedy continuations may differ (near ties don't count).
        decode_error: largest absolute logit difference between prefill and decode.
    """

    mean_kl: float
    p99_kl: float
    max_kl: float | None
    top1: float
    logit_error: float | None
    perplexity_ratio: float
    divergent_prompts: int | None
    decode_error: float | None

    def override(self, values: Mapping[str, float | int | None]) -> Thresholds:
        """These limits with some replaced, for a recipe; SPK543 names the nearest real key."""
        known = [item.name for item in fields(self)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise SpikeError(
                    "SPK543",
                    "golden",
                    f"there is no threshold {key!r}.",
                    f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}.",
                )
        return replace(self, **values)  # type: ignore[arg-type]


# Between prefill and decode only the order of sums differs, but a quantised activation can fall on
# the other side of a rounding step: hence the wide limits of the quantised rows.
THRESHOLDS: dict[str, Thresholds] = {
    "float32": Thresholds(1e-6, 1e-5, 1e-4, 0.995, 1e-3, 1.0005, 0, 1e-3),
    "float16": Thresholds(3e-4, 3e-3, None, 0.97, None, 1.005, None, 0.5),
    "bfloat16": Thresholds(5e-3, 5e-2, None, 0.93, None, 1.02, None, 1.0),
    "q8_0": Thresholds(1e-2, 0.1, None, 0.93, None, 1.02, None, 2.0),
    "q6_k": Thresholds(2e-2, 0.2, None, 0.90, None, 1.03, None, 2.0),
    "q5_k_m": Thresholds(0.15, 1.0, None, 0.75, None, 1.20, None, 2.0),
    "q5_1": Thresholds(0.15, 1.0, None, 0.75, None, 1.20, None, 2.0),
    "q5_0": Thresholds(0.15, 1.0, None, 0.75, None, 1.20, None, 2.0),
    "q4_1": Thresholds(0.15, 1.2, None, 0.75, None, 1.20, None, 2.0),
    "q4_k_m": Thresholds(0.15, 1.2, None, 0.75, None, 1.20, None, 2.0),
    "q4_k_s": Thresholds(0.25, 1.8, None, 0.70, None, 1.30, None, 2.0),
    "q3_k_m": Thresholds(0.35, 1.5, None, 0.50, None, 1.35, None, 2.0),
    "q4_0": Thresholds(0.9, 5.0, None, 0.40, None, 1.80, None, 2.0),
    "int4_sym": Thresholds(0.9, 5.0, None, 0.40, None, 1.80, None, 2.0),
    "q2_k": Thresholds(1.4, 5.0, None, 0.30, None, 3.0, None, 2.0),
    # Formats chosen by a budget: it states the mean KL, the others only tell an engine from noise.
    "mixed": Thresholds(3.0, 9.0, None, 0.20, None, 9.0, None, 2.0),
}

CACHES = {"f16": "float16", "int8": "bfloat16", "int4": "q6_k"}
"""A cache of this format may cost as much as weights of that one: about three times what
benchmarks/kv_cache.py measures on real checkpoints."""


def thresholds_for(quantization: str | None, dtype: str) -> Thresholds:
    """Limits for a build's `--quantization` (None or ``none`` for none) and `--dtype`.

    Raises:
        SpikeError: SPK543 if there are none for the format.
    """
    key = dtype if quantization in (None, "none") else quantization
    if key not in THRESHOLDS:
        raise SpikeError(
            "SPK543",
            "golden",
            f"there are no thresholds for the format {key!r}.",
            f"State them in the recipe, or use one of: {', '.join(THRESHOLDS)}.",
        )
    return THRESHOLDS[str(key)]
