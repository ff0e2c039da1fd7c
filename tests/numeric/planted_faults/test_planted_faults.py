"""Translation validation catches planted faults, and blames the right pass and rewrite.

Every fault breaks one run of one pass, in the whole pipeline of a tiny model. It is caught if
validation refuses the result, and blamed if it names the broken pass and, in it, the rewrite.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from faults import Broken, Fault, Patch, steps_of
from library import FAULTS
from spikeinfer.compiler.ir import Graph, parse_graph, print_graph
from spikeinfer.errors import SpikeError
from spikeinfer.passes.base import Pass
from spikeinfer.passes.manager import Observer, Phase, run_pass, run_pipeline
from spikeinfer.passes.pipeline import default_pipeline
from spikeinfer.passes.repro import run_repro
from spikeinfer.passes.validate import ValidatePasses
from tiny_models import LONGEST, traced, weights

REQUIRED = 0.95


@dataclass(frozen=True)
class Verdict:
    """What validation said about a fault."""

    fault: Fault
    code: str
    text: str
    right_pass: bool
    right_rewrite: bool


class _Texts(Observer):
    """The graph before each pass."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def before_pass(self, step: Pass, graph: Graph) -> None:
        self.texts.append(print_graph(graph))


@cache
def _clean(model: str) -> list[str]:
    """The graph before every step of the pipeline, and after the last."""
    graph = parse_graph(traced(model))
    texts = _Texts()
    run_pipeline(graph, default_pipeline(), texts)
    return [*texts.texts, print_graph(graph)]


def _run(fault: Fault, repro: Path | None = None) -> Verdict:
    """The pipeline from the broken pass on, with validation."""
    steps = steps_of(default_pipeline())
    (index,) = [i for i, (name, _) in enumerate(steps) if name == fault.step]
    broken = Broken(steps[index][1], fault)
    _assert_changes(fault, broken, index)
    graph = parse_graph(_clean(fault.model)[index])
    rest: Sequence[Pass] = [broken, *(step for _, step in steps[index + 1 :])]  # type: ignore[list-item]
    watch = ValidatePasses(weights(fault.model).__getitem__, LONGEST, repro=repro)
    try:
        run_pipeline(graph, (Phase("rest", tuple(rest)),), watch)
    except SpikeError as error:
        named = f"{broken.name} " in error.what
        return Verdict(fault, error.code, error.what, named, named and _blamed(fault, broken, watch, error))
    return Verdict(fault, "", "not caught", False, False)


def _assert_changes(fault: Fault, broken: Broken, index: int) -> None:
    """A fault that leaves the graph as the healthy pass does would prove nothing."""
    graph = parse_graph(_clean(fault.model)[index])
    run_pass(graph, broken)  # type: ignore[arg-type]
    assert print_graph(graph) != _clean(fault.model)[index + 1], f"{fault.name} changes nothing"


def _blamed(fault: Fault, broken: Broken, watch: ValidatePasses, error: SpikeError) -> bool:
    """Whether the rewrite that is named is the broken one."""
    if watch.blame is None:
        return bool(broken.culprit) and f"{broken.culprit}" in error.what
    if isinstance(fault.how, Patch):
        return re.search(fault.at, watch.blame.scope) is not None
    return broken.culprit in {v.name for n in watch.blame.after.graph.nodes for v in n.results}


@cache
def _verdicts() -> tuple[Verdict, ...]:
    return tuple(map(_run, FAULTS))


def _rate(good: Sequence[bool]) -> float:
    return sum(good) / len(good)


def test_faults_cover_every_pass() -> None:
    assert len(FAULTS) >= 60
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    broken = {f.step.partition(":")[0] for f in FAULTS}
    assert broken == {step.name for phase in default_pipeline() for step in phase.passes}


def test_planted_faults_are_caught(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = _verdicts()
    caught = [v.code == "SPK307" for v in verdicts]
    with capsys.disabled():
        print(f"\nkilled {sum(caught)} of {len(caught)} planted faults")
        for fault in (v.fault for v, good in zip(verdicts, caught, strict=True) if not good):
            print(f"  survives: {fault.step}: {fault.name} ({fault.model})")
    assert _rate(caught) >= REQUIRED


def test_the_right_pass_and_rewrite_are_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = _verdicts()
    passes = [v.right_pass for v in verdicts]
    rewrites = [v.right_rewrite for v in verdicts]
    with capsys.disabled():
        print(f"\nblamed {sum(passes)} on the right pass and {sum(rewrites)} on the right rewrite")
        for v, good in zip(verdicts, rewrites, strict=True):
            if not good:
                print(f"  {v.fault.step}: {v.fault.name} ({v.fault.model}): {v.text}")
    assert _rate(passes) >= REQUIRED
    assert _rate(rewrites) >= REQUIRED
