"""The batch loop at loads this machine can't hold: the same scheduler, a fake model, its own clock.

Time passes in steps (as a `StepCost` says) and between arrivals; everything else, queues, blocks,
chunks, pre-emption, is the code that serves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .block_bytes import BlockBytes
from .loop import BatchLoop
from .qos import Qos
from .sampling_params import SamplingParams
from .scheduler import SchedulingPolicy
from .sequence import Completion, Request
from .session import BestLogits, SessionLimits, StepInputs, best_of
from .stats import EngineStats
from .step_cost import StepCost, StepShape

Observed = Sequence[tuple[StepShape, float]]


@dataclass(frozen=True)
class Arrival:
    """A request of a simulated load.

    Attributes:
        time: seconds from the start.
        prompt: token ids; equal beginnings are found in the prefix cache.
        output_tokens: after which it ends.
        qos: its class of service.
    """

    time: float
    prompt: Sequence[int]
    output_tokens: int
    qos: Qos = "interactive"


@dataclass(frozen=True)
class Outcome:
    """What became of a load.

    Attributes:
        completions: in order of the arrivals.
        seconds: from the start to the last token.
        stats: at the end.
    """

    completions: list[Completion]
    seconds: float
    stats: EngineStats

    def first_tokens(self, share: float) -> float:
        """Time to first token that this share of the requests keeps to, seconds."""
        times = [c.timings.tokens[0] for c in self.completions if c.timings.tokens]
        return float(np.quantile(times, share))

    def between_tokens(self, share: float) -> float:
        """Time between two tokens of a request that this share of all keeps to, seconds."""
        gaps = [np.diff(c.timings.tokens) for c in self.completions]
        return float(np.quantile(np.concatenate(gaps), share))


class SimulatedSession:
    """A session whose steps take the time that `cost` says, on a clock of its own.

    Args:
        limits: of the engine.
        cost: of its steps.
        observed: steps that ran, and their seconds. A step takes as much longer or shorter than
            predicted as one of them did, at random among those of its kind: decoding, prompts, or
            both. None of that kind = exactly what is predicted.
    """

    def __init__(self, limits: SessionLimits, cost: StepCost, observed: Observed = ()) -> None:
        self.limits = limits
        self.blocks = BlockBytes([np.zeros(limits.num_blocks, np.uint8)], limits.num_blocks)
        self.seconds = 0.0
        self._cost = cost
        self._ratios: dict[tuple[bool, bool], list[float]] = {}
        for shape, taken in observed:
            self._ratios.setdefault(_kind(shape), []).append(taken / cost.seconds(shape))
        self._random = random.Random(0)

    def now(self) -> float:
        """The clock."""
        return self.seconds

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += max(seconds, 0.0)

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Let the step's time pass; every logit is 0."""
        starts, rows = inputs.seq_starts, inputs.logit_rows.size
        parts = zip(np.diff(starts).tolist(), inputs.positions[starts[:-1]].tolist(), strict=True)
        shape = StepShape.of(parts, rows)
        ratios = self._ratios.get(_kind(shape), (1.0,))
        self.seconds += self._cost.seconds(shape) * self._random.choice(ratios)
        return np.zeros((rows, self.limits.vocab_size), np.float32)

    def best(self, inputs: StepInputs) -> BestLogits:
        """The same; the best of equal logits is the first."""
        return best_of(self.step(inputs))

    def close(self) -> None:
        """Nothing to let go of."""


def _kind(shape: StepShape) -> tuple[bool, bool]:
    return shape.reads > 0, shape.chunk_reads > 0


def simulate(
    arrivals: Sequence[Arrival],
    limits: SessionLimits,
    cost: StepCost,
    policy: SchedulingPolicy | None = None,
    observed: Observed = (),
) -> Outcome:
    """Run a load against a model of costs.

    Args:
        arrivals: in order of time.
        limits: of the engine; a vocabulary of 1 is enough.
        cost: what its steps take; `CostModel` fits it to measured ones.
        policy: of the scheduler.
        observed: see `SimulatedSession`.
    """
    session = SimulatedSession(limits, cost, observed)
    loop = BatchLoop(session, policy=policy, now=session.now)
    return replay(arrivals, loop, limits.max_seq_len, session.now, session.wait)


def replay(
    arrivals: Sequence[Arrival],
    loop: BatchLoop,
    max_seq_len: int,
    now: Callable[[], float],
    wait: Callable[[float], None],
) -> Outcome:
    """Run a load to its end, whatever executes the steps.

    Args:
        arrivals: in order of time, counted from now.
        loop: with nobody in it.
        max_seq_len: of its session.
        now: the loop's clock.
        wait: lets so many seconds pass.
    """
    start = now()
    coming = deque((start + arrival.time, _request(arrival, max_seq_len)) for arrival in arrivals)
    requests = [request for _, request in coming]
    while coming or not loop.idle:
        while coming and coming[0][0] <= now():
            moment, request = coming.popleft()
            loop.add(request, moment)  # it came during a step, maybe
        delay = coming[0][0] - now() if loop.idle else loop.step()
        if delay > 0:
            wait(min(delay, coming[0][0] - now()) if coming else delay)
    return Outcome([r.completion() for r in requests], now() - start, loop.stats())


def _request(arrival: Arrival, max_seq_len: int) -> Request:
    params = SamplingParams(max_tokens=arrival.output_tokens)
    return Request(arrival.prompt, params, max_seq_len, (), None, arrival.qos)
