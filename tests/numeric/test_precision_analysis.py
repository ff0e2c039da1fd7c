"""Interval analysis is sound, rounding costs fall out of op semantics, overflow is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spikeinfer.compiler.analysis import (
    FORMATS,
    Analysis,
    Bound,
    Evidence,
    Weights,
    intervals,
    locate,
    observe,
)
from spikeinfer.compiler.analysis.intervals import RULES
from spikeinfer.compiler.analysis.sensitivity import STEPS, _softmax
from spikeinfer.compiler.ir import (
    OPS,
    Builder,
    DType,
    Graph,
    Interpreter,
    Kind,
    Level,
    TensorType,
    Value,
    parse_graph,
    print_graph,
)
from torch import Tensor

ROUNDING = 1e-4
"""Relative: bounds hold over real numbers, the interpreter sums in float32."""
WIDTH = 8
UNARY = sorted(
    {n for n, o in OPS.items() if o.kind is Kind.ELEMENTWISE and o.operands == ("x",)}
    - {"logical_not", "cast", "clamp"}
)


def _weight(builder: Builder, rng: np.random.Generator, *shape: int) -> object:
    scale = float(10.0 ** rng.uniform(-1.5, 1.5))
    return builder.data("w", (rng.standard_normal(shape) * scale).astype(np.float32))


def _grow(builder: Builder, rng: np.random.Generator, pool: list[Value]) -> Value:
    """One more random node over f32 values [4, 8]."""
    x, y = (pool[rng.integers(len(pool))] for _ in range(2))
    kind = rng.choice(["unary", "binary", "linear", "fused", "move", "reduce", "select"])
    emit = builder.emit
    if kind == "unary":
        return emit(str(rng.choice(UNARY)), [x])
    if kind == "binary":
        return emit(str(rng.choice(["add", "sub", "mul", "div", "maximum", "minimum"])), [x, y])
    if kind == "linear":
        if rng.random() < 0.5:
            return emit("linear_residual", [x, _weight(builder, rng, WIDTH, WIDTH), y])
        bias = [_weight(builder, rng, WIDTH)] if rng.random() < 0.5 else []
        return emit("linear", [x, _weight(builder, rng, WIDTH, WIDTH), *bias])
    if kind == "fused":
        return _fused(builder, rng, x)
    if kind == "move":
        turned = emit("transpose", [emit("reshape", [x], shape=(4, 2, 4))], perm=(0, 2, 1))
        parts = (
            emit("slice", [y], axis=1, start=0, end=4),
            emit("slice", [x], axis=1, start=4, end=8),
        )
        flat = emit("reshape", [turned], shape=(4, 8))
        return emit("add", [flat, emit("concat", list(parts), axis=1)])
    if kind == "reduce":
        short = emit(str(rng.choice(["sum", "mean", "amax"])), [x], axis=-1, keepdim=True)
        return emit(str(rng.choice(["add", "mul"])), [y, short])
    mask = emit("gt", [x, float(rng.standard_normal())])
    return emit("where", [mask, y, float(rng.standard_normal())])


def _fused(builder: Builder, rng: np.random.Generator, x: Value) -> Value:
    emit = builder.emit
    pick = rng.integers(6)
    if pick == 5:
        three = [_weight(builder, rng, WIDTH, WIDTH) for _ in range(3)]
        biases = [_weight(builder, rng, WIDTH) for _ in range(3)] if rng.random() < 0.5 else []
        node = builder.node("qkv", [x, *three, *biases])
        builder.graph.nodes.append(node)
        q, k, v = node.results
        return emit("add", [emit("sub", [q, k]), v])
    if pick == 0:
        return emit("rms_norm", [x, _weight(builder, rng, WIDTH)], eps=1e-5)
    if pick == 1:
        scale, shift = (_weight(builder, rng, WIDTH) for _ in range(2))
        return emit("layer_norm", [x, scale, shift], eps=1e-5)
    if pick == 2:
        return emit("softmax", [x], axis=-1)
    if pick == 3:
        gate, up = (_weight(builder, rng, 12, WIDTH) for _ in range(2))
        kinds = ["silu", "gelu_tanh", "gelu_erf", "relu", "relu2"]
        down = _weight(builder, rng, WIDTH, 12)
        biases = [_weight(builder, rng, n) for n in (12, 12, WIDTH)] if rng.random() < 0.5 else []
        kind = str(rng.choice(kinds))
        operands = [x, gate, up, down, *biases]
        return emit("gated_mlp", operands, activation=kind, biases=bool(biases))
    heads = [emit("reshape", [x], shape=(1, 2, 4, 4)) for _ in range(3)]
    out = emit("attention", heads, scale=0.5)
    return emit("reshape", [out], shape=(4, 8))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), nodes=st.integers(1, 14), size=st.sampled_from([0.1, 1, 30]))
def test_observed_values_lie_within_their_bounds(seed: int, nodes: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    graph = Graph("random", Level.FUSED)
    builder = Builder(graph)
    kind = TensorType(DType.F32, (4, WIDTH))
    pool = [builder.input("a", kind), builder.input("b", kind)]
    for _ in range(nodes):
        pool.append(_grow(builder, rng, pool))
    given = {n: torch.from_numpy(rng.standard_normal((4, WIDTH)) * size).float() for n in "ab"}
    inputs = {
        n: Bound(float(t.min()), float(t.max()), float(t.norm(dim=-1).max()))
        for n, t in given.items()
    }
    bounds = intervals(graph, Weights(None), 8, inputs)

    def check(node: object, results: list[Tensor]) -> None:
        for value, found in zip(node.results, results, strict=True):  # type: ignore[attr-defined]
            _within(value, found, bounds[id(value)])

    graph.outputs = [pool[-1]]
    Interpreter(graph, lambda name: torch.zeros(0), {}, check).run(given)


def _within(value: Value, found: Tensor, bound: Bound) -> None:
    real = found.double()
    if not torch.isfinite(real).all():
        return  # float32 overflowed, or a root of a negative number: no real number to compare
    slack = ROUNDING * max(1.0, bound.magnitude if bound.is_bounded else 1.0)
    assert real.min() >= bound.low - slack, (value, value.node)
    assert real.max() <= bound.high + slack, (value, value.node)
    rows = real.norm(dim=-1).max() if real.dim() else real.abs()
    assert rows <= bound.norm * (1 + ROUNDING) + ROUNDING, (value, value.node)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_biases_inside_a_gated_mlp_count(activation: str) -> None:
    """Gate and up are their biases alone here, and the product is far beyond any one of them."""
    graph = Graph("biases", Level.FUSED)
    builder = Builder(graph)
    x = builder.input("x", TensorType(DType.F32, (2, WIDTH)))
    weights = [builder.data(n, np.ones((WIDTH, WIDTH), np.float32)) for n in ("g", "u", "d")]
    biases = [builder.data(f"b{n}", np.full(WIDTH, 100, np.float32)) for n in ("g", "u", "d")]
    y = builder.emit("gated_mlp", [x, *weights, *biases], activation=activation, biases=True)
    graph.outputs = [y]
    (found,) = Interpreter(graph, lambda name: x).run({"x": torch.zeros(2, WIDTH)})
    bound = intervals(graph, Weights(None), 8, {"x": Bound(0.0, 0.0, 0.0)})[id(y)]
    assert 8e4 < found.max() <= bound.high < 100 * found.max()


def test_every_op_has_both_rules() -> None:
    moved = {n for n, o in OPS.items() if o.kind is Kind.SHAPE}
    sources = {"arange", "full", "embedding"}
    logical = {"logical_not", "logical_and", "logical_or"}
    assert set(OPS) - set(RULES) == set()
    assert set(OPS) - set(STEPS) - moved - sources - logical == set()


def _certified(text: str, target: DType = DType.F16, **inputs: Tensor) -> dict[str, object]:
    """Decision by value name; observed on the given inputs."""
    graph = parse_graph(text)
    seen = observe(graph, lambda name: torch.zeros(0), [inputs])
    analysis = Analysis(graph, Evidence(None, seen, 8192))
    return {c.value: c for c in analysis.certificates(graph, target)}


SOFTMAX = """
graph softmax traced {
  input %q : f32[4, 64]
  input %k : f32[64, 300]
  %logits = matmul(%q, %k) : f32[4, 300]
  %top = amax(%logits, axis=-1, keepdim=true) : f32[4, 1]
  %shifted = sub(%logits, %top) : f32[4, 300]
  %e = exp(%shifted) : f32[4, 300]
  %total = sum(%e, axis=-1, keepdim=true) : f32[4, 1]
  %p = div(%e, %total) : f32[4, 300]
  %v = matmul(%p, %q2) : f32[4, 64]
  output %v
}
"""


def test_softmax_shifted_logits_go_low_and_its_maximum_and_sum_stay_f32() -> None:
    torch.manual_seed(0)
    text = SOFTMAX.replace("  %logits", "  input %q2 : f32[300, 64]\n  %logits", 1)
    q, k = 3 * torch.randn(4, 64), torch.randn(64, 300)
    found = _certified(text, q=q, k=k, q2=torch.randn(300, 64))
    low = {name for name, c in found.items() if c.decision is DType.F16}  # type: ignore[attr-defined]
    assert low == {"shifted", "e", "p"}
    assert "adds up 300 terms" in found["total"].reason  # type: ignore[attr-defined]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 40), min_size=1, max_size=50))
def test_the_bound_for_shifted_logits_holds(distances: list[float]) -> None:
    shifted = -np.array([0.0, *distances])
    p = np.exp(shifted) / np.exp(shifted).sum()
    moved = np.abs(shifted) @ p  # the sum's relative error, in units
    limit = _softmax(Bound(-1e9, 0.0), len(shifted)).reach - 1 / math.e
    assert moved <= limit * (1 + 1e-9)


RMS = """
graph norm traced {
  input %x : f32[4, 576]
  const @w : f32[1] = data "AACAPw=="
  %square = pow(%x, 2) : f32[4, 576]
  %mean = mean(%square, axis=-1, keepdim=true) : f32[4, 1]
  %safe = add(%mean, 1e-05) : f32[4, 1]
  %root = rsqrt(%safe) : f32[4, 1]
  %normed = mul(%x, %root) : f32[4, 576]
  %y = mul(%normed, @w) : f32[4, 576]
  output %y
}
"""


@pytest.mark.parametrize("target", [DType.F16, DType.BF16])
def test_the_mean_of_squares_stays_f32(target: DType) -> None:
    found = _certified(RMS, target, x=torch.randn(4, 576) * 20)
    kept = {name for name, c in found.items() if c.decision is DType.F32}  # type: ignore[attr-defined]
    assert {"mean", "y"} <= kept
    assert "adds up 576 terms" in found["mean"].reason  # type: ignore[attr-defined]
    assert found["normed"].decision is target  # type: ignore[attr-defined]


def test_a_discrete_choice_is_not_rounded() -> None:
    text = """
    graph router traced {
      input %x : f32[4, 8]
      %scores = sigmoid(%x) : f32[4, 8]
      %best, %which = topk(%scores, k=2) : f32[4, 2], i64[4, 2]
      %y = gather(%x, %which, axis=1) : f32[4, 2]
      output %y
    }"""
    found = _certified(text, x=torch.randn(4, 8))
    assert found["scores"].decision is DType.F32  # type: ignore[attr-defined]
    assert "topk" in found["scores"].reason  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("scale", "reason"),
    [(2.0**15, "exceeds 65504"), (2.0**-20, "below 6.1e-05")],
)
def test_what_does_not_fit_says_by_how_much(scale: float, reason: str) -> None:
    text = """
    graph scaled traced {
      input %x : f32[4, 8]
      %big = mul(%x, SCALE) : f32[4, 8]
      %y = mul(%big, INVERSE) : f32[4, 8]
      output %y
    }""".replace("SCALE", str(scale)).replace("INVERSE", str(1 / scale))
    found = _certified(text, x=torch.randn(4, 8))
    assert found["big"].decision is DType.F32  # type: ignore[attr-defined]
    assert reason in found["big"].reason  # type: ignore[attr-defined]


def test_precision_round_trips_and_the_interpreter_rounds() -> None:
    text = """graph p traced {
  input %x : f32[3]
  %y = mul(%x, 1.0) : f32[3] as f16 in model.layers.0
  %z = add(%y, 0.0) : f32[3]
  output %z
}
"""
    graph = parse_graph(text)
    assert print_graph(graph) == text
    given = torch.tensor([1.0 + 2.0**-12, 70000.0, 1e-9])
    (out,) = Interpreter(graph, lambda name: given).run({"x": given})
    assert out.tolist() == [1.0, math.inf, 0.0]
    assert out.dtype is torch.float32


OVERFLOW = """
graph hides traced {
  input %x : f32[2, 4]
  %gate = mul(%x, 50000.0) : f32[2, 4] in model.layers.3.mlp
  %squashed = tanh(%gate) : f32[2, 4] in model.layers.3.mlp
  %y = mul(%squashed, 2.0) : f32[2, 4] in model
  output %y
}
"""


def test_an_overflow_that_a_later_op_absorbs_is_named() -> None:
    x = torch.linspace(0.5, 4.0, 8).reshape(2, 4)
    report = locate(parse_graph(OVERFLOW), lambda name: x, DType.F16, lambda g: ([{"x": x}], {}))
    first = report.found[0]
    assert (first.value, first.scope, first.elements) == ("gate", "model.layers.3.mlp", 6)
    assert first.largest == pytest.approx(200000.0)
    assert report.absorbed == (("tanh", "model.layers.3.mlp"),)
    assert not report.reaches_output
    calm = locate(parse_graph(OVERFLOW), lambda name: x, DType.BF16, lambda g: ([{"x": x}], {}))
    assert calm.found == ()


def test_what_is_not_finite_in_f32_is_no_clean_bill() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = math.nan
    report = locate(parse_graph(OVERFLOW), lambda name: x, DType.BF16, lambda g: ([{"x": x}], {}))
    assert (report.found[0].value, report.found[0].broken, report.found[0].elements) == (
        "gate", 1, 1,
    )  # fmt: skip
    assert report.reaches_output


def test_formats_are_those_of_torch() -> None:
    for dtype, form in FORMATS.items():
        info = torch.finfo({DType.F16: torch.float16, DType.BF16: torch.bfloat16}[dtype])
        assert (form.largest, form.least) == (info.max, info.tiny)
        assert form.unit == info.eps / 2
