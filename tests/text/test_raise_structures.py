"""Rotations, attention and gated MLPs: spellings that are raised, and why others are not."""

from __future__ import annotations

import re

import pytest
from spikeinfer.compiler.ir import Graph, parse_graph, print_node
from spikeinfer.passes.base import Pass, PassReport
from spikeinfer.passes.manager import run_pass
from spikeinfer.passes.raise_attention import RaiseAttention
from spikeinfer.passes.raise_gated_mlp import RaiseGatedMlp
from spikeinfer.passes.raise_rope import RaiseRope


def _run(text: str, step: Pass) -> tuple[Graph, PassReport]:
    graph = parse_graph(text)
    return graph, run_pass(graph, step)


def _only(graph: Graph, op: str) -> str:
    (node,) = [n for n in graph.nodes if n.op == op]
    return print_node(node)


ROPE = """graph rope traced {{
  input %x : f32[B, S, 4, 8]
  input %cos : f32[B, S, 1, 8]
  input %sin : f32[B, S, 1, 8]
{body}  output %y
}}
"""
HALVES = """
  %a = slice(%x, axis=3, start=0, end=4) : f32[B, S, 4, 4]
  %b = slice(%x, axis=3, start=4, end=8) : f32[B, S, 4, 4]
"""
PAIRS = """
  %a = slice(%x, axis=3, start=0, end=8, step=2) : f32[B, S, 4, 4]
  %b = slice(%x, axis=3, start=1, end=8, step=2) : f32[B, S, 4, 4]
"""
STACKED = """
  %p = reshape(%nb, shape=[B, S, 4, 4, 1]) : f32[B, S, 4, 4, 1]
  %q = reshape(%a, shape=[B, S, 4, 4, 1]) : f32[B, S, 4, 4, 1]
  %st = concat(%p, %q, axis=4) : f32[B, S, 4, 4, 2]
  %rot = reshape(%st, shape=[B, S, 4, 8]) : f32[B, S, 4, 8]
"""
NEGATED = "  %nb = neg(%b) : f32[B, S, 4, 4]\n"
SUM = """
  %xc = mul(%cos, %x) : f32[B, S, 4, 8]
  %rs = mul(%sin, %rot) : f32[B, S, 4, 8]
  %y = add(%rs, %xc) : f32[B, S, 4, 8]
"""
JOINED = "  %rot = concat(%nb, %a, axis=-1) : f32[B, S, 4, 8]\n"
OTHER_SIGN = """
  %na = neg(%a) : f32[B, S, 4, 4]
  %rot = concat(%b, %na, axis=3) : f32[B, S, 4, 8]
"""
VIEWED = """
  %v = reshape(%x, shape=[B, S, 4, 2, 4]) : f32[B, S, 4, 2, 4]
  %va = slice(%v, axis=3, start=0, end=1) : f32[B, S, 4, 1, 4]
  %vb = slice(%v, axis=3, start=1, end=2) : f32[B, S, 4, 1, 4]
  %vn = neg(%vb) : f32[B, S, 4, 1, 4]
  %vj = concat(%vn, %va, axis=3) : f32[B, S, 4, 2, 4]
  %rot = reshape(%vj, shape=[B, S, 4, 8]) : f32[B, S, 4, 8]
"""


@pytest.mark.parametrize(
    ("body", "style"),
    [
        (HALVES + NEGATED + JOINED + SUM, "half"),
        (VIEWED + SUM, "half"),
        (PAIRS + NEGATED + STACKED + SUM, "interleaved"),
        (HALVES + OTHER_SIGN + SUM.replace("add(%rs, %xc)", "sub(%xc, %rs)"), "half"),
    ],
)
def test_rotations_by_what_they_do(body: str, style: str) -> None:
    graph, report = _run(ROPE.format(body=body), RaiseRope())
    assert len(report.fired) == 1
    found = _only(graph, "rope")
    assert found.startswith("%y = rope(%x, ")
    assert ('style="interleaved"' in found) == (style == "interleaved")


@pytest.mark.parametrize(
    "body",
    [
        HALVES + OTHER_SIGN + SUM,  # turned the other way round
        PAIRS + NEGATED + JOINED + SUM,  # pairs taken apart, but put together as halves
    ],
)
def test_another_movement_is_a_near_miss(body: str) -> None:
    _, report = _run(ROPE.format(body=body), RaiseRope())
    assert not report.fired
    assert "no known rotation" in report.missed[0].reason


def test_rotated_halves_of_half_width() -> None:
    body = HALVES + (
        "  %ac = mul(%a, %c) : f32[B, S, 4, 4]\n  %bs = mul(%b, %s) : f32[B, S, 4, 4]\n"
        "  %lo = sub(%ac, %bs) : f32[B, S, 4, 4]\n  %bc = mul(%b, %c) : f32[B, S, 4, 4]\n"
        "  %as = mul(%a, %s) : f32[B, S, 4, 4]\n  %hi = add(%bc, %as) : f32[B, S, 4, 4]\n"
        "  %y = concat(%lo, %hi, axis=3) : f32[B, S, 4, 8]\n"
    )
    text = ROPE.format(body=body).replace("%cos : f32[B, S, 1, 8]", "%c : f32[B, S, 1, 4]")
    graph, _ = _run(text.replace("%sin : f32[B, S, 1, 8]", "%s : f32[B, S, 1, 4]"), RaiseRope())
    assert _only(graph, "rope").startswith("%y = rope(%x, ")
    assert sum(n.op == "concat" for n in graph.nodes) == 2  # cos and sin, twice each


def test_partial_rotation_is_one_rope() -> None:
    body = """
  %r = slice(%wide, axis=3, start=0, end=8) : f32[B, S, 4, 8]
  %rest = slice(%wide, axis=3, start=8, end=20) : f32[B, S, 4, 12]
""" + (HALVES + NEGATED + JOINED + SUM).replace("%x", "%r").replace("%rc", "%xc").replace(
        "%y =", "%turned ="
    )
    body += "  %y = concat(%turned, %rest, axis=3) : f32[B, S, 4, 20]\n"
    text = ROPE.format(body=body).replace("%x : f32[B, S, 4, 8]", "%wide : f32[B, S, 4, 20]")
    graph, report = _run(text, RaiseRope())
    assert len(report.fired) == 1
    assert re.match(r"%y = rope\(%wide, .*\) : f32\[B, S, 4, 20\]", _only(graph, "rope"))


ATTENTION = """graph attention traced {
  input %q : f32[B, 4, S, 8]
  input %k : f32[B, 4, P+S, 8]
  input %v : f32[B, 4, P+S, 8]
  input %seen : bool[B, 1, S, P+S]
  const @sinks : f32[4] = parameter "sinks"
  %i0 = arange(start=P, end=P+S, dtype=i64) : i64[S]
  %i = reshape(%i0, shape=[S, 1]) : i64[S, 1]
  %j = arange(end=P+S, dtype=i64) : i64[P+S]
  %le = le(%j, %i) : bool[S, P+S]
MASK  %mask = where(%m, 0.0, -3e+38) : f32[S, P+S]
  %kt = transpose(%k, perm=[0, 1, 3, 2]) : f32[B, 4, 8, P+S]
  %qk = matmul(%q, %kt) : f32[B, 4, S, P+S]
  %sc = div(%qk, 4.0) : f32[B, 4, S, P+S]
  %ma = add(%mask, %sc) : f32[B, 4, S, P+S]
  %p = softmax(%ma, axis=3) : f32[B, 4, S, P+S]
  %y = matmul(%p, %v) : f32[B, 4, S, 8]
  output %y
}
"""
CAUSAL = "  %m = logical_and(%le, %le) : bool[S, P+S]\n"
WINDOW = """  %d = sub(%i, %j) : i64[S, P+S]
  %near = lt(%d, 5) : bool[S, P+S]
  %m = logical_and(%le, %near) : bool[S, P+S]
"""
CHUNK = """  %ci = floor_div(%i, 5) : i64[S, 1]
  %cj = floor_div(%j, 5) : i64[P+S]
  %same = eq(%ci, %cj) : bool[S, P+S]
  %m = logical_and(%le, %same) : bool[S, P+S]
"""
STRICT = "  %m = lt(%j, %i) : bool[S, P+S]\n"
SHIFTED = """  %i1 = add(%i, 1) : i64[S, 1]
  %m = le(%j, %i1) : bool[S, P+S]
"""


@pytest.mark.parametrize(
    ("mask", "attrs"),
    [
        (CAUSAL, "scale=0.25"),
        (WINDOW, "scale=0.25, window=5"),
        (WINDOW.replace("lt(", "le("), "scale=0.25, window=6"),
        (CHUNK, "scale=0.25, chunk=5"),
        ("  %m = ge(%j, 0) : bool[P+S]\n", "scale=0.25, causal=false"),
    ],
)
def test_masks_by_what_they_hide(mask: str, attrs: str) -> None:
    text = ATTENTION.replace("MASK", mask)
    if "causal=false" in attrs:
        text = text.replace("%mask = where(%m, 0.0, -3e+38) : f32[S, P+S]", "%mask = MASKED")
        text = text.replace("MASKED", "where(%m, 0.0, -3e+38) : f32[P+S]")
    graph, report = _run(text, RaiseAttention())
    assert not report.missed
    assert f"attention(%q, %k, %v, {attrs})" in _only(graph, "attention")


SOFTMAX = "  %p = softmax(%ma, axis=3) : f32[B, 4, S, P+S]\n"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("MASK", STRICT, "not full, causal, a window or chunks"),
        ("MASK", SHIFTED, "not full, causal, a window or chunks"),
        ("where(%m, 0.0, -3e+38)", "where(%m, 0.0, -1.5)", "adds to some scores what is no slope"),
        ("add(%mask, %sc)", "where(%seen, %sc, -3e+38)", "not decided by lengths alone"),
        ("add(%mask, %sc)", "add(%sc, %sc)", "neither summand of %ma is a mask"),
        ("matmul(%p, %v)", "matmul(%sc2, %v)", "its softmax has another user"),
        ("axis=3) : f32[B, 4, S, P+S]", "axis=2) : f32[B, 4, S, P+S]", "not over the last"),
    ],
)
def test_what_attention_cannot_say_stays_with_a_reason(old: str, new: str, reason: str) -> None:
    text = ATTENTION.replace(old, new)
    if "%sc2" in new:
        text = text.replace(SOFTMAX, SOFTMAX + "  %sc2 = mul(%p, %sc) : f32[B, 4, S, P+S]\n")
    _, report = _run(text.replace("MASK", CAUSAL), RaiseAttention())
    assert not report.fired
    assert re.search(reason, report.missed[0].reason), report.missed


MIXED = """  %t = transpose(%k, perm=[0, 2, 1, 3]) : f32[B, P+S, 4, 8]
  %k2 = reshape(%t, shape=[B, 4, P+S, 8]) : f32[B, 4, P+S, 8]
"""
GROUPED = """  %k1 = slice(%k, axis=1, start=0, end=2) : f32[B, 2, P+S, 8]
  %k3 = reshape(%k1, shape=[B, 1, 2, P+S, 8]) : f32[B, 1, 2, P+S, 8]
  %k4 = expand(%k3, shape=[B, 2, 2, P+S, 8]) : f32[B, 2, 2, P+S, 8]
  %k2 = reshape(%k4, shape=[B, 4, P+S, 8]) : f32[B, 4, P+S, 8]
"""


@pytest.mark.parametrize("moved", [MIXED, GROUPED])
def test_only_heads_repeated_in_place_are_taken_for_groups(moved: str) -> None:
    """Heads 0 1 0 1 are no groups, and heads mixed with tokens are no heads: keys stay moved."""
    text = ATTENTION.replace("MASK", CAUSAL).replace("  %kt =", moved + "  %kt =")
    graph, _ = _run(
        text.replace("transpose(%k, perm=[0, 1", "transpose(%k2, perm=[0, 1"), RaiseAttention()
    )
    assert "attention(%q, %k2, %v, scale=0.25)" in _only(graph, "attention")


def test_sinks_softcap_and_scale_on_the_queries() -> None:
    scaled = "  %q8 = mul(%q, 0.125) : f32[B, 4, S, 8]\n"
    text = ATTENTION.replace("MASK", CAUSAL).replace("  %qk =", scaled + "  %qk =")
    text = text.replace("matmul(%q, %kt)", "matmul(%q8, %kt)").replace(
        "add(%mask, %sc)", "add(%mask, %capped)"
    )
    text = text.replace(
        "  %ma =",
        "  %c1 = div(%sc, 30.0) : f32[B, 4, S, P+S]\n  %c2 = tanh(%c1) : f32[B, 4, S, P+S]\n"
        "  %capped = mul(30.0, %c2) : f32[B, 4, S, P+S]\n  %ma =",
    )
    with_sinks = (
        "  %s1 = reshape(@sinks, shape=[1, 4, 1, 1]) : f32[1, 4, 1, 1]\n"
        "  %s2 = expand(%s1, shape=[B, 4, S, 1]) : f32[B, 4, S, 1]\n"
        "  %all = concat(%ma, %s2, axis=3) : f32[B, 4, S, P+S+1]\n"
        "  %top = amax(%all, axis=3, keepdim=true) : f32[B, 4, S, 1]\n"
        "  %low = sub(%all, %top) : f32[B, 4, S, P+S+1]\n"
        "  %p1 = softmax(%low, axis=3) : f32[B, 4, S, P+S+1]\n"
        "  %p = slice(%p1, axis=3, start=0, end=P+S) : f32[B, 4, S, P+S]\n"
    )
    graph, report = _run(text.replace(SOFTMAX, with_sinks), RaiseAttention())
    assert not report.missed
    assert "attention(%q, %k, %v, @sinks, scale=0.03125, softcap=30.0)" in _only(graph, "attention")


MLP = """graph mlp traced {
  input %x : f32[T, 8]
  input %z : f32[T, 8]
  const @gate : f32[16, 8] = parameter "gate"
  const @up : f32[16, 8] = parameter "up"
  const @down : f32[8, 16] = parameter "down"
  const @bias : f32[16] = parameter "bias"
  const @end : f32[8] = parameter "end"
  %g = linear(%x, @gate) : f32[T, 16] in mlp.gate_proj
  %u = linear(%x, @up) : f32[T, 16] in mlp.up_proj
  %a = silu(%g) : f32[T, 16] in mlp.act
  %h = mul(%a, %u) : f32[T, 16] in mlp
  %y = linear(%h, @down) : f32[T, 8] in mlp.down_proj
  output %y
}
"""


@pytest.mark.parametrize(
    ("act", "attr"),
    [
        ("silu(%g)", ""),
        ('gelu(%g, approximate="tanh")', ', activation="gelu_tanh"'),
        ("gelu(%g)", ', activation="gelu_erf"'),
        ("relu(%g)", ', activation="relu"'),
    ],
)
@pytest.mark.parametrize("product", ["mul(%a, %u)", "mul(%u, %a)"])
def test_gated_mlp_activations(act: str, attr: str, product: str) -> None:
    text = MLP.replace("silu(%g)", act).replace("mul(%a, %u)", product)
    graph, _ = _run(text, RaiseGatedMlp())
    want = f"%y = gated_mlp(%x, @gate, @up, @down{attr}) : f32[T, 8] in mlp"
    assert [print_node(n) for n in graph.nodes] == [want]


def test_squared_relu() -> None:
    twice = "relu(%g) : f32[T, 16]\n  %a = pow(%r, 2) : f32[T, 16] in"
    text = MLP.replace("%a = silu(%g) : f32[T, 16] in", "%r = " + twice)
    graph, _ = _run(text, RaiseGatedMlp())
    assert 'activation="relu2"' in _only(graph, "gated_mlp")


def test_quick_gelu() -> None:
    spelled = "%s = mul(%g, 1.702) : f32[T, 16] in mlp\n  %q = sigmoid(%s) : f32[T, 16] in mlp\n"
    text = MLP.replace("%a = silu(%g)", f"{spelled}  %a = mul(%g, %q)")
    graph, _ = _run(text, RaiseGatedMlp())
    assert 'activation="gelu_quick"' in _only(graph, "gated_mlp")


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("linear(%x, @gate)", "linear(%x, @gate, @bias)", "@bias, @zeros.16, @zeros.8"),
        ("linear(%x, @up)", "linear(%x, @up, @bias)", "@zeros.16, @bias, @zeros.8"),
        ("linear(%h, @down)", "linear(%h, @down, @end)", "@zeros.16, @zeros.16, @end"),
    ],
)
def test_a_bias_makes_the_missing_ones_zeros(old: str, new: str, want: str) -> None:
    graph, report = _run(MLP.replace(old, new), RaiseGatedMlp())
    assert report.fired
    assert f"@down, {want}, biases=true" in _only(graph, "gated_mlp")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("linear(%x, @up)", "linear(%z, @up)", "projections of different values"),
        ("mul(%a, %u)", "mul(%a, %g)", ""),
        ("output %y", "output %y\n  output %h", "%h has another user"),
        ("linear(%x, @up)", "mul(%g, 2.0)", "%u is scaled"),
        ("linear(%x, @up)", "clamp(%g, low=-7.0, high=7.0)", "%u is clamped"),
        ("linear(%x, @up)", "tanh(%g)", "%u is no linear projection"),
    ],
)
def test_gated_mlp_refusals(old: str, new: str, reason: str) -> None:
    _, report = _run(MLP.replace(old, new), RaiseGatedMlp())
    if not reason:  # both factors from one matrix: still a gated MLP
        assert report.fired
        return
    assert not report.fired
    assert reason in report.missed[0].reason
