"""What choosing tokens costs: microseconds per row, one row, 32 rows one by one, 32 together.

    .venv/bin/python -P benchmarks/sampling.py

The last two are interleaved in the same run; medians.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from spikeinfer.runtime.sampling import Sampler, choose_rows
from spikeinfer.runtime.sampling_params import SamplingParams

ROWS = 32
VOCABULARIES = (49_152, 262_144)
DRAW: dict[str, Any] = {"temperature": 0.8, "seed": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": DRAW,
    "top_k=50": {**DRAW, "top_k": 50},
    "top_p=0.95": {**DRAW, "top_p": 0.95},
    "min_p=0.05": {**DRAW, "min_p": 0.05},
    "typical_p=0.9": {**DRAW, "typical_p": 0.9},
    "mirostat_tau=5": {**DRAW, "mirostat_tau": 5.0},
    "max_entropy=3": {**DRAW, "max_entropy": 3.0},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "logprobs=5": {"logprobs": 5},
}


def main() -> None:
    """Print the table."""
    print(f"{platform.processor() or platform.machine()}, numpy {np.__version__}")
    print(f"{'vocabulary':>10} {'options':24} {'1 row':>9} {'one by one':>11} {'together':>9}")
    for vocab in VOCABULARIES:
        # As of a trained model: few good tokens above a wide floor.
        logits = np.random.default_rng(0).normal(0, 3, (ROWS, vocab)).astype(np.float32)
        for name, options in OPTIONS.items():
            one, apart, together = microseconds(logits, options)
            print(f"{vocab:>10} {name:24} {one:9.1f} {apart:11.1f} {together:9.1f}", flush=True)


def microseconds(logits: np.ndarray, options: dict[str, Any]) -> tuple[float, float, float]:
    """Medians per row: one row again and again, 32 rows in 32 calls, in one call."""
    samplers = [Sampler(SamplingParams(**options), [1, 2, 3]) for _ in range(ROWS)]

    def apart() -> None:
        for index in range(ROWS):
            choose_rows(logits[index : index + 1], samplers[index : index + 1])

    cases = (
        (1, lambda: choose_rows(logits[:1], samplers[:1])),
        (ROWS, apart),
        (ROWS, lambda: choose_rows(logits, samplers)),
    )
    times: list[list[float]] = [[], [], []]
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end or len(times[0]) < 5:
        for (rows, call), found in zip(cases, times, strict=True):
            found.append(timed(call) / rows)
    one, many, batch = (1e6 * statistics.median(found) for found in times)
    return one, many, batch


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
