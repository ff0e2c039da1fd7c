"""The rules of clean-up, one text each."""

from __future__ import annotations

import pytest
from spikeinfer.compiler.ir import parse_graph, print_node
from spikeinfer.passes.clean_up import CleanUp
from spikeinfer.passes.manager import run_pass

HEAD = """graph small traced {
  input %x : f32[B, S, 8]
  input %h : f32[B, S, 2, 4]
  input %n : i64[S]
  const @w : f32[8] = parameter "w"
  const @m : f32[16, 8] = parameter "m"
  const @two : f32[1] = data "AAAAQA=="
  const @also_two : f32[1] = data "AAAAQA=="
"""


def _after(body: str, step: CleanUp | None = None) -> list[str]:
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    graph = parse_graph(HEAD + lines + "  output %y\n}\n")
    run_pass(graph, step or CleanUp())
    return [print_node(n) for n in graph.nodes] + [f"output %{graph.outputs[0].name}"]


@pytest.mark.parametrize(
    "line",
    [
        "%y = mul(1.0, %x) : f32[B, S, 8]",
        "%y = add(%x, 0) : f32[B, S, 8]",
        "%y = div(%x, 1) : f32[B, S, 8]",
        "%y = cast(%x, dtype=f32) : f32[B, S, 8]",
        "%y = slice(%x, axis=1, start=0, end=S) : f32[B, S, 8]",
        "%y = expand(%x, shape=[B, S, 8]) : f32[B, S, 8]",
        "%y = transpose(%x, perm=[0, 1, 2]) : f32[B, S, 8]",
        "%y = concat(%x, axis=2) : f32[B, S, 8]",
    ],
)
def test_what_does_nothing_goes(line: str) -> None:
    assert _after(line) == ["output %x"]


@pytest.mark.parametrize(
    "line",
    [
        "%y = mul(%n, 1.0) : f32[S]",  # turns integers into floats
        "%y = sub(0.0, %x) : f32[B, S, 8]",
        "%y = slice(%x, axis=2, start=0, end=8, step=2) : f32[B, S, 4]",
        "%y = add(%x, @w) : f32[B, S, 8]",
    ],
)
def test_what_does_something_stays(line: str) -> None:
    assert _after(line) == [line, "output %y"]


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (
            """%a = reshape(%x, shape=[B*S, 8]) : f32[B*S, 8]
            %y = reshape(%a, shape=[B, S, 2, 4]) : f32[B, S, 2, 4]""",
            ["%y = reshape(%x, shape=[B, S, 2, 4]) : f32[B, S, 2, 4]"],
        ),
        (
            """%a = slice(%x, axis=2, start=2, end=8) : f32[B, S, 6]
            %y = slice(%a, axis=-1, start=1, end=4) : f32[B, S, 3]""",
            ["%y = slice(%x, axis=-1, start=3, end=6) : f32[B, S, 3]"],
        ),
        (
            """%a = transpose(%h, perm=[0, 2, 1, 3]) : f32[B, 2, S, 4]
            %y = transpose(%a, perm=[0, 1, 3, 2]) : f32[B, 2, 4, S]""",
            ["%y = transpose(%h, perm=[0, 2, 3, 1]) : f32[B, 2, 4, S]"],
        ),
        (
            """%a = add(@two, 1.0) : f32[1]
            %y = mul(%x, %a) : f32[B, S, 8]""",
            ["%y = mul(%x, 3.0) : f32[B, S, 8]"],
        ),
        (
            """%a = mul(%x, @two) : f32[B, S, 8]
            %b = mul(%x, @also_two) : f32[B, S, 8]
            %y = add(%a, %b) : f32[B, S, 8]""",
            ["%a = mul(%x, 2.0) : f32[B, S, 8]", "%y = add(%a, %a) : f32[B, S, 8]"],
        ),
        (
            """%a = full(shape=[], value=0.0, dtype=f32) : f32[]
            %b = expand(%a, shape=[B, S, 8]) : f32[B, S, 8]
            %y = maximum(%b, %x) : f32[B, S, 8]""",
            ["%y = maximum(0.0, %x) : f32[B, S, 8]"],
        ),
        (
            """%e = slice(%x, axis=2, start=8, end=8) : f32[B, S, 0]
            %y = concat(%x, %e, axis=2) : f32[B, S, 8]""",
            [],
        ),
        (
            """%t = transpose(@m, perm=[1, 0]) : f32[8, 16]
            %y = matmul(%x, %t) : f32[B, S, 16]""",
            ["%y = linear(%x, @m) : f32[B, S, 16]"],
        ),
    ],
)
def test_two_become_one(body: str, after: list[str]) -> None:
    assert _after(body)[:-1] == after


def test_reshapes_around_a_linear_go() -> None:
    body = """%a = reshape(%x, shape=[B*S, 8]) : f32[B*S, 8]
    %b = linear(%a, @m) : f32[B*S, 16]
    %c = silu(%b) : f32[B*S, 16]
    %y = reshape(%c, shape=[B, S, 16]) : f32[B, S, 16]"""
    lines = _after(body)
    assert [line.split(" = ")[1].split("(")[0] for line in lines[:-1]] == ["linear", "silu"]
    assert lines[0].endswith("linear(%x, @m) : f32[B, S, 16]")


def test_a_transpose_with_two_users_does_not_sink() -> None:
    body = """%t = transpose(%h, perm=[0, 2, 1, 3]) : f32[B, 2, S, 4]
    %a = silu(%t) : f32[B, 2, S, 4]
    %y = mul(%a, %t) : f32[B, 2, S, 4]"""
    assert _after(body)[:-1] == [line.strip() for line in body.splitlines()]


def test_sinking_is_an_option() -> None:
    body = """%t = transpose(%h, perm=[0, 2, 1, 3]) : f32[B, 2, S, 4]
    %y = silu(%t) : f32[B, 2, S, 4]"""
    assert _after(body, CleanUp(sink_transposes=False))[0].startswith("%t = transpose(%h")
    assert _after(body)[1].startswith("%y = transpose(")


def test_folding_stops_at_its_limit() -> None:
    body = """%a = arange(end=8, dtype=f32) : f32[8]
    %b = sin(%a) : f32[8]
    %y = mul(%x, %b) : f32[B, S, 8]"""
    assert len(_after(body)) == 2
    assert len(_after(body, CleanUp(fold_elements=4))) == 4
