"""Ordering by expected length: what a model can win, and that a bad one costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from spikeinfer.runtime.length_order import FEATURES, LengthOrder, LengthPolicy
from spikeinfer.runtime.sampling import SamplingParams
from spikeinfer.runtime.scheduler import SchedulingPolicy
from spikeinfer.runtime.sequence import Request
from spikeinfer.runtime.session import SessionLimits
from spikeinfer.runtime.simulator import Arrival, Outcome, simulate
from spikeinfer.runtime.step_cost import StepCost

COST = StepCost(base=0.004, token=0.0003, row=0.0003, read=1e-8, chunk_read=1e-8)
SHORT, LONG = 8, 200


def write_model(path: Path, weights: list[float], bias: float = 0.0) -> Path:
    """log(tokens) = features . weights + bias."""
    nodes = [
        helper.make_node("MatMul", ["features", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["log_tokens"]),
    ]
    constants = {"w": np.array(weights, np.float32), "b": np.float32(bias)}
    graph = helper.make_graph(
        nodes,
        "length",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", len(FEATURES)])],
        [helper.make_tensor_value_info("log_tokens", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def load(count: int = 120) -> list[Arrival]:
    """Prompts of one token again and again get short answers, others long ones."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.2, count)).tolist()
    short = rng.random(count) < 0.6
    return [
        Arrival(t, [7] * 16 if s else [i, *range(15)], SHORT if s else LONG)
        for i, (t, s) in enumerate(zip(times, short.tolist(), strict=True))
    ]


def run(lengths: LengthPolicy) -> Outcome:
    limits = SessionLimits(
        vocab_size=1,
        max_num_tokens=256,
        max_batch_size=2,
        max_seq_len=512,
        num_blocks=64,
        block_size=16,
    )
    return simulate(load(), limits, COST, SchedulingPolicy(lengths=lengths))


def first_tokens(outcome: Outcome) -> NDArray[np.float64]:
    return np.array([c.timings.tokens[0] for c in outcome.completions])


def write_guesser(path: Path) -> Path:
    """4 bits of entropy: 200 tokens; none: 8."""
    return write_model(path, [0.0, np.log(LONG / SHORT) / 4, 0.0], np.log(8))


def test_short_answers_go_earlier_and_long_ones_do_not_wait_much_longer(tmp_path: Path) -> None:
    plain = first_tokens(run(LengthPolicy()))
    model = write_guesser(tmp_path / "length.onnx")
    ordered = first_tokens(run(LengthPolicy(model, seconds_per_token=0.05, most=4.0, budget=60)))
    assert ordered.mean() < 0.7 * plain.mean()
    assert ordered.max() < 1.1 * plain.max()


@pytest.mark.parametrize("most", [0.0, 1.0, 3.0])
def test_only_who_came_within_the_bound_overtakes(tmp_path: Path, most: float) -> None:
    model = write_guesser(tmp_path / "length.onnx")
    outcome = run(LengthPolicy(model, seconds_per_token=0.05, most=most, budget=60))
    came = np.array([arrival.time for arrival in load()])
    begun = came + [c.timings.queue for c in outcome.completions]
    overtaken = (begun[:, None] > begun[None]) & (came[:, None] < came[None])  # [who, by whom]
    assert (came[None] - came[:, None])[overtaken].max(initial=0.0) <= most
    assert overtaken.any() == (most > 0)


@pytest.mark.filterwarnings("ignore:.*first come, first served")
@pytest.mark.parametrize("weights", [[np.nan] * 3, [np.inf, 0, 0], [1.0, 1.0]], ids=str)
def test_an_answer_that_is_none_changes_nothing(tmp_path: Path, weights: list[float]) -> None:
    if len(weights) == 2:  # another interface
        path = write_model(tmp_path / "length.onnx", [0.0] * 3)
        model = onnx.load(path)
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2
        onnx.save(model, path)
    else:
        path = write_model(tmp_path / "length.onnx", weights)
    np.testing.assert_array_equal(
        first_tokens(run(LengthPolicy(path))), first_tokens(run(LengthPolicy()))
    )


def test_a_missing_file_is_said_once_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="first come, first served"):
        outcome = run(LengthPolicy(tmp_path / "missing.onnx"))
    np.testing.assert_array_equal(first_tokens(outcome), first_tokens(run(LengthPolicy())))


def request(prompt: list[int]) -> Request:
    return Request(prompt, SamplingParams(), 100, (), None)


def ordering(seconds: float, answer: Callable[[int], float]) -> LengthOrder:
    """An order whose model takes so long."""
    clock = iter(np.arange(100) * seconds)
    predict = lambda rows: np.array([answer(i) for i in range(len(rows))], np.float32)  # noqa: E731
    return LengthOrder(LengthPolicy(), predict, lambda: float(next(clock)))


def test_late_answers_are_not_used() -> None:
    requests = [request([1]), request([1, 2])]
    assert ordering(0.021, lambda i: 1.0).delays(requests) == [5.0, 5.0]
    quick = ordering(0.019, lambda i: np.log(10.0 * (i + 1)))
    assert quick.delays(requests) == pytest.approx([0.33, 0.66])
    assert quick.delays([request([1])] * 2)[0] == pytest.approx(0.33)


def test_the_model_is_asked_no_more_often_than_every_tick() -> None:
    order = ordering(0.0, lambda i: 0.0)
    assert [order.due(now) for now in (0.0, 0.1, 0.19, 0.2, 0.35, 0.41)] == [
        True, False, False, True, False, True,
    ]  # fmt: skip
    assert not LengthOrder(LengthPolicy()).due(0.0)


def test_features() -> None:
    order = ordering(0.0, lambda i: 0.0)
    np.testing.assert_allclose(order.features(request([5] * 20)), [np.log(20), 0, 0])
    np.testing.assert_allclose(order.features(request([1, 2, 3, 4]))[1], 2.0)
    for seconds in (0.01, 0.03):
        order.observe(seconds)
    np.testing.assert_allclose(order.features(request([1]))[2], 0.5)
