"""How fast the linear kernels are, next to what the machine does in the same moment.

Decode (few tokens) is bound by reading weights: GB/s of packed weights, and the share of a plain
stream read measured right before each call. Prefill (many tokens) is bound by arithmetic: Gop/s,
two operations per weight and token.

    python benchmarks/kernels.py [--formats q4_k,q6_k] [--tokens 1,4,8,512] [--n 4096] [--k 4096]
    python benchmarks/kernels.py --experts 64 --chosen 8 --n 768 --k 2048   # a mixture of experts

With --experts, each of them is a gated MLP of width n over tokens of width k, and the weights
counted are those of the experts that some token chose.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from spikeinfer import kernels


@dataclass(frozen=True)
class Sizes:
    """Stacked gated MLPs of width n over tokens of width k, `chosen` of `experts` a token."""

    experts: int
    chosen: int
    n: int
    k: int


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    fmt: kernels.Format, n: int, k: int, tokens: int, threads: int, rounds: int, stream: Any
) -> tuple[float, float, float]:
    """Medians over `rounds`: GB/s of weights, share of stream bandwidth, Gop/s.

    Several copies of the matrix take turns so that no call finds its weights in a cache.
    """
    rng = np.random.default_rng(0)
    blocks = kernels.quantize(rng.standard_normal((n, k), np.float32), fmt, threads)
    copies = max(1, 256_000_000 // blocks.nbytes) if tokens < 64 else 1
    packed = [kernels.pack(blocks, fmt, n, k) for _ in range(copies)]
    x = rng.standard_normal((tokens, k), np.float32)
    times, shares = [], []
    for i in range(rounds):
        weights = packed[i % copies]
        stream_rate = stream.nbytes / seconds(partial(kernels.stream_read, stream, threads))
        taken = seconds(partial(kernels.linear, x, weights, fmt, n, threads=threads))
        times.append(taken)
        shares.append(weights.nbytes / taken / stream_rate)
    middle = statistics.median(times)
    return (
        packed[0].nbytes / middle / 1e9,
        statistics.median(shares),
        2 * n * k * tokens / middle / 1e9,
    )


def measure_experts(
    fmt: kernels.Format, sizes: Sizes, tokens: int, threads: int, rounds: int, stream: Any
) -> tuple[float, float, float]:
    """As `measure`, for stacked experts; each round makes other choices."""
    rng = np.random.default_rng(0)
    shapes = [(sizes.n, sizes.k), (sizes.n, sizes.k), (sizes.k, sizes.n)]
    one = [rng.standard_normal((1, *s), np.float32) for s in shapes]
    packed = [
        kernels.PackedExperts(np.tile(w.data, sizes.experts), fmt, sizes.experts, w.n, w.k)
        for w in (kernels.PackedExperts.quantized(w, fmt, threads) for w in one)
    ]
    each = sum(w.data.nbytes for w in packed) // sizes.experts
    x = rng.standard_normal((tokens, sizes.k), np.float32)
    weights = np.full((tokens, sizes.chosen), 1 / sizes.chosen, np.float32)
    times, rates, shares = [], [], []
    for _ in range(rounds):
        ids = np.stack([rng.permutation(sizes.experts)[: sizes.chosen] for _ in range(tokens)])
        stream_rate = stream.nbytes / seconds(partial(kernels.stream_read, stream, threads))
        taken = seconds(partial(kernels.moe, x, weights, ids, *packed, threads=threads))
        times.append(taken)
        rates.append(len(np.unique(ids)) * each / taken)
        shares.append(rates[-1] / stream_rate)
    operations = 6 * sizes.n * sizes.k * tokens * sizes.chosen
    middle = statistics.median(times)
    return statistics.median(rates) / 1e9, statistics.median(shares), operations / middle / 1e9


def main() -> None:
    """Print one line per format and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--formats", default=",".join(kernels.FORMATS))
    parser.add_argument("--tokens", default="1,2,4,8,16,512")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--chosen", type=int, default=8)
    options = parser.parse_args()
    sizes = Sizes(options.experts, options.chosen, options.n, options.k)
    what = f"{sizes.chosen} of {sizes.experts} experts, " if sizes.experts else ""
    shape = f"{what}[{options.n}, {options.k}]"
    print(f"{kernels.cpu_tier()}, {shape}, threads {options.threads or 'all'}")
    print("format  tokens    GB/s  of stream    Gop/s")
    stream = np.ones(128_000_000, np.uint8)
    for fmt in options.formats.split(","):
        for tokens in map(int, options.tokens.split(",")):
            rounds = max(3, options.rounds // (1 + tokens // 64))
            with_threads = (tokens, options.threads, rounds, stream)
            rate, share, operations = (
                measure_experts(fmt, sizes, *with_threads)
                if sizes.experts
                else measure(fmt, options.n, options.k, *with_threads)
            )
            print(
                f"{fmt:6}  {tokens:6}  {rate:6.1f}     {share:6.2f}  {operations:7.0f}", flush=True
            )


if __name__ == "__main__":
    main()
