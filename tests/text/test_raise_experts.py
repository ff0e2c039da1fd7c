"""Mixtures of experts and their routers: spellings that are raised, and why others are not."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
from spikeinfer.compiler.ir import Graph, Level, parse_graph, print_node, verify
from spikeinfer.passes import flatten_tokens, raise_moe, raise_route
from spikeinfer.passes.assign_roles import AssignRoles
from spikeinfer.passes.base import PassReport
from spikeinfer.passes.flatten_tokens import FlattenTokens
from spikeinfer.passes.manager import run_pass
from spikeinfer.passes.raise_moe import RaiseMoe
from spikeinfer.passes.raise_route import RaiseRoute


def _before(module: object) -> str:
    doc = inspect.getdoc(module)
    assert doc is not None
    return textwrap.dedent(doc.split("\nbefore:\n")[1].split("\nafter:\n")[0])


def _changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def _moe(*changes: tuple[str, str]) -> tuple[Graph, PassReport]:
    graph = parse_graph("graph g traced {\n" + _changed(_before(raise_moe), changes) + "\n}\n")
    verify(graph)
    return graph, run_pass(graph, RaiseMoe())


def _route(*changes: tuple[str, str]) -> tuple[Graph, PassReport]:
    graph = parse_graph(_changed(_before(raise_route), changes))
    verify(graph)
    return graph, run_pass(graph, RaiseRoute())


def _only(graph: Graph, op: str) -> str:
    (node,) = [n for n in graph.nodes if n.op == op]
    return print_node(node)


TRANSPOSED = (
    ("f32[4, 32, 8] =", "f32[4, 8, 32] ="),
    ("f32[4, 8, 16] =", "f32[4, 16, 8] ="),
    ("%gu1 = index_select(@gate_up, %ids, axis=0) : f32[2*T, 32, 8]",
     "%gu1 = index_select(@gate_up, %ids, axis=0) : f32[2*T, 8, 32]"),
    ("%x3 = reshape(%x2, shape=[2*T, 8, 1]) : f32[2*T, 8, 1]",
     "%x3 = reshape(%x2, shape=[2*T, 1, 8]) : f32[2*T, 1, 8]"),
    ("matmul(%gu1, %x3) : f32[2*T, 32, 1]", "matmul(%x3, %gu1) : f32[2*T, 1, 32]"),
    ("%d1 = index_select(@down, %ids, axis=0) : f32[2*T, 8, 16]",
     "%d1 = index_select(@down, %ids, axis=0) : f32[2*T, 16, 8]"),
    ("%h1 = reshape(%h, shape=[2*T, 16, 1]) : f32[2*T, 16, 1]",
     "%h1 = reshape(%h, shape=[2*T, 1, 16]) : f32[2*T, 1, 16]"),
    ("matmul(%d1, %h1) : f32[2*T, 8, 1]", "matmul(%h1, %d1) : f32[2*T, 1, 8]"),
)  # fmt: skip
INTERLEAVED = (
    ("start=0, end=16)", "start=0, end=32, step=2)"),
    ("start=16, end=32)", "start=1, end=32, step=2)"),
)
CLAMPED = (
    ("%a = silu(%g) : f32[2*T, 16] in mlp.experts.act_fn\n",
     "%gc = clamp(%g, high=7.0) : f32[2*T, 16]\n"
     "%uc = clamp(%u, low=-7.0, high=7.0) : f32[2*T, 16]\n"
     "%u1 = add(%uc, 1) : f32[2*T, 16]\n"
     "%ga = mul(%gc, 1.702) : f32[2*T, 16]\n"
     "%gs = sigmoid(%ga) : f32[2*T, 16]\n"
     "%a = mul(%gc, %gs) : f32[2*T, 16]\n"),
    ("mul(%a, %u) :", "mul(%u1, %a) :"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "constants", "attrs"),
    [
        ((), "rows=0:16", ""),
        (TRANSPOSED, "transposed rows=0:16", ""),
        (INTERLEAVED, "rows=1:32:2", ""),
        ((("silu(%g)", "gelu(%g)"),), "rows=16:32", 'activation="gelu_erf"'),
        ((("mul(%a, %u)", "mul(%u, %a)"), ("mul(%d, %w1)", "mul(%w1, %d)")), "rows=0:16", ""),
        (CLAMPED, "rows=0:16", "limit=7.0, alpha=1.702"),
        ((("sum(%s, axis=1)", "sum(%s, axis=-2)"),), "rows=0:16", ""),
    ],
)
def test_spellings_of_experts(
    changes: tuple[tuple[str, str], ...], constants: str, attrs: str
) -> None:
    graph, report = _moe(*changes)
    assert report.fired == ["mlp.experts"]
    assert attrs in _only(graph, "moe")
    assert constants in str([_text(graph, name) for name in graph.constants])
    assert len(graph.nodes) == 1


def _text(graph: Graph, name: str) -> str:
    const = graph.constants[name]
    rows = ":".join(map(str, const.rows or ()))
    return f"{'transposed ' * const.transposed}rows={rows}"


OTHER_IDS = (
    ("input %i : i64[T, 2]\n", "input %i : i64[T, 2]\ninput %j : i64[2*T]\n"),
    ("index_select(@down, %ids,", "index_select(@down, %j,"),
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ((("silu(%g)", "tanh(%g)"),), "%h is no gated product"),
        (OTHER_IDS, "different choices of experts"),
        ((("sum(%s, axis=1) : f32[T, 8]", "sum(%s, axis=2) : f32[T, 2]"),), "another axis"),
        ((("mul(%a, %u)", "mul(%a, 2.0)"),), "2.0 is no product with an expert's matrix"),
        (
            (
                ("%x1 = reshape(%x, shape=[T, 1, 8]) : f32[T, 1, 8]",
                 "%x1 = reshape(%x, shape=[1, T, 8]) : f32[1, T, 8]"),
                ("expand(%x1, shape=[T, 2, 8]) : f32[T, 2, 8]",
                 "expand(%x1, shape=[2, T, 8]) : f32[2, T, 8]"),
            ),
            "%x2 does not repeat each token for its experts",
        ),
        ((*CLAMPED[:1], ("mul(%a, %u) :", "mul(%u1, %a) :"), ("low=-7.0", "low=-6.0")),
         "not by one limit"),
        ((*CLAMPED, ("mul(%gc, 1.702)", "mul(%gc, -1.702)")), "must be positive"),
    ],
)  # fmt: skip
def test_experts_that_are_refused(changes: tuple[tuple[str, str], ...], reason: str) -> None:
    graph, report = _moe(*changes)
    (miss,) = report.missed
    assert reason in miss.reason
    assert not report.fired
    assert "moe" not in {n.op for n in graph.nodes}


GROUPED = (
    ("@router : f32[4, 8]", "@router : f32[8, 8]"),
    ("@correction : f32[4]", "@correction : f32[8]"),
    ("f32[4, 16, 8]", "f32[8, 16, 8]"),
    ("f32[4, 8, 16]", "f32[8, 8, 16]"),
    ("f32[T, 4]", "f32[T, 8]"),
    ("%t, %i = topk(%c, k=2)",
     "%q = reshape(%c, shape=[T, 4, 2]) : f32[T, 4, 2]\n"
     "%q1, %q2 = topk(%q, k=2) : f32[T, 4, 2], i64[T, 4, 2]\n"
     "%q3 = sum(%q1, axis=2) : f32[T, 4]\n"
     "%q4, %q5 = topk(%q3, k=2) : f32[T, 2], i64[T, 2]\n"
     "%z = full(shape=[T, 4], value=0.0, dtype=f32) : f32[T, 4]\n"
     "%o = scatter(%z, %q5, 1, axis=1) : f32[T, 4]\n"
     "%o1 = reshape(%o, shape=[T, 4, 1]) : f32[T, 4, 1]\n"
     "%o2 = expand(%o1, shape=[T, 4, 2]) : f32[T, 4, 2]\n"
     "%o3 = reshape(%o2, shape=[T, 8]) : f32[T, 8]\n"
     "%o4 = cast(%o3, dtype=bool) : bool[T, 8]\n"
     "%o5 = logical_not(%o4) : bool[T, 8]\n"
     "%m = where(%o5, -inf, %c) : f32[T, 8]\n"
     "%t, %i = topk(%m, k=2)"),
)  # fmt: skip
CHOSEN_ONLY = (
    ("topk(%c, k=2)", "topk(%l, k=2)"),
    ("%d = div(%g, %e) :", "%d = softmax(%t, axis=-1) :"),
)


@pytest.mark.parametrize(
    ("changes", "attrs"),
    [
        ((("sigmoid(%l)", "softmax(%l, axis=-1)"),), "k=2, normalise=true"),
        ((("add(%n, 1e-20)", "clamp(%n, low=1e-12)"),), "normalise=true, floor=1e-12, scale=2.5"),
        ((("div(%g, %e)", "div(%g, %n)"),), 'scores="sigmoid", normalise=true, scale=2.5'),
        ((("mul(%d, 2.5)", "mul(%g, 2.5)"),), 'k=2, scores="sigmoid", scale=2.5)'),
        (CHOSEN_ONLY, '(%l, k=2, scores="none", softmax_chosen=true, scale=2.5)'),
        (GROUPED, 'scores="sigmoid", groups=4, best_groups=2, per_group=2, normalise=true'),
        (
            (*GROUPED, ("topk(%q, k=2) : f32[T, 4, 2], i64[T, 4, 2]",
                        "topk(%q, k=1) : f32[T, 4, 1], i64[T, 4, 1]")),
            'scores="sigmoid", groups=4, best_groups=2, normalise=true',
        ),
    ],
)  # fmt: skip
def test_spellings_of_routers(changes: tuple[tuple[str, str], ...], attrs: str) -> None:
    graph, report = _route(*changes)
    assert report.fired == ["mlp.experts"]
    assert attrs in _only(graph, "route")
    assert [n.op for n in graph.nodes] == ["linear", "route", "moe"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ((("mul(%d, 2.5)", "exp(%d)"),), "%w is no chosen score"),
        ((("add(%s, @correction)", "sub(%s, @correction)"),), "%c is not %s plus a correction"),
        ((*GROUPED, ("where(%o5, -inf, %c)", "where(%o5, 0.0, %c)")), "a score"),
        ((*GROUPED, ("scatter(%z, %q5, 1,", "scatter(%z, %q5, 2,")), "than ones at the best"),
        ((*GROUPED, ("reshape(%c, shape=[T, 4, 2])", "reshape(%s, shape=[T, 4, 2])")),
         "groups are judged by other values"),
    ],
)  # fmt: skip
def test_routers_that_are_refused(changes: tuple[tuple[str, str], ...], reason: str) -> None:
    _, report = _route(*changes)
    (miss,) = report.missed
    assert re.search(re.escape(reason), miss.reason), miss.reason
    assert not report.fired


def test_routers_and_experts_get_their_roles() -> None:
    for changes in ((), (("mul(%d, 2.5)", "exp(%d)"),)):  # raised to route, or left in primitives
        graph, _ = _route(*changes)
        graph.level = Level.FUSED
        run_pass(graph, AssignRoles())
        roles = {name: const.role for name, const in graph.constants.items()}
        matrices = {n: roles[n] for n in ("router", "gate", "up", "down")}
        assert matrices == {
            "router": "ffn_gate_inp",
            "gate": "ffn_gate",
            "up": "ffn_up",
            "down": "ffn_down",
        }


def test_a_shared_experts_gate_is_kept_like_a_router() -> None:
    graph = parse_graph("""graph g fused {
      input %x : f32[T, 8]
      const @gate : f32[1, 8] = parameter "shared_expert_gate"
      const @w : f32[8, 8] = parameter "shared"
      %g = linear(%x, @gate) : f32[T, 1]
      %s = sigmoid(%g) : f32[T, 1]
      %m = mul(%x, %s) : f32[T, 8]
      %y = linear(%m, @w) : f32[T, 8]
      output %y
    }""")
    run_pass(graph, AssignRoles())
    assert {c.role for c in graph.constants.values()} == {"ffn_gate_inp", "output"}


def test_experts_are_token_wise() -> None:
    text = _changed(_before(raise_route), GROUPED).replace("[T,", "[B*S,").replace("T, ", "B*S, ")
    for step in (None, RaiseRoute()):
        graph = parse_graph(text)
        if step:
            run_pass(graph, step)
        report = run_pass(graph, FlattenTokens())
        assert report.fired, report.missed
        assert "f32[T, 8]" in _only(graph, "moe")
    assert graph.outputs[0].shape[0] == flatten_tokens.TOKENS
