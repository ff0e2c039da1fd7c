"""What ordering by expected length wins, in the simulator: with and without each feature.

    .venv/bin/python -P benchmarks/length_order.py [--out length.onnx] [--seeds 12] [--most 5 6]

Traffic of four made-up kinds (chat, extraction from long prompts, articles from short ones,
templates); a small network (3 x 16 x 1) learns log(output tokens) from one day of it and orders
others, one per seed, with the policy's defaults. Beside it an oracle that knows every answer's
length, which is what a better model could reach, and other bounds on waiting. Load 0.9: the
requests of a day come, at random moments, within 1/0.9 of the time that serving them takes if all
of them wait from the start. Each figure is over first come, first served of the same day; given are
the mean over the days and their standard deviation. Times are the simulator's, so the machine's do
not matter. Made-up traffic shows what the mechanism can do, not what yours would win: train on your
own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from spikeinfer.runtime.length_order import FEATURES, LengthOrder, LengthPolicy
from spikeinfer.runtime.loop import BatchLoop
from spikeinfer.runtime.sampling_params import SamplingParams
from spikeinfer.runtime.scheduler import SchedulingPolicy
from spikeinfer.runtime.sequence import Request
from spikeinfer.runtime.session import SessionLimits
from spikeinfer.runtime.simulator import Arrival, Outcome, SimulatedSession, replay
from spikeinfer.runtime.step_cost import StepCost

LOAD = 0.9
SEATS = 8
KINDS = {  # share, prompt tokens, output tokens (medians), distinct ids of the first 16
    "chat": (0.4, 60, 60, 14),
    "extraction": (0.2, 600, 10, 15),
    "article": (0.2, 30, 300, 13),
    "template": (0.2, 80, 20, 4),
}
SPREAD = 0.4  # of the logarithms
HIDDEN = 16


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="keep the model with all features here")
    parser.add_argument("--cost", type=float, nargs=4, default=(0.0043, 0.0006, 0.0001, 5e-7))
    parser.add_argument("--requests", type=int, default=1200, help="of a day")
    parser.add_argument("--seeds", type=int, default=12, help="days")
    parser.add_argument("--most", type=float, nargs="*", default=[], help="other bounds, seconds")
    parser.add_argument("--only", nargs="*", default=[], help="orders, by their printed names")
    return parser.parse_args()


def traffic(count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals of all kinds, one a second."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, count)).tolist()
    names = rng.choice(list(KINDS), count, p=[kind[0] for kind in KINDS.values()]).tolist()
    return [arrival(rng, time, *KINDS[name][1:]) for time, name in zip(times, names, strict=True)]


def within(load: list[Arrival], seconds: float) -> list[Arrival]:
    """The same arrivals within so many seconds."""
    scale = seconds / load[-1].time
    return [replace(arrival, time=arrival.time * scale) for arrival in load]


def arrival(
    rng: np.random.Generator, time: float, prompt: int, output: int, distinct: int
) -> Arrival:
    """One request of a kind; its first tokens are drawn from few ids or many."""
    lengths = np.exp(rng.normal(np.log([prompt, output]), SPREAD)).astype(int) + 1
    ids = rng.integers(1, 1 << 30, distinct)
    tokens = rng.integers(1, 1 << 30, int(lengths[0]))
    tokens[:16] = rng.choice(ids, 16)[: tokens.size]
    return Arrival(time, tokens.tolist(), int(lengths[1]))


def features(load: list[Arrival]) -> NDArray[np.float32]:
    """As the runtime computes them, ``[N, 3]``; jitter is noise here, as in an even load."""
    order, rng = LengthOrder(LengthPolicy()), np.random.default_rng(1)
    rows = [order.features(Request(a.prompt, SamplingParams(), 1 << 20, (), None)) for a in load]
    found = np.stack(rows)
    found[:, 2] = rng.random(len(load))
    return found


def train(load: list[Arrival], used: list[int]) -> torch.nn.Sequential:
    """A network that sees the `used` features only (the others' weights are 0)."""
    torch.manual_seed(0)
    x = torch.tensor(features(load))
    mask = torch.zeros(len(FEATURES))
    mask[used] = 1
    y = torch.log(torch.tensor([float(a.output_tokens) for a in load]))
    net = torch.nn.Sequential(
        torch.nn.Linear(len(FEATURES), HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(1500):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x * mask)[:, 0], y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        net[0].weight *= mask
    return net


def write(net: torch.nn.Sequential, path: Path) -> Path:
    """As ONNX."""
    first, last = net[0], net[2]
    constants = {
        "w1": first.weight.T, "b1": first.bias, "w2": last.weight[0], "b2": last.bias[0],
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["features", "w1"], ["sum1"]),
        helper.make_node("Add", ["sum1", "b1"], ["biased"]),
        helper.make_node("Tanh", ["biased"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "w2"], ["sum2"]),
        helper.make_node("Add", ["sum2", "b2"], ["log_tokens"]),
    ]
    graph = helper.make_graph(
        nodes,
        "length",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", len(FEATURES)])],
        [helper.make_tensor_value_info("log_tokens", TensorProto.FLOAT, ["N"])],
        [
            numpy_helper.from_array(np.ascontiguousarray(value.detach().numpy()), name)
            for name, value in constants.items()
        ],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


class Oracle(LengthOrder):
    """Knows how long every answer will be."""

    def __init__(self, policy: LengthPolicy) -> None:
        super().__init__(policy, lambda rows: rows[:, 0])

    def delays(self, requests: Sequence[Request]) -> list[float]:
        """By prompt and answer together."""
        return [request.limit * self._policy.seconds_per_token for request in requests]


def run(load: list[Arrival], cost: StepCost, order: LengthOrder) -> Outcome:
    """The load under this ordering."""
    limits = SessionLimits(
        vocab_size=1, max_num_tokens=2048, max_batch_size=SEATS, max_seq_len=8192,
        num_blocks=4096, block_size=32,
    )  # fmt: skip
    session = SimulatedSession(limits, cost)
    # No two prompts begin alike.
    loop = BatchLoop(session, policy=SchedulingPolicy(prefix_cache=False), now=session.now)
    loop.scheduler.lengths = order
    return replay(load, loop, limits.max_seq_len, session.now, session.wait)


def waits(outcome: Outcome) -> NDArray[np.float64]:
    """Mean and longest time to first token, longest time in the queue; seconds ``[3]``."""
    first = [completion.timings.tokens[0] for completion in outcome.completions]
    queue = [completion.timings.queue for completion in outcome.completions]
    return np.array([np.mean(first), max(first), max(queue)])


def orders(
    requests: int, bounds: list[float], folder: Path
) -> dict[str, Callable[[], LengthOrder]]:
    """What is compared, by name: models with all features and without each, oracles, bounds."""
    every = list(range(len(FEATURES)))
    cases = {"all features": every}
    cases |= {f"without {FEATURES[i]}": [j for j in every if j != i] for i in every}
    lesson = traffic(requests, 3)
    found: dict[str, Callable[[], LengthOrder]] = {}

    def add(name: str, path: Path, **policy: float) -> None:
        # A clock that stands: what is compared is the order, not how fast this machine is.
        found[name] = lambda: LengthOrder(LengthPolicy(path, **policy), now=lambda: 0.0)

    for name, used in cases.items():
        add(name, write(train(lesson, used), folder / f"{name}.onnx"))
    for most in bounds:
        add(f"all features, bound {most:g} s", folder / "all features.onnx", most=most)
    found["oracle"] = lambda: Oracle(LengthPolicy())
    found["oracle without a bound"] = lambda: Oracle(LengthPolicy(most=1e6))
    return found


def main() -> None:
    """Train, simulate, print."""
    arguments = parse()
    base, token, row, read = arguments.cost
    cost = StepCost(base, token, row, read, chunk_read=read)
    ratios: dict[str, list[NDArray[np.float64]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = orders(arguments.requests, arguments.most, Path(folder))
        if arguments.only:
            cases = {name: cases[name] for name in arguments.only}
        if arguments.out:
            arguments.out.write_bytes((Path(folder) / "all features.onnx").read_bytes())
        for seed in range(10, 10 + arguments.seeds):
            load = traffic(arguments.requests, seed)
            full = run(within(load, 1e-6), cost, LengthOrder(LengthPolicy())).seconds
            load = within(load, full / LOAD)
            plain = waits(run(load, cost, LengthOrder(LengthPolicy())))
            print(f"{seed}: {len(load) * LOAD / full:.2f} requests/s, first come, first served: "
                  f"TTFT mean {plain[0]:.2f} s, longest {plain[1]:.1f} s", flush=True)  # fmt: skip
            for name, order in cases.items():
                found = waits(run(load, cost, order())) / plain
                ratios.setdefault(name, []).append(found)
                print(f"  {name}: {line(found, [''] * 3)}", flush=True)
    for name, values in ratios.items():
        spread = [f" +- {deviation:.2f}" for deviation in np.std(values, axis=0)]
        print(f"{name}: {line(np.mean(values, axis=0), spread)}")


def line(ratios: NDArray[np.float64], spread: Sequence[str]) -> str:
    """Three ratios with what is to be said of each."""
    names = ("TTFT mean", "longest", "longest in the queue")
    return ", ".join(
        f"{name} {ratio:.2f}x{more}"
        for name, ratio, more in zip(names, ratios, spread, strict=True)
    )


if __name__ == "__main__":
    main()
