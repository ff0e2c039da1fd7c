"""assign-precision's option `round_outputs`: an output is then a cast of what may be rounded."""

from __future__ import annotations

import pytest
from spikeinfer.compiler.ir import parse_graph, print_graph
from spikeinfer.passes.assign_precision import AssignPrecision
from spikeinfer.passes.manager import run_pass

BEFORE = """\
graph head fused {
  input %x : f32[T, 4]
  %y = cos(%x) : f32[T, 4]
  output %y
}
"""
AFTER = """\
graph head fused {
  input %x : f32[T, 4]
  %y = cos(%x) : f32[T, 4] as f16
  %y_f32 = cast(%y, dtype=f32) : f32[T, 4]
  output %y_f32
}
"""


@pytest.mark.parametrize(
    ("dtype", "rounds", "after"),
    [("float16", True, AFTER), ("float16", False, BEFORE), ("float32", True, BEFORE)],
)
def test_an_output_is_rounded_only_if_asked_for(dtype: str, rounds: bool, after: str) -> None:
    graph = parse_graph(BEFORE)
    run_pass(graph, AssignPrecision(dtype=dtype, round_outputs=rounds))
    assert print_graph(graph) == after
