"""How fast the linear kernels are, next to what the machine does in the same moment.

Decode (few tokens) is bound by reading weights: GB/s of packed weights, and the share of a plain
stream read measured right before each call. Prefill (many tokens) is bound by arithmetic: Gop/s,
two operations per weight and token, and the share of the int8 peak (VNNI from registers; "-" on a
CPU or tier without it), measured likewise. A call from Python costs about 4 us of its own, which
small matrices show.

    python benchmarks/kernels.py [--formats q4_k,q6_k] [--tokens 1,4,8,512] [--n 4096] [--k 4096]
    python benchmarks/kernels.py --model llama-1b                 # the matrices of a model
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

Shape = tuple[int, int]

# [n, k] of a model's matrices, and the formats that q4_k_m gives them.
MODELS: dict[str, tuple[str, tuple[Shape, ...]]] = {
    "smollm2-135m": (
        "q5_0,q8_0",
        ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)),
    ),
    "gemma3-270m": (
        "q5_0,q8_0",
        ((1024, 640), (256, 640), (640, 1024), (2048, 640), (640, 2048), (262144, 640)),
    ),
    "llama-1b": (
        "q4_k,q6_k",
        ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (128256, 2048)),
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Stacked gated MLPs of width n over tokens of width k, `chosen` of `experts` a token."""

    experts: int
    chosen: int
    n: int
    k: int


@dataclass(frozen=True)
class Yardsticks:
    """What the machine can do, measured whenever asked."""

    stream: Any
    threads: int

    def bytes_per_second(self) -> float:
        """Of a stream read."""
        read = partial(kernels.stream_read, self.stream, self.threads)
        return self.stream.nbytes / seconds(read)

    def operations_per_second(self) -> float:
        """Of int8 dot products from registers; 0 if this CPU has no VNNI."""
        rounds = 400_000
        operations = kernels.vnni_run(8, self.threads) * (rounds // 8)
        return operations / seconds(partial(kernels.vnni_run, rounds, self.threads))


@dataclass(frozen=True)
class Work:
    """Of one call: bytes of weights and operations."""

    weights: float
    operations: float


@dataclass
class Measured:
    """Rates of repeated calls."""

    rates: list[float]
    of_stream: list[float]
    operations: list[float]
    of_peak: list[float]

    def add(self, work: Work, taken: float, stream: float, peak: float) -> None:
        """One more call, with the yardsticks measured beside it."""
        self.rates.append(work.weights / taken)
        self.of_stream.append(work.weights / taken / stream)
        self.operations.append(work.operations / taken)
        self.of_peak.append(work.operations / taken / peak if peak else 0.0)

    def row(self) -> str:
        """Medians: GB/s, share of stream, Gop/s, share of peak."""
        rate, of_stream, operations, of_peak = map(
            statistics.median, (self.rates, self.of_stream, self.operations, self.of_peak)
        )
        peak = f"{of_peak:7.2f}" if of_peak else "      -"
        return f"{rate / 1e9:6.1f}     {of_stream:6.2f}  {operations / 1e9:7.0f}  {peak}"


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    fmt: kernels.Format, n: int, k: int, tokens: int, rounds: int, yardsticks: Yardsticks
) -> Measured:
    """Medians over `rounds` calls of one linear.

    Several copies of the matrix take turns so that no call finds its weights in a cache. A call
    that isn't counted goes before, so that the threads are awake, as they are within a step.
    """
    rng = np.random.default_rng(0)
    some = kernels.quantize(rng.standard_normal((min(n, 512), k), np.float32), fmt)
    blocks = np.resize(some, (n, some.shape[1]))  # repeated: quantising is not what is measured
    copies = max(1, 256_000_000 // blocks.nbytes) if tokens < 64 else 1
    packed = [kernels.pack(blocks, fmt, n, k) for _ in range(copies)]
    x = rng.standard_normal((tokens, k), np.float32)
    found = Measured([], [], [], [])
    for i in range(rounds):
        stream, peak = yardsticks.bytes_per_second(), yardsticks.operations_per_second()
        for weights in (packed[2 * i % copies], packed[(2 * i + 1) % copies]):
            call = partial(kernels.linear, x, weights, fmt, n, threads=yardsticks.threads)
            taken = seconds(call)
        found.add(Work(weights.nbytes, 2 * n * k * tokens), taken, stream, peak)
    return found


def measure_experts(
    fmt: kernels.Format, sizes: Sizes, tokens: int, rounds: int, yardsticks: Yardsticks
) -> Measured:
    """As `measure`, for stacked experts; each round makes other choices."""
    rng = np.random.default_rng(0)
    shapes = [(sizes.n, sizes.k), (sizes.n, sizes.k), (sizes.k, sizes.n)]
    one = [rng.standard_normal((1, *s), np.float32) for s in shapes]
    packed = [
        kernels.PackedExperts(np.tile(w.data, sizes.experts), fmt, sizes.experts, w.n, w.k)
        for w in (kernels.PackedExperts.quantized(w, fmt) for w in one)
    ]
    each = sum(w.data.nbytes for w in packed) // sizes.experts
    x = rng.standard_normal((tokens, sizes.k), np.float32)
    weights = np.full((tokens, sizes.chosen), 1 / sizes.chosen, np.float32)
    operations = 6 * sizes.n * sizes.k * tokens * sizes.chosen
    found = Measured([], [], [], [])
    for _ in range(rounds):
        ids = np.stack([rng.permutation(sizes.experts)[: sizes.chosen] for _ in range(tokens)])
        stream, peak = yardsticks.bytes_per_second(), yardsticks.operations_per_second()
        call = partial(kernels.moe, x, weights, ids, *packed, threads=yardsticks.threads)
        work = Work(len(np.unique(ids)) * each, operations)
        found.add(work, seconds(call), stream, peak)
    return found


def main() -> None:
    """Print one line per shape, format and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--formats", help="default: the model's, or all")
    parser.add_argument("--tokens", default="1,2,4,8,16,512")
    parser.add_argument("--model", choices=MODELS, help="the shapes of a model instead of n and k")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--chosen", type=int, default=8)
    options = parser.parse_args()
    usual, shapes = MODELS.get(
        options.model, (",".join(kernels.FORMATS), ((options.n, options.k),))
    )
    experts = f", {options.chosen} of {options.experts} experts" if options.experts else ""
    print(f"{kernels.cpu_tier()}, threads {options.threads or 'all'}{experts}")
    print("        shape  format  tokens    GB/s  of stream    Gop/s  of peak")
    yardsticks = Yardsticks(np.ones(128_000_000, np.uint8), options.threads)
    for n, k in shapes:
        for fmt in (options.formats or usual).split(","):
            for tokens in map(int, options.tokens.split(",")):
                rounds = max(5, options.rounds // (1 + tokens // 64))
                sizes = Sizes(options.experts, options.chosen, n, k)
                found = (
                    measure_experts(fmt, sizes, tokens, rounds, yardsticks)
                    if options.experts
                    else measure(fmt, n, k, tokens, rounds, yardsticks)
                )
                print(f"{n:>6}, {k:>5}  {fmt:6}  {tokens:6}  {found.row()}", flush=True)


if __name__ == "__main__":
    main()
