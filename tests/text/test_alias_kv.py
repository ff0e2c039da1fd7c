"""In-place cache writes: every way the liveness proof fails names the node in the way."""

from __future__ import annotations

import pytest
from spikeinfer.compiler.ir import parse_graph, print_graph
from spikeinfer.passes.alias_kv import AliasKv
from spikeinfer.passes.base import PassReport
from spikeinfer.passes.manager import run_pass

HEAD = """graph cache fused {
  input %past : f32[B, 2, P, 8]
  input %new : f32[B, 2, S, 8]
  input %older : f32[B, 2, P, 8]
"""
STATE = "  state k : f32[B, 2, P, 8] axis=2 kind=kv input=%past output=%all\n"
SECOND = "  state v : f32[B, 2, P, 8] axis=2 kind=kv input=%{} output=%{}\n"
WRITE = "  %all = concat(%past, %new, axis=2) : f32[B, 2, P+S, 8] in layers.0\n"
READ = "  %y = neg(%all) : f32[B, 2, P+S, 8]\n"
WRITE_TEXT = WRITE.strip()
TAIL = "  output %y\n}\n"


def _run(body: str) -> tuple[str, PassReport]:
    graph = parse_graph(HEAD + body + TAIL)
    report = run_pass(graph, AliasKv())
    return print_graph(graph), report


def test_a_write_after_which_only_the_new_value_is_read() -> None:
    view = "  %t = transpose(%all, perm=[0, 1, 3, 2]) : f32[B, 2, 8, P+S]\n"
    text, report = _run(STATE + WRITE + view + "  %y = neg(%t) : f32[B, 2, 8, P+S]\n")
    assert report.fired == ["k"]
    assert 'kv_append(%new, state="k"' in text
    assert "input %past" not in text


VIEW = "%w = slice(%past, axis=2, start=0, end=1) : f32[B, 2, 1, 8] in layers.0.peek"
LATE = "%z = neg(%past) : f32[B, 2, P, 8] in layers.0.late"
LATE_VIEW = "%z = neg(%w) : f32[B, 2, 1, 8] in layers.0.late"
TWICE = "%once = concat(%past, %new, axis=2) : f32[B, 2, P+S, 8] in layers.0"
AGAIN = "%all = concat(%once, %new, axis=2) : f32[B, 2, P+2*S, 8] in layers.1"
REVERSED = "%all = concat(%new, %past, axis=2) : f32[B, 2, P+S, 8] in layers.0"
OTHER = "%all = concat(%older, %new, axis=2) : f32[B, 2, P+S, 8] in layers.0"
THREE = "%all = concat(%past, %new, %new, axis=2) : f32[B, 2, P+2*S, 8] in layers.0"
DOUBLED = "%all = concat(%past, %past, axis=2) : f32[B, 2, 2*P, 8] in layers.0"
ACROSS = "%all = concat(%past, %older, axis=1) : f32[B, 4, P, 8] in layers.0"
SUM = "%all = add(%past, %older) : f32[B, 2, P, 8] in layers.0"
SHOWN = "%y = slice(%t, axis=3, start=0, end=1) : f32[B, 2, 8, 1] in layers.0.show"
SEEN = "  %t = transpose(%all, perm=[0, 1, 3, 2]) : f32[B, 2, 8, P+S]\n"
OUT = "  output %all\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            STATE + WRITE + READ + f"  {LATE}\n  output %z\n",
            f"the past %past is read after the write by {LATE}",
        ),
        (
            STATE + f"  {LATE}\n" + WRITE + READ + "  output %z\n",
            f"the past %past is read before the write by {LATE}",
        ),
        (
            STATE + f"  {VIEW}\n" + WRITE + f"  {LATE_VIEW}\n" + READ + "  output %z\n",
            f"the past %past, of which {VIEW} is a view, is read after the write by {LATE_VIEW}",
        ),
        (
            STATE + f"  {VIEW}\n" + WRITE + READ + "  output %w\n",
            f"the past %past, of which {VIEW} is a view, leaves the graph",
        ),
        (STATE + WRITE + READ + "  output %past\n", "the past %past leaves the graph"),
        (
            STATE + WRITE + READ + OUT,
            "the new value %all also leaves the graph, which would need a copy",
        ),
        (
            STATE + WRITE + SEEN + f"  {SHOWN}\n",
            f"the new value %all also leaves the graph as its view {SHOWN}, "
            "which would need a copy",
        ),
        (
            STATE + f"  {TWICE}\n  {AGAIN}\n  %y = neg(%all) : f32[B, 2, P+2*S, 8]\n",
            f"it is written twice: by {TWICE} and by {AGAIN}",
        ),
        (STATE + f"  {SUM}\n  %y = neg(%all) : f32[B, 2, P, 8]\n",
         f"its new value is not concat(past, new rows) but {SUM}"),
        (STATE + f"  {REVERSED}\n" + READ, f"{REVERSED} puts the past behind the new rows"),
        (STATE + f"  {OTHER}\n" + READ, f"{OTHER} does not start with the past %past"),
        (
            STATE + f"  {THREE}\n  %y = neg(%all) : f32[B, 2, P+2*S, 8]\n",
            f"{THREE} joins more than the past and the new rows",
        ),
        (
            STATE + f"  {DOUBLED}\n  %y = neg(%all) : f32[B, 2, 2*P, 8]\n",
            f"{DOUBLED} joins more than the past and the new rows",
        ),
        (
            STATE + f"  {ACROSS}\n  %y = neg(%all) : f32[B, 4, P, 8]\n",
            f"{ACROSS} grows another axis than 2",
        ),
        (
            STATE.replace("%all", "%older") + WRITE + READ,
            "its new value is the graph input %older: nothing is appended",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_node(body: str, reason: str) -> None:
    _, report = _run(body)
    assert not report.fired
    assert [(m.where, m.reason) for m in report.missed] == [("k", reason)]


def test_states_that_share_a_past_or_a_new_value_refuse_both() -> None:
    other = "  %all2 = concat(%past, %new, axis=2) : f32[B, 2, P+S, 8]\n"
    _, report = _run(STATE + SECOND.format("past", "all2") + WRITE + other + READ)
    assert not report.fired
    assert [m.reason for m in report.missed] == [
        "state v has the same past %past",
        "state k has the same past %past",
    ]
    _, report = _run(STATE + SECOND.format("older", "all") + WRITE + READ)
    assert not report.fired
    assert [m.reason for m in report.missed] == [
        f"state v has the same new value of {WRITE_TEXT}",
        f"state k has the same new value of {WRITE_TEXT}",
    ]


def test_a_past_that_another_state_takes_over() -> None:
    """A rolling pair: v becomes what k was. k may not overwrite it; v appends nothing."""
    _, report = _run(STATE + SECOND.format("older", "past") + WRITE + READ)
    assert not report.fired
    assert [m.reason for m in report.missed] == [
        "its past %past is the new value of state v",
        "its new value is the graph input %past: nothing is appended",
    ]
