"""Runs a pipeline: contract, pass, sweep, verify, report; names who broke what.

A pass checks nothing about its surroundings. The manager does: the graph's level must be one the
pass accepts, dead nodes are dropped after it, and the verifier runs on what it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..compiler.ir import Graph, VerifyError, verify
from ..errors import ExitCode, SpikeError
from .base import Pass, PassReport
from .cost import Traffic, traffic


@dataclass(frozen=True)
class Phase:
    """Passes that belong together; the graph can be dumped after each phase."""

    name: str
    passes: tuple[Pass, ...]


class Observer:
    """Watches a pipeline; subclass for dumps (`--dump-ir`) or validation (`--verify-passes`)."""

    def before_pass(self, step: Pass, graph: Graph) -> None:
        """Called with the graph that the pass is about to rewrite in place."""

    def after_pass(self, step: Pass, graph: Graph, report: PassReport) -> None:
        """Called with the rewritten, swept and verified graph."""

    def after_phase(self, phase: str, graph: Graph) -> None:
        """Called when all passes of a phase are done."""


def run_pipeline(
    graph: Graph, phases: Sequence[Phase], observer: Observer | None = None
) -> list[PassReport]:
    """Runs every pass in order, in place; one report per pass that ran.

    Raises SpikeError: SPK304 if a pass does not accept the graph's level (passes were left out),
    SPK390 (our bug, exit 70) if a pass fails or leaves a broken graph. A SpikeError of a pass
    itself goes through unchanged.
    """
    watch = observer or Observer()
    reports: list[PassReport] = []
    for phase in phases:
        for step in phase.passes:
            _check_level(step, graph)
            watch.before_pass(step, graph)
            reports.append(_run(step, graph, reports))
            watch.after_pass(step, graph, reports[-1])
        watch.after_phase(phase.name, graph)
    return reports


def run_pass(graph: Graph, step: Pass) -> PassReport:
    """Runs a single pass under the same checks as a pipeline of it alone."""
    return run_pipeline(graph, (Phase(step.name, (step,)),))[0]


def _check_level(step: Pass, graph: Graph) -> None:
    if graph.level not in step.requires:
        wanted = " or ".join(level.value for level in step.requires)
        raise SpikeError(
            "SPK304",
            "passes",
            f"{step.name} needs a {wanted} graph, but it is {graph.level.value} here.",
            "Do not leave out the passes before it.",
        )


def _run(step: Pass, graph: Graph, done: Sequence[PassReport]) -> PassReport:
    try:
        before = traffic(graph.nodes)
        report = step.run(graph)
        if step.ensures is not None:
            graph.level = step.ensures
        report.facts["swept"] = graph.sweep()
        saved = before - traffic(graph.nodes)
        if saved != Traffic(0, 0):
            report.facts["saved"] = saved.to_json()
        verify(graph)
    except SpikeError:
        raise
    except VerifyError as error:
        raise _bug(step, done, f"left a broken graph: {error}") from error
    except Exception as error:  # whatever a pass raises, the user must learn which pass it was
        raise _bug(step, done, f"failed: {type(error).__name__}: {error}") from error
    return report


def _bug(step: Pass, done: Sequence[PassReport], what: str) -> SpikeError:
    before = ", ".join(report.name for report in done if report.modified) or "nothing"
    return SpikeError(
        "SPK390",
        "passes",
        f"{step.name} {what} (passes that changed the graph before it: {before}).",
        "This is a bug in SpikeInfer: report it with the model's config.json. "
        f"Leaving out {step.name} in the recipe may help until then.",
        ExitCode.INTERNAL,
    )
