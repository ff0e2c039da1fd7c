"""Translation validation catches planted faults, and blames the right pass and rewrite.

Every fault breaks one run of one pass, in the whole pipeline of a tiny model. It is caught if
validation refuses the result, and blamed if it names the broken pass and, in it, the rewrite.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from faults import Broken, Fault, Patch, steps_of
from library import FAULTS
from spikeinfer.compiler.ir import Graph, parse_graph, print_graph
from spikeinfer.errors import SpikeError
from spikeinfer.passes.base import Pass
from spikeinfer.passes.blame import find_blame
from spikeinfer.passes.manager import Observer, Phase, run_pass, run_pipeline
from spikeinfer.passes.pipeline import default_pipeline
from spikeinfer.passes.repro import run_repro
from spikeinfer.passes.scenarios import scenarios
from spikeinfer.passes.validate import ROUNDING, ValidatePasses
from tiny_models import LONGEST, MODELS, traced, weights

REQUIRED = 0.95

PIPELINE = default_pipeline()


@dataclass(frozen=True)
class Verdict:
    """What validation said about a fault."""

    fault: Fault
    code: str
    text: str
    right_pass: bool = False
    right_rewrite: bool = False
    reproduced: bool | None = None


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
    run_pipeline(graph, PIPELINE, texts)
    return [*texts.texts, print_graph(graph)]


def _run(fault: Fault, folder: Path) -> Verdict:
    """The pipeline from the broken pass on, with validation; the reproduction goes to `folder`."""
    steps = steps_of(PIPELINE)
    (index,) = [i for i, (name, _) in enumerate(steps) if name == fault.step]
    broken = Broken(steps[index][1], fault)
    _assert_changes(fault, broken, index)
    graph = parse_graph(_clean(fault.model)[index])
    rest: Sequence[Pass] = [broken, *(step for _, step in steps[index + 1 :])]  # type: ignore[list-item]
    repro = folder / "repro"
    watch = ValidatePasses(weights(fault.model).__getitem__, LONGEST, repro=repro)
    try:
        run_pipeline(graph, (Phase("rest", tuple(rest)),), watch)
    except SpikeError as error:
        named = error.what.startswith(f"{broken.name} ")
        rewrite = named and _blamed(fault, broken, watch, error)
        return Verdict(fault, error.code, error.what, named, rewrite, _reproduced(repro))
    return Verdict(fault, "", "not caught")


def _reproduced(repro: Path) -> bool | None:
    """Whether the reproduction shows the difference; None if there is none."""
    if not repro.exists():
        return None
    outcome = run_repro(repro)
    return not outcome.difference <= outcome.limit


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
    named = watch.blame.node.partition(" = ")[0].split(", ")
    rewrite = {v.name for n in watch.blame.after.graph.nodes for v in n.results}
    return f"%{broken.culprit}" in named or broken.culprit in rewrite


@cache
def _verdicts() -> tuple[Verdict, ...]:
    verdicts = []
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            verdicts.append(_run(fault, Path(folder)))
    return tuple(verdicts)


def _rate(good: Sequence[bool]) -> float:
    return sum(good) / len(good)


def test_faults_cover_every_pass() -> None:
    assert len(FAULTS) >= 60
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    broken = {f.step.partition(":")[0] for f in FAULTS}
    assert broken == {step.name for phase in PIPELINE for step in phase.passes}


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


def test_reproductions_show_the_difference() -> None:
    """Faults of storage, roles and kernels have none: no number differs.

    Nor has a weight at another one's place in fuse-qkv: its role tells before numbers are compared.
    """
    placed = [v.fault.step for v in _verdicts() if v.reproduced is None]
    assert set(placed) <= {"fuse-qkv", "assign-roles", "assign-storage", "assign-kernels", ""}
    failed = [f"{v.fault.step}: {v.fault.name}" for v in _verdicts() if v.reproduced is False]
    assert not failed


def test_a_reproduction_is_small_and_needs_its_directory_only(tmp_path: Path) -> None:
    (fault,) = [f for f in FAULTS if f.name == "scale of one layer squared"]
    verdict = _run(fault, tmp_path)
    assert str(tmp_path / "repro") not in verdict.text  # where it is belongs to the remedy
    before, after = (
        parse_graph((tmp_path / "repro" / f"{side}.ir").read_text()) for side in ("before", "after")
    )
    assert [n.op for n in after.nodes] == ["attention"]
    assert {n.scope for n in before.nodes} == {"model", "model.layers.1.self_attn"}  # and its mask
    moved = (tmp_path / "repro").rename(tmp_path / "elsewhere")
    command = [sys.executable, "-m", "spikeinfer.passes.repro", "."]
    shown = subprocess.run(command, cwd=moved, capture_output=True, text=True, check=False)
    assert shown.returncode == 1, shown.stderr
    assert "relative difference" in shown.stdout
    assert "python -m spikeinfer.passes.repro ." in (moved / "README.md").read_text()


def test_an_older_reproduction_gives_way_and_nothing_else(tmp_path: Path) -> None:
    (fault,) = [f for f in FAULTS if f.name == "weight of a norm lost"]
    for _ in range(2):
        _run(fault, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["repro"]
    (tmp_path / "repro" / "repro.json").rename(tmp_path / "repro" / "mine")
    with pytest.raises(FileNotFoundError):  # looks for the reproduction in the old place
        _run(fault, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"repro", "repro.1"}


@pytest.mark.parametrize("model", ["gemma3_text", "gpt2"])
def test_values_that_survive_a_healthy_pass_agree(model: str) -> None:
    """What blame rests on: one name before and after a pass is one value."""
    texts, parameters = _clean(model), weights(model)
    ragged = scenarios(LONGEST)["ragged"]
    for before, after in pairwise(texts):
        if before != after:
            old, new = parse_graph(before), parse_graph(after)
            assert find_blame(old, new, parameters.__getitem__, ragged, 0, ROUNDING) is None


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_no_false_alarm(seed: int) -> None:
    """Another model for each seed; tests/slow runs 200 of them."""
    model = list(MODELS)[seed]
    watch = ValidatePasses(weights(model, seed).__getitem__, LONGEST, seed)
    run_pipeline(parse_graph(traced(model)), PIPELINE, watch)
