"""Where the time of one decode step goes: by kind of op, between nodes, and in Python.

    python benchmarks/step.py .cache/engines/smollm2 [--context 32] [--steps 64] [--rounds 7]

Greedy decoding of one sequence through `SpikeEngine`, in rounds that take turns with a plain stream
read; medians over the rounds. There is a clock around every call that makes up the Python part, one
around ONNX Runtime's run, and one inside each of our ops (ONNX Runtime's profiler takes longer than
most nodes). What is left of the run are its own nodes and what lies between nodes.

Kinds that read weight matrices are marked with a `*`; the last lines set them against a stream read
of the same bytes, and everything else against the step.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from spikeinfer import SpikeEngine, kernels
from spikeinfer.compiler.engine.directory import EngineDirectory
from spikeinfer.runtime import loop as batch_loop
from spikeinfer.runtime import turn as batch_turn
from spikeinfer.runtime.sequence import Request

STREAMS = ("Linear", "Qkv", "GatedMlp", "MoE", "Head")
STREAM_BYTES = 256_000_000


class Clocks:
    """Seconds of every call that was wrapped, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = defaultdict(list)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.calls[name].append(time.perf_counter() - start)

        return timed

    def per_step(self, steps: int) -> dict[str, float]:
        """Microseconds of a decode step; the first call was the prompt's. Begins anew."""
        result = {name: 1e6 * sum(calls[1:]) / steps for name, calls in self.calls.items()}
        self.calls.clear()
        return result


class TimedRun:
    """An ONNX Runtime session whose runs are timed."""

    def __init__(self, session: Any, clocks: Clocks) -> None:
        self._session = session
        self.run_with_iobinding = clocks.around("run", session.run_with_iobinding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class OpClocks:
    """Our ops' own clocks, in the library that ONNX Runtime has loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(kernels.ops_library()))

    def start(self) -> None:
        """Count from zero."""
        self._library.SpikeTimeOps(1)

    def per_step(self, steps: int) -> dict[str, tuple[float, float]]:
        """Nodes and microseconds of one step, by kind; stops counting."""
        cursor, name = ctypes.c_void_p(), ctypes.c_char_p()
        calls, spent = ctypes.c_int64(), ctypes.c_int64()
        found: dict[str, tuple[float, float]] = {}
        results = [ctypes.byref(value) for value in (cursor, name, calls, spent)]
        while self._library.SpikeOpTime(*results):
            if calls.value and name.value:
                kind = name.value.decode()
                found[kind] = (calls.value / steps, spent.value / 1e3 / steps)
        self._library.SpikeTimeOps(0)
        return found


def with_clocks(engine: SpikeEngine, clocks: Clocks, ops: OpClocks) -> SpikeEngine:
    """Puts a clock around every part of the engine's step; the ops' begin behind the prompt."""
    session: Any = engine._loaded.session
    session._session = TimedRun(session._session, clocks)
    timed = clocks.around("session", session.best)

    def best(inputs: Any) -> Any:
        found = timed(inputs)
        if len(clocks.calls["session"]) == 1:
            ops.start()
        return found

    session.best = best
    loop: Any = batch_loop
    loop.step_inputs = clocks.around("lay out", loop.step_inputs)
    turns: Any = batch_turn
    turns.choose_best = clocks.around("sample", turns.choose_best)
    request: Any = Request
    request.accept = clocks.around("accept", request.accept)
    return engine


def decode(engine: SpikeEngine, context: int, steps: int) -> float:
    """Microseconds of one step behind a prompt of `context` tokens."""
    prompt = [1 + i % 1000 for i in range(context)]
    done = engine.complete(prompt, max_tokens=steps + 1, ignore_eos=True)
    return 1e6 * done.timings.decode / steps


def python_parts(step: float, clocked: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Microseconds of ONNX Runtime's run and of each Python part, from the clocks' nested spans."""
    alone = {
        "lay out the step's arrays": clocked["lay out"],
        "stage and bind": clocked["session"] - clocked["run"],
        "sample": clocked["sample"],
        "detokenise, stop conditions": clocked["accept"],
    }
    rest = step - clocked["run"] - sum(alone.values())
    return clocked["run"], {**alone, "the loop around them": rest}


def stream_rate(memory: Any, threads: int) -> float:
    """Bytes per microsecond of a plain read."""
    start = time.perf_counter()
    kernels.stream_read(memory, threads)
    return float(memory.nbytes / (time.perf_counter() - start) / 1e6)


def streamed_bytes(path: Path) -> int:
    """Bytes of the weights that a step reads; an embedding's own table is read in one row."""
    weights = EngineDirectory.open(path).config.spike.weights
    return sum(weight.bytes for weight in weights if weight.role != "token_embd")


@dataclass
class Round:
    """Microseconds of one decode step: the whole, ONNX Runtime's run, the parts."""

    step: float
    run: float
    nodes: dict[str, tuple[float, float]]
    python: dict[str, float]
    read: float


def measure(options: argparse.Namespace) -> list[Round]:
    """The first round only warms up."""
    clocks, ops = Clocks(), OpClocks()
    with SpikeEngine(options.engine, threads=options.threads) as engine:
        return _measure(with_clocks(engine, clocks, ops), clocks, ops, options)


def _measure(
    engine: SpikeEngine, clocks: Clocks, ops: OpClocks, options: argparse.Namespace
) -> list[Round]:
    memory, rounds = np.ones(STREAM_BYTES, np.uint8), list[Round]()
    weights = streamed_bytes(options.engine)
    for _ in range(options.rounds + 1):
        rate = stream_rate(memory, options.threads or 0)
        step = decode(engine, options.context, options.steps)
        nodes = ops.per_step(options.steps)
        run, python = python_parts(step, clocks.per_step(options.steps))
        rounds.append(Round(step, run, nodes, python, weights / rate))
    return rounds[1:]


def report(rounds: list[Round]) -> None:
    """The table and its summary."""
    step = statistics.median(r.step for r in rounds)
    lines: list[tuple[str, str, float]] = []
    for kind, (count, _) in rounds[0].nodes.items():
        mark = "*" if kind in STREAMS else ""
        us = statistics.median(r.nodes[kind][1] for r in rounds)
        lines.append((f"{kind}{mark}", f"{count:.0f}", us))
    lines.sort(key=lambda line: -line[2])
    rest = statistics.median(r.run - sum(us for _, us in r.nodes.values()) for r in rounds)
    lines.append(("ONNX Runtime: its nodes, between", "", rest))
    for name in rounds[0].python:
        lines.append((f"Python: {name}", "", statistics.median(r.python[name] for r in rounds)))
    print(f"{'part':36} {'links':>5} {'us':>8}  share")
    for name, count, us in lines:
        print(f"{name:36} {count:>5} {us:8.1f}  {us / step:6.1%}")
    span = f"({min(r.step for r in rounds):.1f} - {max(r.step for r in rounds):.1f})"
    print(f"{'step':36} {'':5} {step:8.1f}  {span}")
    weights = statistics.median(_streams(r) for r in rounds)
    read = statistics.median(r.read for r in rounds)
    other = statistics.median(1 - _streams(r) / r.step for r in rounds)
    print(f"\nweight streams {weights:.0f} us, a stream read of the same bytes {read:.0f} us")
    print(f"everything that is no weight stream: {other:.1%} of the step")


def _streams(one: Round) -> float:
    return sum(us for kind, (_, us) in one.nodes.items() if kind in STREAMS)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    report(measure(options))


if __name__ == "__main__":
    main()
