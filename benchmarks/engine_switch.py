"""What it costs to go from one engine to another in one process.

    .venv/bin/python -P benchmarks/engine_switch.py ENGINE ENGINE [ENGINE...] [--switches 300]

switch: from asking an `EnginePool` for another mapped engine until it is there.
first step: the decode step behind a switch, less the same engine's next one: the other engine's
weights have taken the caches, and its threads may still be looking for work.
mapping: the switch in a pool with room for one engine, so that each maps one and gives another back
(tokenizers stay), and the first step behind it, which finds no page in place; beside it what it
took to load the engine the first time.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from spikeinfer import EnginePool
from spikeinfer.runtime.stream import TokenStream

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CACHE = 256 << 20  # bytes of each engine's KV cache: one of SmolLM2's 8,192 tokens fits


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--switches", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def line(name: str, values: list[float]) -> str:
    """Percentiles in milliseconds."""
    found = 1e3 * np.quantile(values, [0.5, 0.99, 1.0])
    return f"{name}: p50 {found[0]:.3f} ms, p99 {found[1]:.3f} ms, worst {found[2]:.3f} ms"


def among_mapped(pool: EnginePool, names: list[str], count: int) -> list[TokenStream]:
    """A long answer of each, two tokens at a time; returns them."""
    loads, streams, switches, first, second = [], {}, [], [], []
    for name in names:
        begun = time.perf_counter()
        with pool.use(name) as engine:
            loads.append(time.perf_counter() - begun)
            streams[name] = engine.stream(PROMPT, max_tokens=None, ignore_eos=True)
            streams[name].submit_locked()
            engine._loop.step()
    for name in itertools.islice(itertools.cycle(names), count):
        begun = time.perf_counter()
        with pool.use(name) as engine:
            switches.append(time.perf_counter() - begun)
            first.append(seconds(engine._loop.step))
            second.append(seconds(engine._loop.step))
    print(line("switch between mapped engines", switches))
    print(line("  first decode step", first))
    print(line("  next one", second))
    print(line("  difference", np.subtract(first, second).tolist()))
    print(line("loading each the first time", loads), flush=True)
    return list(streams.values())


def by_mapping(pool: EnginePool, names: list[str], count: int) -> None:
    """Each switch maps an engine and takes another one's mapping away."""
    switches, first = [], []

    for number, name in enumerate(itertools.islice(itertools.cycle(names), count + len(names))):
        begun = time.perf_counter()
        with pool.use(name) as engine:
            taken = time.perf_counter() - begun
            prompt = seconds(partial(engine.complete, PROMPT, max_tokens=1))
        assert pool.mapped == (name,)
        if number >= len(names):  # before, tokenizers were read
            switches.append(taken)
            first.append(prompt)
    print(line("switch that maps", switches))
    print(line(f"  first prompt of {len(PROMPT)} tokens behind it", first))


def main() -> None:
    """Among mapped engines, then with room for one."""
    arguments = parse()
    paths = {f"{number} {path}": path for number, path in enumerate(arguments.engines)}
    names = list(paths)
    with EnginePool(paths, 1 << 50, threads=arguments.threads, kv_cache_memory=CACHE) as pool:
        streams = among_mapped(pool, names, arguments.switches)
        for stream in streams:
            stream.close()
        sizes = []
        for name in names:
            before = pool.mapped_bytes
            pool.evict(name)
            sizes.append(before - pool.mapped_bytes)
    with EnginePool(paths, max(sizes), threads=arguments.threads, kv_cache_memory=CACHE) as pool:
        by_mapping(pool, names, arguments.switches // 5)


if __name__ == "__main__":
    main()
