"""The manager names who broke what; the pipeline is configured by name, with near names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from spikeinfer.compiler.ir import Graph, Level, Node, TensorType, parse_graph
from spikeinfer.errors import ExitCode, SpikeError
from spikeinfer.passes.base import Pass, PassReport
from spikeinfer.passes.clean_up import CleanUp
from spikeinfer.passes.manager import Observer, Phase, run_pass, run_pipeline
from spikeinfer.passes.pipeline import configure, default_pipeline
from spikeinfer.passes.raise_rms_norm import RaiseRmsNorm

TEXT = """graph small traced {
  input %x : f32[T, 4]
  %a = mul(%x, 1.0) : f32[T, 4]
  %dead = neg(%a) : f32[T, 4]
  %y = silu(%a) : f32[T, 4]
  output %y
}
"""


@dataclass(frozen=True)
class Broken(Pass):
    """Breaks a type, or raises."""

    name: ClassVar[str] = "broken"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    raises: bool = False

    def run(self, graph: Graph) -> PassReport:
        """Gives the last value a wrong type."""
        if self.raises:
            raise IndexError("no such operand")
        value = graph.nodes[-1].result
        value.type = TensorType(value.dtype, (7,))
        return PassReport(self.name, ["here"])


class Log(Observer):
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_pass(self, step: Pass, graph: Graph) -> None:
        """One line."""
        self.calls.append(f"before {step.name}: {len(graph.nodes)}")

    def after_pass(self, step: Pass, graph: Graph, report: PassReport) -> None:
        """One line."""
        self.calls.append(f"after {report.name}: {len(graph.nodes)}")

    def after_phase(self, phase: str, graph: Graph) -> None:
        """One line."""
        self.calls.append(f"phase {phase}")


def test_dead_nodes_are_swept_and_the_observer_sees_every_step() -> None:
    log = Log()
    phases = (Phase("clean", (CleanUp(),)), Phase("empty", ()))
    reports = run_pipeline(parse_graph(TEXT), phases, log)
    assert log.calls == ["before clean-up: 3", "after clean-up: 1", "phase clean", "phase empty"]
    assert [r.name for r in reports] == ["clean-up"]


def test_ensures_sets_the_level() -> None:
    graph = parse_graph(TEXT)
    run_pass(graph, RaiseRmsNorm())
    assert graph.level is Level.FUSED


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Broken(), r"broken left a broken graph: .*its operands give f32\[T, 4\]"),
        (Broken(raises=True), "broken failed: IndexError: no such operand"),
    ],
)
def test_a_failing_pass_is_named_with_its_predecessors(step: Pass, words: str) -> None:
    with pytest.raises(SpikeError, match="(?s)" + words) as caught:
        run_pipeline(parse_graph(TEXT), (Phase("all", (CleanUp(), step)),))
    assert (caught.value.code, caught.value.exit_code) == ("SPK390", ExitCode.INTERNAL)
    assert "changed the graph before it: clean-up" in caught.value.what


def test_a_level_that_a_pass_does_not_take_is_the_users_to_mend() -> None:
    graph = parse_graph(TEXT)
    graph.level = Level.PLACED
    with pytest.raises(SpikeError, match="clean-up needs a traced or fused graph") as caught:
        run_pass(graph, CleanUp())
    assert (caught.value.code, caught.value.exit_code) == ("SPK304", ExitCode.BAD_INPUT)


def test_every_raising_pass_walks_over_nodes_with_several_results() -> None:
    text = TEXT.replace(
        "silu(%a) : f32[T, 4]",
        "silu(%a) : f32[T, 4]\n  %k, %i = topk(%y, k=2) : f32[T, 2], i64[T, 2]",
    ).replace("output %y", "output %k")
    graph = parse_graph(text)
    run_pipeline(graph, [p for p in default_pipeline() if p.name in ("clean", "raise")])
    assert [n.op for n in graph.nodes] == ["silu", "topk"]


def _names(phases: tuple[Phase, ...]) -> list[str]:
    return [step.name for phase in phases for step in phase.passes]


def test_passes_can_be_left_out_but_keep_their_order() -> None:
    every = _names(default_pipeline())
    left = _names(configure(default_pipeline(), without=["raise-rope"]))
    assert left == [name for name in every if name != "raise-rope"]


def test_an_option_reaches_every_run_of_its_pass() -> None:
    options = {"clean-up": {"sink_transposes": False, "fold_elements": 16}}
    phases = configure(default_pipeline(), options=options)
    steps = [s for p in phases for s in p.passes if isinstance(s, CleanUp)]
    assert len(steps) > 1
    assert all((s.fold_elements, s.sink_transposes) == (16, False) for s in steps)


@pytest.mark.parametrize(
    ("without", "options", "code", "words"),
    [
        (["raise-ropes"], {}, "SPK301", "no pass 'raise-ropes'. Did you mean 'raise-rope'"),
        ([], {"cleanup": {}}, "SPK301", "no pass 'cleanup'. Did you mean 'clean-up'"),
        (
            [],
            {"clean-up": {"fold_element": 1}},
            "SPK302",
            "no option 'fold_element'. Did you mean 'fold_elements'",
        ),
        ([], {"clean-up": {"fold_elements": "many"}}, "SPK303", "must be of type int"),
        ([], {"clean-up": {"fold_elements": True}}, "SPK303", "fold_elements is True"),
    ],
)
def test_wrong_names_and_types(
    without: list[str], options: dict[str, dict[str, object]], code: str, words: str
) -> None:
    with pytest.raises(SpikeError, match=words) as caught:
        configure(default_pipeline(), without=without, options=options)
    assert caught.value.code == code


def test_a_rewrite_must_keep_types() -> None:
    from spikeinfer.passes.rewrite import become

    node: Node = parse_graph(TEXT).nodes[0]
    with pytest.raises(ValueError, match="sum gives"):
        become(node, "sum", [node.operands[0]], {"axis": 0})
