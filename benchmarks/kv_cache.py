"""What a quantised KV cache costs: the same weights with each cache format, against f16's.

    .venv/bin/python benchmarks/kv_cache.py .cache/models/SmolLM2-135M-Instruct [--windows 3]

Consecutive windows of 1,000 tokens of the held-out text, every position scored: KL(f16 cache ||
format), share of positions with the same likeliest token, and KL over the window's second half,
where most of a context is old. Then bytes of cache per token and decoding speed behind a context of
1,000 tokens as a ratio to f16's, rounds in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from accuracy import HELD_OUT
from numpy.typing import NDArray
from spikeinfer import SpikeEngine
from spikeinfer.compiler.engine.cache import token_bytes
from spikeinfer.compiler.engine.directory import EngineDirectory
from spikeinfer.compiler.golden.metrics import row_metrics
from spikeinfer.compiler.golden.record import tokenize
from spikeinfer.driver import BuildRequest, build

CONTEXT = 1000
BASE = "f16"
FORMATS = (BASE, "int8", "int4")


@dataclass(frozen=True)
class Row:
    """Figures of one cache format; KL in nats."""

    mean_kl: float
    p99_kl: float
    max_kl: float
    late_kl: float
    top1: float


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--dtype", default="float16", help="of the weights")
    parser.add_argument("--quantization", default="none", help="of the weights")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing; 0: none")
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens of a round")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def build_engine(arguments: argparse.Namespace, kv_format: str, out: Path) -> Path:
    """An engine whose cache has this format."""
    request = BuildRequest(
        arguments.model,
        out / kv_format,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        enable_streaming=True,
        kv_cache_dtype=kv_format,
        max_seq_len=CONTEXT + arguments.steps + 8,
        golden="off",
    )
    build(request)
    return out / kv_format


def windows(checkpoint: Path, limit: int) -> list[list[int]]:
    """Windows of ids that follow each other, each led by the tokenizer's special token."""
    text = HELD_OUT.read_text(encoding="utf-8")
    ids, plain = tokenize(checkpoint, text), tokenize(checkpoint, text, special=False)
    lead = ids[: len(ids) - len(plain)]
    size = CONTEXT - len(lead)
    starts = range(0, len(plain) - size + 1, size)
    return [lead + plain[start : start + size] for start in starts][:limit]


def accuracy(engines: Mapping[str, SpikeEngine], texts: list[list[int]]) -> dict[str, Row]:
    """Each format against the base, pooled over all windows."""
    kl: dict[str, list[NDArray[np.float64]]] = {name: [] for name in engines}
    same: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in engines}
    for ids in texts:
        base = engines[BASE].score(ids)
        for name, engine in engines.items():
            ours = base if name == BASE else engine.score(ids)
            kl[name].append(row_metrics(base, ours).kl)
            same[name].append(base.argmax(-1) == ours.argmax(-1))
    return {name: _row(np.stack(kl[name]), np.stack(same[name])) for name in engines}


def _row(kl: NDArray[np.float64], same: NDArray[np.bool_]) -> Row:
    return Row(
        float(kl.mean()),
        float(np.quantile(kl, 0.99)),
        float(kl.max()),
        float(kl[:, CONTEXT // 2 :].mean()),
        float(same.mean()),
    )


def decode_ratios(
    engines: Mapping[str, SpikeEngine], ids: list[int], rounds: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Decoded tokens per second (median), and its ratio to the base's (median over rounds)."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            done = engine.complete(ids, max_tokens=steps + 1, ignore_eos=True)
            if turn > 0:  # the first one warms caches
                rates[name].append(steps / done.timings.decode)
    return {
        name: (
            statistics.median(own),
            statistics.median(a / b for a, b in zip(own, rates[BASE], strict=True)),
        )
        for name, own in rates.items()
    }


def main() -> None:
    """Builds, measures, prints a table."""
    arguments = parse()
    texts = windows(arguments.model, arguments.windows)
    with tempfile.TemporaryDirectory(prefix="spike-kv-") as directory:
        paths = {name: build_engine(arguments, name, Path(directory)) for name in FORMATS}
        sizes = {name: token_bytes(EngineDirectory.open(p).config) for name, p in paths.items()}
        engines = {name: SpikeEngine(p, threads=arguments.threads) for name, p in paths.items()}
        rows = accuracy(engines, texts)
        speeds = {name: (float("nan"), float("nan")) for name in engines}
        if arguments.rounds:
            speeds = decode_ratios(engines, texts[0], arguments.rounds, arguments.steps)
        for engine in engines.values():
            engine.close()
    print(f"{arguments.model.name}: {len(texts)} windows of {CONTEXT} tokens")
    print("cache  bytes/token   mean KL    p99 KL    max KL  KL 500..   top-1   tok/s  to f16")
    for name, row in rows.items():
        rate, ratio = speeds[name]
        print(
            f"{name:<5}  {sizes[name]:>11,}  {row.mean_kl:8.6f}  {row.p99_kl:8.6f}  "
            f"{row.max_kl:8.4f}  {row.late_kl:8.6f}  {row.top1:.4f}  {rate:6.1f}  {ratio:6.3f}"
        )


if __name__ == "__main__":
    main()
