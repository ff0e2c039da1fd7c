"""Spellings of norms and activations that are raised, and why others are not."""

from __future__ import annotations

import pytest
from spikeinfer.compiler.ir import Graph, parse_graph, print_node
from spikeinfer.passes.base import PassReport
from spikeinfer.passes.manager import run_pass
from spikeinfer.passes.raise_activation import RaiseActivation
from spikeinfer.passes.raise_layer_norm import RaiseLayerNorm
from spikeinfer.passes.raise_rms_norm import RaiseRmsNorm

HEAD = """graph norm traced {
  input %x : f32[T, 64]
  input %z : f32[T, 64]
  const @w : f32[64] = parameter "w"
  const @short : f32[1] = parameter "short"
"""


def _run(body: str) -> tuple[Graph, PassReport]:
    """Runs raise-rms-norm; `body` has lines without types: `name = op(...) : wide or narrow`."""
    lines = [line.strip() for line in body.strip().splitlines()]
    typed = [
        f"  %{line.replace(' : W', ' : f32[T, 64]').replace(' : N', ' : f32[T, 1]')}"
        for line in lines
    ]
    graph = parse_graph(HEAD + "\n".join(typed) + "\n  output %y\n}\n")
    return graph, run_pass(graph, RaiseRmsNorm())


def _last(graph: Graph) -> str:
    return print_node(graph.nodes[-1])


MEAN = """q = mul(%x, %x) : W
m = mean(%q, axis=1, keepdim=true) : N
"""
ROOT = MEAN + "e = add(1e-06, %m) : N\n"
CORE = "%x, eps=1e-06"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (ROOT + "r = rsqrt(%e) : N\ny = mul(%r, %x) : W", CORE),
        (ROOT + "r = sqrt(%e) : N\ny = div(%x, %r) : W", CORE),
        (ROOT + "r = pow(%e, -0.5) : N\ny = mul(%x, %r) : W", CORE),
        (ROOT + "r = pow(%e, 0.5) : N\ny = div(%x, %r) : W", CORE),
        (ROOT + "s = sqrt(%e) : N\nr = reciprocal(%s) : N\ny = mul(%x, %r) : W", CORE),
        (ROOT + "s = sqrt(%e) : N\nr = div(1.0, %s) : N\ny = mul(%x, %r) : W", CORE),
        (MEAN + "r = rsqrt(%m) : N\ny = mul(%x, %r) : W", "%x, eps=0.0"),
        (
            "q = pow(%x, 2.0) : W\nt = sum(%q, axis=-1, keepdim=true) : N\nm = div(%t, 64) : N\n"
            "e = add(%m, 1e-06) : N\nr = rsqrt(%e) : N\ny = mul(%x, %r) : W",
            CORE,
        ),
        (ROOT + "r = rsqrt(%e) : N\nn = mul(%x, %r) : W\ny = mul(%n, @w) : W", "%x, @w, eps=1e-06"),
        (
            ROOT + "r = rsqrt(%e) : N\nn = mul(%x, %r) : W\ny = mul(%n, %z) : W",
            "%n, %z",  # what it is multiplied with is no weight: the norm ends before it
        ),
    ],
)
def test_rms_norm_in_every_spelling(body: str, arguments: str) -> None:
    graph, report = _run(body)
    assert len(report.fired) == 1
    assert not report.missed
    assert f"({arguments})" in _last(graph)
    assert sum(n.op == "rms_norm" for n in graph.nodes) == 1


def test_one_plus_weight_is_an_offset() -> None:
    text = HEAD + (
        "  %p = add(@w, 1.0) : f32[64]\n  %q = pow(%x, 2) : f32[T, 64]\n"
        "  %m = mean(%q, axis=-1, keepdim=true) : f32[T, 1]\n  %e = add(%m, 1e-06) : f32[T, 1]\n"
        "  %r = rsqrt(%e) : f32[T, 1]\n  %n = mul(%x, %r) : f32[T, 64]\n"
        "  %y = mul(%n, %p) : f32[T, 64]\n  output %y\n}\n"
    )
    graph = parse_graph(text)
    run_pass(graph, RaiseRmsNorm())
    assert [print_node(n) for n in graph.nodes] == [
        "%y = rms_norm(%x, @w, eps=1e-06, offset=1.0) : f32[T, 64]"
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "q = pow(%x, 2) : W\nt = sum(%q, axis=-1, keepdim=true) : N\ne = add(%t, 1e-06) : N\n"
            "r = rsqrt(%e) : N\ny = mul(%x, %r) : W",
            "expected mean, found sum|expected mul, found sum|expected div, found sum",
        ),
        (ROOT + "r = rsqrt(%e) : N\ny = mul(%z, %r) : W", "%x is not %z"),
        (
            "q = pow(%x, 3) : W\nm = mean(%q, axis=-1, keepdim=true) : N\n"
            "e = add(%m, 1e-06) : N\nr = rsqrt(%e) : N\ny = mul(%x, %r) : W",
            "3 is not 2|expected mul, found pow",
        ),
        (
            "q = pow(%x, 2) : W\nt = sum(%q, axis=-1, keepdim=true) : N\nm = div(%t, 63) : N\n"
            "e = add(%m, 1e-06) : N\nr = rsqrt(%e) : N\ny = mul(%x, %r) : W",
            "a sum over 64 elements is divided by 63",
        ),
    ],
)
def test_a_near_miss_says_why(body: str, reason: str) -> None:
    _, report = _run(body)
    assert not report.fired
    assert len(report.missed) == 1
    assert any(part in report.missed[0].reason for part in reason.split("|")), report.missed[0]


LAYER_NORM = """graph norm fused {
  input %x : f32[T, 64]
  const @w : f32[64] = parameter "w"
  const @b : f32[64] = parameter "b"
  %m = mean(%x, axis=1, keepdim=true) : f32[T, 1]
  %d = sub(%x, %m) : f32[T, 64]
  %n = rms_norm(%d, @w, eps=1e-05OFFSET) : f32[T, 64]
  %y = add(@b, %n) : f32[T, 64]
  output %y
}
"""


def test_layer_norm_takes_its_bias() -> None:
    graph = parse_graph(LAYER_NORM.replace("OFFSET", ""))
    run_pass(graph, RaiseLayerNorm())
    assert _last(graph) == "%y = layer_norm(%x, @w, @b, eps=1e-05) : f32[T, 64]"


def test_layer_norm_with_an_offset_is_a_near_miss() -> None:
    graph = parse_graph(LAYER_NORM.replace("OFFSET", ", offset=1.0"))
    report = run_pass(graph, RaiseLayerNorm())
    assert not report.fired
    assert "its weight has an offset" in report.missed[0].reason


@pytest.mark.parametrize(
    ("lines", "result"),
    [
        (["s = sigmoid(%x)", "y = mul(%s, %x)"], "silu(%x)"),
        (
            [
                "s = mul(%x, 0.7071067811865476)",
                "e = erf(%s)",
                "o = add(1.0, %e)",
                "h = mul(0.5, %x)",
                "y = mul(%o, %h)",
            ],
            "gelu(%x)",
        ),
        (
            [
                "s = mul(%x, 0.7978845608028654)",
                "c = mul(%x, 0.044715)",
                "q = mul(%c, %x)",
                "o = add(%q, 1.0)",
                "i = mul(%s, %o)",
                "t = tanh(%i)",
                "p = add(1.0, %t)",
                "h = mul(%x, 0.5)",
                "y = mul(%h, %p)",
            ],
            'gelu(%x, approximate="tanh")',
        ),
        (["s = mul(%x, 1.702)", "g = sigmoid(%s)", "y = mul(%x, %g)"], None),
        (["s = tanh(%x)", "y = mul(%s, %z)"], None),
    ],
)
def test_activations(lines: list[str], result: str | None) -> None:
    body = "".join(f"  %{line} : f32[T, 64]\n" for line in lines)
    graph = parse_graph(HEAD + body + "  output %y\n}\n")
    report = run_pass(graph, RaiseActivation())
    assert bool(report.fired) == (result is not None)
    assert result is None or f"= {result} :" in _last(graph)
    if result is None and "sigmoid" in body:
        assert "no known activation multiplies by sigmoid" in report.missed[0].reason
