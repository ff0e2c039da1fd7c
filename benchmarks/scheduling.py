"""The scheduler on a real engine: stalls, prefixes, and how well the simulator foretells.

    .venv/bin/python -P benchmarks/scheduling.py .cache/models/SmolLM2-135M-Instruct [--only stalls]

stalls: time between tokens of eight streams while a prompt of 2,048 tokens runs, over what it is
without (p99 over the median and over p99), with prompts in chunks and without, in turns.
prefix: time to first token of a second request that shares 1,024 tokens, over the first's; medians.
simulator: three loads in turns, in pieces of a few seconds, each run for real and in the simulator.
Step costs, and how much steps differ from them, are learnt from other requests right before and
after each piece, so that a machine whose speed changes from one half minute to the next is
foretold as it was; percentiles are over all pieces of a load.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from spikeinfer import SpikeEngine
from spikeinfer.driver import BuildRequest, build
from spikeinfer.runtime.chunking import ChunkPolicy
from spikeinfer.runtime.loop import BatchLoop
from spikeinfer.runtime.scheduler import SchedulingPolicy
from spikeinfer.runtime.simulator import Arrival, Outcome, replay, simulate
from spikeinfer.runtime.step_cost import StepCost, StepShape, fit

PARTS = ("stalls", "prefix", "simulator")
CAPACITY = 4096
LOADS = (0.3, 0.6, 0.9)
PROMPT, OUTPUT = (32, 256), (16, 96)
"""Lengths of the simulator's loads, uniform."""
UNCHUNKED = SchedulingPolicy(chunks=ChunkPolicy(slack=math.inf, unmeasured=1 << 30))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint or engine directory")
    parser.add_argument("--quantization", default="q4_k_m", help="of the weights")
    parser.add_argument("--kv-cache", default="f16", help="format of the cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of stalls")
    parser.add_argument("--seconds", type=float, default=4.0, help="of arrivals, each piece")
    parser.add_argument("--pieces", type=int, default=6, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of the simulator")
    parser.add_argument("--only", choices=PARTS)
    return parser.parse_args()


def engine_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """The engine itself, or one built from the checkpoint."""
    if (arguments.model / "manifest.json").exists():
        return Path(arguments.model)
    request = BuildRequest(
        arguments.model,
        folder / "engine",
        quantization=arguments.quantization,
        enable_streaming=True,
        kv_cache_dtype=arguments.kv_cache,
        max_num_tokens=2048,
        max_batch_size=32,
        max_seq_len=CAPACITY,
        golden="off",
    )
    build(request)
    return folder / "engine"


class Bench:
    """Loads on one open engine; every one has a loop, and so a prefix cache, of its own."""

    def __init__(self, engine: SpikeEngine) -> None:
        self.engine = engine
        self.random = np.random.default_rng(0)

    def prompt(self, length: int) -> list[int]:
        """Random ids: no two prompts begin alike."""
        return self.random.integers(5, self.engine.vocab_size, length).tolist()

    def loop(self, policy: SchedulingPolicy | None = None) -> BatchLoop:
        """A fresh loop over the engine's session."""
        return BatchLoop(self.engine._loaded.session, policy=policy)

    def run(self, arrivals: Sequence[Arrival], loop: BatchLoop) -> Outcome:
        """A load for real."""
        return replay(arrivals, loop, self.engine.max_seq_len, time.perf_counter, time.sleep)

    def load(self, rate: float, seconds: float) -> list[Arrival]:
        """Poisson arrivals of so many requests a second."""
        count = max(4, round(rate * seconds))
        times = np.cumsum(self.random.exponential(1 / rate, count)).tolist()
        return [
            Arrival(t, self.prompt(int(self.random.integers(*PROMPT))),
                    int(self.random.integers(*OUTPUT)))
            for t in times
        ]  # fmt: skip


def stalls(bench: Bench, rounds: int) -> None:
    """Eight streams beside a long prompt, with chunks and without in turns; medians."""
    policies = {"chunks": None, "no chunks": UNCHUNKED}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    for _ in range(rounds):
        for name, policy in policies.items():
            found[name].append(stall(bench, bench.loop(policy)))
    for name, figures in found.items():
        middle = {key: np.median([one[key] for one in figures]) for key in figures[0]}
        tails = [one["p99"] / one["idle"] for one in figures]
        print(
            f"{name}: idle {1e3 * middle['idle']:.1f} ms, p99 {1e3 * middle['idle p99']:.1f} ms; "
            f"beside the prompt p50 {1e3 * middle['p50']:.1f} ms, p99 {1e3 * middle['p99']:.1f} ms "
            f"= {np.median(tails):.2f}x idle ({min(tails):.2f} to {max(tails):.2f}), "
            f"{np.median([one['p99'] / one['idle p99'] for one in figures]):.2f}x idle p99; "
            f"the prompt's first token after {middle['first']:.2f} s",
            flush=True,
        )


def stall(bench: Bench, loop: BatchLoop) -> dict[str, float]:
    """Seconds between tokens of eight streams alone and while a prompt runs, and of the prompt."""
    warm = [Arrival(0, bench.prompt(40 + 60 * i), 24) for i in range(8)]
    bench.run(warm, loop)  # the cost model learns
    alone = bench.run([Arrival(0, bench.prompt(32), 120) for _ in range(8)], loop)
    streams = [Arrival(0, bench.prompt(32), 600) for _ in range(8)]
    outcome = bench.run([*streams, Arrival(0.3, bench.prompt(2048), 2)], loop)
    first = 0.3 + outcome.completions[-1].timings.tokens[0]
    gaps = []
    for completion in outcome.completions[:8]:
        moments = np.array(completion.timings.tokens)
        during = (moments[1:] > 0.3) & (moments[:-1] < first)
        gaps += np.diff(moments)[during].tolist()
    return {
        "idle": alone.between_tokens(0.5),
        "idle p99": alone.between_tokens(0.99),
        "p50": float(np.quantile(gaps, 0.5)),
        "p99": float(np.quantile(gaps, 0.99)),
        "first": first - 0.3,
    }


def prefix(bench: Bench) -> None:
    """A second request with the same 1,024 tokens at its beginning."""
    ratios, firsts = [], []
    for _ in range(5):
        loop, shared = bench.loop(), bench.prompt(1024)
        times = []
        for tail in ([7, 8, 9], [10, 11, 12]):
            outcome = bench.run([Arrival(0, [*shared, *tail], 1)], loop)
            times.append(outcome.first_tokens(0.5))
        firsts.append(times[0])
        ratios.append(times[1] / times[0])
    print(
        f"prefix: first {1e3 * np.median(firsts):.0f} ms, second {np.median(ratios):.3f}x of it "
        f"({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def simulator(bench: Bench, seconds: float, pieces: int, loads: Sequence[float]) -> None:
    """Foretold against measured percentiles."""
    pairs: dict[float, list[tuple[Outcome, Outcome]]] = {share: [] for share in loads}
    samples = calibration(bench)
    for _ in range(pieces):
        for share in loads:
            load = bench.load(share * capacity(fit(samples)), seconds)
            found = bench.run(load, bench.loop())
            after = calibration(bench)
            around = [*samples, *after]
            cost = fit(around)
            told = simulate(load, bench.engine._limits, cost, observed=around)
            pairs[share].append((found, told))
            samples = after
    for share, outcomes in pairs.items():
        real, said = (together(side) for side in zip(*outcomes, strict=True))
        cells = []
        for name in ("first_tokens", "between_tokens"):
            for quantile in (0.5, 0.95):
                measured, foretold = (getattr(o, name)(quantile) for o in (real, said))
                cells.append(f"{name} p{100 * quantile:.0f} {1e3 * measured:.1f} ms"
                             f" ({foretold / measured - 1:+.0%})")  # fmt: skip
        cells.append(f"in all {real.seconds:.0f} s ({said.seconds / real.seconds - 1:+.0%})")
        print(f"  load {share}: {len(real.completions)} requests, {', '.join(cells)}", flush=True)


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """As if of one load."""
    completions = [completion for outcome in outcomes for completion in outcome.completions]
    return Outcome(completions, sum(o.seconds for o in outcomes), outcomes[-1].stats)


def calibration(bench: Bench) -> list[tuple[StepShape, float]]:
    """Steps of few requests at a time and of many, and what they took."""
    return [*observed(bench, 2.0, 1.0), *observed(bench, 6.0, 1.0)]


def observed(bench: Bench, rate: float, span: float) -> list[tuple[StepShape, float]]:
    """Steps under `rate` requests a second for so many seconds, and what they took."""
    found: list[tuple[StepShape, float]] = []
    loop = bench.loop()
    costs = loop.scheduler.costs
    learn = costs.observe

    def observe(shape: StepShape, taken: float) -> None:
        found.append((shape, taken))
        learn(shape, taken)

    costs.observe = observe  # type: ignore[method-assign]
    bench.run(bench.load(rate, span), loop)
    return found


def capacity(cost: StepCost) -> float:
    """Requests a second with 16 sequences in each step."""
    prompt, output = sum(PROMPT) / 2, sum(OUTPUT) / 2
    step = cost.seconds(StepShape(16, 16, int(16 * (prompt + output / 2))))
    return 1 / (output * step / 16 + prompt * cost.token)


def main() -> None:
    """Build if need be, then all parts."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        path = engine_of(arguments, Path(folder))
        with SpikeEngine(path, threads=arguments.threads) as engine:
            bench = Bench(engine)
            bench.run([Arrival(0, bench.prompt(300), 4)], bench.loop())
            if arguments.only in (None, "stalls"):
                stalls(bench, arguments.rounds)
            if arguments.only in (None, "prefix"):
                prefix(bench)
            if arguments.only in (None, "simulator"):
                simulator(bench, arguments.seconds, arguments.pieces, arguments.loads)


if __name__ == "__main__":
    main()
