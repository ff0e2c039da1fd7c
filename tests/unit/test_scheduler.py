"""The scheduler under loads, by simulation: the loop that serves, on a clock that steps make go.

The model's costs are those of a small one on two cores: a decode step of 4 ms, 3,000 prompt tokens
a second.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple

import numpy as np
import pytest
from spikeinfer.runtime.batch_window import BatchWindow, WindowPolicy
from spikeinfer.runtime.chunking import CHUNK_UNIT, ChunkPolicy
from spikeinfer.runtime.qos import Qos, QosPolicy
from spikeinfer.runtime.scheduler import SchedulingPolicy
from spikeinfer.runtime.session import SessionLimits
from spikeinfer.runtime.simulator import Arrival, Outcome, simulate
from spikeinfer.runtime.step_cost import CostModel, StepCost, StepShape, fit

COST = StepCost(base=0.0034, token=0.0003, row=0.0003, read=1e-8, chunk_read=1e-8)
SIZES = {"max_num_tokens": 2048, "max_batch_size": 32, "max_seq_len": 4096}


def limits(num_blocks: int = 4096, **sizes: int) -> SessionLimits:
    return SessionLimits(vocab_size=1, num_blocks=num_blocks, block_size=32, **{**SIZES, **sizes})


def arrival(
    time: float, prompt: int, output: int, qos: Qos = "interactive", kind: int = 0
) -> Arrival:
    """A prompt that begins like no other kind's."""
    return Arrival(time, [kind, *[0] * (prompt - 1)], output, qos)


def poisson(rate: float, count: int, seed: int = 0) -> list[Arrival]:
    """Different prompts of 20 to 400 tokens, 10 to 200 out."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    sizes = zip(rng.integers(20, 400, count), rng.integers(10, 200, count), strict=True)
    return [
        arrival(time, int(prompt), int(output), kind=number)
        for number, (time, (prompt, output)) in enumerate(zip(times, sizes, strict=True))
    ]


def all_end(outcome: Outcome, arrivals: list[Arrival]) -> bool:
    wanted = [a.output_tokens for a in arrivals]
    return [len(c.token_ids) for c in outcome.completions] == wanted


def gaps_during_a_prompt(policy: SchedulingPolicy) -> float:
    """p99 time between tokens of eight sequences while a prompt of 2,048 runs, over that before."""
    decoding = [arrival(0, 16, 400, kind=i) for i in range(8)]
    load = [*decoding, arrival(1.0, 2048, 2, kind=9)]
    done = simulate(load, limits(), COST, policy).completions
    assert len(done[-1].token_ids) == 2
    start, end = 1.0, 1.0 + done[-1].timings.tokens[0]
    before, beside = [], []
    for completion in done[:8]:
        moments = np.array(completion.timings.tokens)
        gaps = np.diff(moments)
        before += gaps[moments[1:] < start].tolist()
        beside += gaps[(moments[1:] >= start) & (moments[1:] <= end + 0.1)].tolist()
    return float(np.quantile(beside, 0.99) / np.median(before[8:]))


def test_a_long_prompt_does_not_stall_the_others() -> None:
    assert gaps_during_a_prompt(SchedulingPolicy()) <= 3
    unbounded = SchedulingPolicy(chunks=ChunkPolicy(slack=math.inf, unmeasured=1 << 20))
    assert gaps_during_a_prompt(unbounded) >= 10


def test_a_step_is_never_wider_than_its_limits() -> None:
    load = poisson(50, 60)
    outcome = simulate(load, limits(max_num_tokens=24, max_batch_size=8), COST)
    assert all_end(outcome, load)
    computed = sum(len(a.prompt) + a.output_tokens - 1 for a in load)
    assert outcome.stats.tokens == computed
    assert outcome.stats.steps >= computed / 24


def test_long_requests_in_a_small_pool_all_end() -> None:
    """64 of 320 tokens; the pool holds three of them."""
    load = [arrival(0.01 * i, 100, 220, kind=i) for i in range(64)]
    outcome = simulate(load, limits(num_blocks=30), COST)
    assert all_end(outcome, load)
    assert outcome.stats.preemptions > 10
    assert outcome.stats.blocks_owned == 0


def test_blocks_are_taken_on_demand() -> None:
    """Requests that may become long but end soon run side by side: nothing is promised ahead."""
    load = [arrival(0, 30, 60, kind=i) for i in range(32)]
    outcome = simulate(load, limits(num_blocks=128), COST)
    assert outcome.stats.preemptions == 0
    alone = simulate(load[:1], limits(), COST).seconds
    assert outcome.seconds < 8 * alone


def test_urgent_classes_go_first_and_batch_progresses() -> None:
    """Thrice the load that fits, all of it realtime, and one batch request among it."""
    allowances = {"realtime": 0.0, "interactive": 1.0, "batch": 2.0}
    policy = SchedulingPolicy(qos=QosPolicy(allowances))
    flood = [arrival(0.02 * i, 100, 40, "realtime", kind=i) for i in range(350)]
    load = sorted([*flood, arrival(1.0, 100, 40, "batch", kind=-1)], key=lambda a: a.time)
    place = next(i for i, a in enumerate(load) if a.qos == "batch")
    outcome = simulate(load, limits(max_batch_size=4), COST, policy)
    assert all_end(outcome, load)
    batch = outcome.completions[place].timings
    last = outcome.completions[-1].timings
    assert last.tokens[0] > 5  # the queue is long by then
    overtaken = 2.0 / 0.02  # arrivals that rank before it, and the queue it found
    assert batch.tokens[-1] < (overtaken + 50) * outcome.seconds / len(load) * 1.5


def test_a_realtime_request_takes_the_place_of_a_batch_one() -> None:
    load = [arrival(0, 64, 500, "batch", kind=i) for i in range(2)]
    load.append(arrival(0.5, 64, 20, "realtime", kind=5))
    outcome = simulate(load, limits(max_batch_size=2), COST)
    assert all_end(outcome, load)
    assert outcome.completions[2].timings.tokens[0] < 0.1
    assert [c.preemptions for c in outcome.completions] == [0, 1, 0]
    equal = [Arrival(a.time, a.prompt, a.output_tokens) for a in load]
    waited = simulate(equal, limits(max_batch_size=2), COST)
    assert waited.stats.preemptions == 0
    assert waited.completions[2].timings.tokens[0] > 1


def test_nobody_makes_way_for_a_request_that_still_could_not_enter() -> None:
    """The first holds 17 blocks, the second 3; the third needs 10, and one in reserve for each."""
    load = [
        arrival(0, 512, 100, "realtime", kind=0),
        arrival(0, 64, 60, "batch", kind=1),
        arrival(0.2, 320, 20, "realtime", kind=2),
    ]
    for num_blocks, preemptions in ((27, [0, 0, 0]), (30, [0, 1, 0]), (40, [0, 0, 0])):
        outcome = simulate(load, limits(num_blocks), COST)
        assert all_end(outcome, load)
        assert [c.preemptions for c in outcome.completions] == preemptions


def test_a_shared_prefix_is_computed_once() -> None:
    prefix = list(range(1024))
    load = [Arrival(float(i), [*prefix, 5000 + i], 5) for i in range(4)]
    first, *rest = simulate(load, limits(), COST).completions
    assert (first.cached_tokens, [c.cached_tokens for c in rest]) == (0, [1024] * 3)
    assert max(c.timings.tokens[0] for c in rest) < 0.15 * first.timings.tokens[0]


def test_two_that_begin_alike_at_once_share_what_one_has_computed() -> None:
    load = [Arrival(0.0, [*range(1500), 5000 + i], 5) for i in range(3)]
    outcome = simulate(load, limits(max_num_tokens=512), COST)
    assert all_end(outcome, load)
    assert outcome.stats.tokens < 1.5 * 1500
    assert sum(c.cached_tokens for c in outcome.completions) == (outcome.stats.cached_prompt_tokens)
    assert outcome.stats.hit_rate > 0.5


WINDOW = WindowPolicy(objective=0.2, least=0.001, most=0.02)


def test_the_window_grows_within_the_objective_and_shrinks_outside_of_it() -> None:
    window = BatchWindow(WINDOW)
    for _ in range(1000):
        window.observe(0.1)
    assert window.seconds == WINDOW.most
    sizes = []
    for _ in range(200):
        window.observe(0.9)
        sizes.append(window.seconds)
    assert min(sizes) == sizes[-1] == WINDOW.least
    assert window.p95 == pytest.approx(0.9)
    for _ in range(200):
        window.observe(0.1)
    assert window.seconds > WINDOW.least


def test_a_lone_request_waits_no_longer_than_the_window() -> None:
    policy = SchedulingPolicy(window=WindowPolicy(objective=10.0, least=0.02, most=0.02))
    alone = simulate([arrival(0, 10, 1)], limits(), COST).completions[0].timings.tokens[0]
    held = simulate([arrival(0, 10, 1)], limits(), COST, policy).completions[0].timings
    assert held.tokens[0] == pytest.approx(alone + 0.02)
    pair = [arrival(0, 10, 1), arrival(0.015, 10, 1, kind=1)]
    outcome = simulate(pair, limits(), COST, policy)
    assert outcome.stats.steps == 1  # the second came in time
    assert outcome.completions[0].timings.queue == pytest.approx(0.02)
    full = [arrival(0, 10, 1, kind=i) for i in range(4)]
    at_once = simulate(full, limits(max_batch_size=4), COST, policy)
    assert at_once.completions[0].timings.queue == 0  # nobody else could join


def test_chunks_are_at_most_twice_as_wide_as_what_was_measured() -> None:
    model, policy = CostModel(), ChunkPolicy(slack=10.0)
    decoding = StepShape(8, 8, 8 * 100)
    for _ in range(20):  # nothing of them tells what more tokens cost
        model.observe(decoding, COST.seconds(decoding))
    widths = []
    for _ in range(12):
        shape = decoding.plus(policy.most(model, decoding, 0, 2048), 0)
        model.observe(shape, COST.seconds(shape))
        widths.append(shape.tokens)
    assert widths[0] == 8 + 16
    assert all(wide <= 2 * less for less, wide in itertools.pairwise(widths))
    exact = policy.most(known(), decoding, 0, 2048)
    assert widths[-1] - 8 == pytest.approx(exact, rel=0.2)


def known() -> CostModel:
    """It has seen the widest step there is, and its costs are exact."""
    model = CostModel(COST)
    model.widest = 2048
    return model


def test_chunks_keep_to_the_limit() -> None:
    model, decoding = known(), StepShape(8, 8, 8 * 100)
    policy = ChunkPolicy(slack=2.5)
    idle = COST.seconds(decoding)
    for start in (0, 5000, 500_000):
        count = policy.most(model, decoding, start, 2048)
        assert count % CHUNK_UNIT == 0
        bound = COST.seconds(decoding.plus(count, start)) <= 2.5 * idle
        assert bound or count == CHUNK_UNIT  # progress is made whatever it costs
        assert COST.seconds(decoding.plus(count + CHUNK_UNIT, start)) > 2.5 * idle
    assert policy.most(model, decoding, 0, 3) == 3
    assert policy.most(model, StepShape(0, 0, 0), 0, 2048) == 2048
    assert policy.most(CostModel(), decoding, 0, 2048) == 16
    assert ChunkPolicy(seconds=10.0).most(model, decoding, 0, 2048) == 2048


def test_what_single_tokens_read_is_told_from_what_chunks_read() -> None:
    shape = StepShape.of([(1, 9), (3, 4), (1, 0)], rows=2)
    assert shape == StepShape(tokens=5, rows=2, reads=10 + 1, chunk_reads=5 + 6 + 7)
    costs = StepCost(base=0.0, token=0.0, row=0.0, read=1.0, chunk_read=0.1)
    assert costs.seconds(shape) == pytest.approx(11 + 1.8)
    # The same sequences as a step of the simulator: a session sees arrays, not requests.
    alone = simulate([arrival(0, 5, 2)], limits(), costs).completions[0].timings.tokens
    assert alone[0] == pytest.approx(0.1 * 15)
    assert alone[1] - alone[0] == pytest.approx(6)


def test_a_simulated_step_differs_from_its_cost_as_those_of_its_kind_did() -> None:
    seen = [(StepShape(3, 3, 30), COST.seconds(StepShape(3, 3, 30)) * 2)]
    request = [arrival(0, 40, 3)]
    exact = simulate(request, limits(), COST).completions[0].timings.tokens
    slower = simulate(request, limits(), COST, observed=seen).completions[0].timings.tokens
    assert slower[0] == exact[0]  # no step of a prompt was seen
    assert np.diff(slower) == pytest.approx(2 * np.diff(exact))


def steps(count: int, seed: int = 0) -> list[StepShape]:
    rng = np.random.default_rng(seed)
    shapes = []
    for rows in rng.integers(1, 32, count).tolist():
        shape = StepShape(rows, rows, rows * int(rng.integers(10, 2000)))
        shapes.append(shape.plus(int(rng.integers(16, 512)), 0) if rng.random() < 0.5 else shape)
    return shapes


def test_costs_are_learnt_from_steps_some_of_which_were_held_up() -> None:
    rng = np.random.default_rng(1)
    cost = StepCost(0.004, 0.0003, 0.0002, 2e-7, 3e-8)
    noise = np.where(rng.random(300) < 0.1, 5.0, rng.normal(1, 0.02, 300))
    samples = [(s, cost.seconds(s) * n) for s, n in zip(steps(300), noise.tolist(), strict=True)]
    found = fit(samples)
    errors = [abs(found.seconds(s) / cost.seconds(s) - 1) for s in steps(100, seed=2)]
    assert np.quantile(errors, 0.9) < 0.1


def test_costs_are_never_negative() -> None:
    falling = [(StepShape(n, n, n * n), 0.01 / n) for n in range(1, 20)]
    found = fit(falling)
    assert min(astuple(found)) >= 0
    model = CostModel()
    for shape in steps(8):
        model.observe(shape, COST.seconds(shape))
    assert model.cost is not None
    assert model.cost.seconds(StepShape(8, 8, 800)) == pytest.approx(
        COST.seconds(StepShape(8, 8, 800)), rel=0.05
    )
