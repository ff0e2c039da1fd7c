"""One build, phase by phase: checkpoint, graph, passes, weights, model, golden gate, engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import __version__
from .compiler.assembly.budget import Solver, open_solver
from .compiler.assembly.emulation import EXECUTED
from .compiler.assembly.evidence import FLOAT_NAMES, Scorers, limits, mean_kl, measure
from .compiler.assembly.feedback import quantize_model
from .compiler.assembly.footprint import peak_memory
from .compiler.assembly.memory import memory_report
from .compiler.assembly.network_constants import NetworkConstants
from .compiler.assembly.overrides import Overrides, first_given
from .compiler.assembly.pipeline import (
    DumpIr,
    Storage,
    nothing_given,
    passes_for,
    require_streaming,
)
from .compiler.assembly.progress import Progress
from .compiler.assembly.request import BuildRequest
from .compiler.assembly.settings import (
    engine_config,
    kv_format,
    model_facts,
    provenance,
    row_bytes,
    sequence_limit,
)
from .compiler.assembly.source import Source, open_source, requantised
from .compiler.assembly.tensorrt import (
    Network,
    plan_document,
    require_target,
    storable,
    write_plan,
)
from .compiler.assembly.tokenizer import compact_tokenizer
from .compiler.assembly.weighting import Weighting, weighting
from .compiler.assembly.weights import (
    Importance,
    all_alike,
    total_bytes,
    write_weights,
)
from .compiler.backends import emit_onnx
from .compiler.backends.tensorrt import build_engine
from .compiler.engine import EngineConfig, EngineWriter, Evidence, Manifest
from .compiler.engine.config import MIXED, RELATIVE_ERROR
from .compiler.engine.manifest import MODEL, NETWORK, WEIGHTS
from .compiler.frontend.checkpoint import Checkpoint
from .compiler.frontend.import_model import import_model
from .compiler.ir import Graph, parse_graph, print_graph
from .compiler.quantize import Quantization, StoragePlan
from .errors import ExitCode, SpikeError
from .kernels import cpu_tier
from .passes.base import Pass, PassReport
from .passes.manager import Observer, run_pipeline
from .passes.validate import ValidatePasses
from .runtime.chat import ChatTemplate
from .runtime.engine import SpikeEngine

TOKENIZER = "tokenizer.json"
SPARE = 64 << 20
"""Bytes of disk besides the weights: graph, tokenizer, page padding."""

__all__ = ["BuildRequest", "BuildResult", "Progress", "build"]


@dataclass(frozen=True)
class BuildResult:
    """What a build gave; `memory` as in the engine's report.

    A dry run has no `manifest`, nor has a build that only wrote the plan of a `network`;
    `peak_memory` is the estimate of a build's resident bytes.
    """

    output_dir: Path
    config: EngineConfig | None
    evidence: Evidence
    reports: list[PassReport]
    plan: StoragePlan
    weight_bytes: int
    memory: Mapping[str, object]
    manifest: Manifest | None = None
    peak_memory: int | None = None
    network: Path | None = None


@dataclass(frozen=True)
class _Traced:
    """A source and its traced graph, from which one or several engines are built.

    `keeps`: the matrices keep the formats that the source has.
    """

    source: Source
    quantization: Quantization
    keeps: bool
    longest: int
    weigh: Weighting | None
    graph: Graph


@dataclass
class _Build:
    request: BuildRequest
    source: Source
    tolerance: Quantization
    storage: Storage
    graph: Graph
    memory: Mapping[str, object]
    longest: int
    reports: list[PassReport] = field(default_factory=list)
    importance: Importance = all_alike
    solver: Solver | None = None


def build(request: BuildRequest, progress: Progress | None = None) -> BuildResult:
    """Builds an engine and publishes it in one step; nothing is published on an error.

    Raises:
        SpikeError: with the code of the part that refused; SPK580 (exit 4) if the engine is too far
            from its source, SPK420 (exit 4) if no engine keeps the quality budget.
    """
    tell = progress or Progress()
    if request.backend == "tensorrt":
        require_target(request)
    traced = _trace(request, tell)
    if request.budgeted:
        return _solve(request, traced, tell)
    work = _place(request, traced, traced.graph, tell)
    assert work.storage.plan is not None
    size = total_bytes(work.graph)
    if request.dry_run:
        plan, off = work.storage.plan, Evidence("off")
        peak = peak_memory(request, work.graph, work.source)
        return BuildResult(
            request.output_dir, None, off, work.reports, plan, size, work.memory, peak_memory=peak
        )
    if request.plan_only:
        return _plan_only(work, work.storage.plan, size, tell)
    result = _finish(work, work.storage.plan, size, tell)
    assert result is not None
    return result


def _solve(request: BuildRequest, traced: _Traced, tell: Progress) -> BuildResult:
    """Chooses formats, builds and measures until an engine keeps the budget (compiler/solve)."""
    text = print_graph(traced.graph)  # passes rewrite in place, and every round runs them
    again = replace(request, verify_passes=False)  # the first time is enough
    work = _place(request, traced, traced.graph, tell)
    overrides = Overrides(request.formats)
    solver = open_solver(
        request, work.graph, work.source.checkpoint, overrides, traced.longest, tell
    )
    while True:
        chosen = solver.selection
        tell.finish()
        tell.note(f"round {len(solver.rounds.trials) + 1}: predicted KL {chosen.kl:.3g} nats")
        work = _place(again, traced, parse_graph(text), tell, solver)
        assert work.storage.plan is not None
        result = _finish(work, work.storage.plan, total_bytes(work.graph), tell)
        if result is not None:
            return result
        trial = solver.rounds.trials[-1]
        tell.finish()
        tell.note(
            f"it measured {trial.measured:.3g} nats in {chosen.bytes / 1e6:.4g} MB of matrices"
        )
        solver.selection = solver.rounds.next()


def _trace(request: BuildRequest, tell: Progress) -> _Traced:
    """Checkpoint to traced graph; reads no weights."""
    cpu_tier()  # a wrong SPIKE_CPU ends the build now, not at the golden gate
    tell.phase("checkpoint")
    source = open_source(request.model, request.model_type)
    if request.backend == "tensorrt":
        source = storable(source)
    checkpoint = source.checkpoint
    for note in checkpoint.notes:
        tell.note(note)
    _check_chat_template(checkpoint.path)
    stored = next(iter(checkpoint.parameters.values())).dtype
    dtype = str(stored).removeprefix("torch.") if request.dtype == "auto" else request.dtype
    chosen = Quantization.parse(request.quantization, dtype)
    keeps = source.keeps(request.quantization) and not request.budgeted
    quantization = source.own if keeps and source.own else chosen
    if source.quantised and not keeps and (request.budgeted or quantization not in FLOAT_NAMES):
        tell.note(requantised(source.quantised, MIXED if request.budgeted else quantization))
    longest = sequence_limit(request, checkpoint)
    weigh = weighting(request, checkpoint, quantization)
    tell.phase("trace")
    graph = import_model(checkpoint, max_positions=longest, streaming=request.enable_streaming)
    return _Traced(source, quantization, keeps, longest, weigh, graph)


def _place(
    request: BuildRequest,
    traced: _Traced,
    graph: Graph,
    tell: Progress,
    solver: Solver | None = None,
) -> _Build:
    """Traced graph to placed graph; reads weights only to decide about half precision."""
    checkpoint, longest = traced.source.checkpoint, traced.longest
    overrides = Overrides(request.formats)
    own = traced.source.given if traced.keeps else nothing_given
    given = first_given(overrides, solver.given if solver else own)
    storage = Storage(traced.quantization, model_facts(checkpoint, traced.weigh is not None), given)
    cache = kv_format(request, traced.quantization)
    phases = passes_for(request, checkpoint, storage, cache, longest)
    tell.phase("passes", sum(len(p.passes) for p in phases), "passes")
    watch = _Watch(request, graph, checkpoint, longest, tell)
    reports = run_pipeline(graph, phases, watch)
    overrides.check()
    for note in traced.source.notes():
        tell.note(note)
    memory = memory_report(graph, request, longest)
    weigh = traced.weigh
    if weigh is not None:
        weigh.check(graph, own, reports, tell)
    # Blocks that are kept are exact, but their kernels round activations, as q8_0's do.
    rounds = traced.keeps and storage.plan is not None and storage.plan.has_blocks
    tolerance = Quantization.Q8_0 if rounds else traced.quantization
    importance = solver.importance if solver else weigh or all_alike
    return _Build(
        request, traced.source, tolerance, storage, graph, memory, longest, reports, importance,
        solver,
    )  # fmt: skip


def _check_chat_template(checkpoint: Path) -> None:
    """Raises SPK129 for a template that no conversation could use."""
    try:
        if template := ChatTemplate.open(checkpoint, {}):
            template.check()
    except SpikeError as error:
        raise SpikeError(
            "SPK129",
            "checkpoint",
            f"the chat template in {checkpoint} can't be used: {error.what}.",
            "Download it again, or remove it: the engine then takes plain prompts only.",
        ) from error


class _Watch(Observer):
    """Progress, `--dump-ir` and `--verify-passes` around every pass."""

    def __init__(
        self,
        request: BuildRequest,
        graph: Graph,
        checkpoint: Checkpoint,
        longest: int,
        tell: Progress,
    ) -> None:
        self.tell, self.streaming = tell, request.enable_streaming
        self.watchers: list[Observer] = []
        if request.dump_ir is not None:
            self.watchers.append(DumpIr(request.dump_ir, graph))
        if request.verify_passes:
            self.watchers.append(
                ValidatePasses(checkpoint.load, longest, repro=_repro_directory(request))
            )

    def before_pass(self, step: Pass, graph: Graph) -> None:
        for watcher in self.watchers:
            watcher.before_pass(step, graph)

    def after_pass(self, step: Pass, graph: Graph, report: PassReport) -> None:
        if self.streaming:
            require_streaming([report])
        for watcher in self.watchers:
            watcher.after_pass(step, graph, report)
        self.tell.advance(1)

    def after_phase(self, phase: str, graph: Graph) -> None:
        for watcher in self.watchers:
            watcher.after_phase(phase, graph)


def _repro_directory(request: BuildRequest) -> Path:
    """Where --verify-passes writes what reproduces a failure."""
    if request.dump_ir is not None:
        return request.dump_ir / "repro"
    return request.output_dir.with_name(f"{request.output_dir.name}.repro")


def _finish(work: _Build, plan: StoragePlan, size: int, tell: Progress) -> BuildResult | None:
    """Placed graph to published engine; None (only with a solver) if another one is wanted."""
    finish = _assemble_tensorrt if work.request.backend == "tensorrt" else _assemble
    return finish(work, plan, size, tell)


def _assemble(work: _Build, plan: StoragePlan, size: int, tell: Progress) -> BuildResult | None:
    """For ONNX Runtime: graph and weights, then the gate on what was written."""
    request, checkpoint, graph = work.request, work.source.checkpoint, work.graph
    with EngineWriter(
        request.output_dir, version=__version__, keep_failed=request.keep_failed
    ) as writer:
        waiting = 0 if request.resolved_quantizer == "plain" else size  # blocks before packing
        writer.require_space(size + waiting + SPARE)
        ready = quantize_model(request, work.source, graph, work.longest, writer.path, tell)
        tell.phase("weights", size, "bytes")
        with writer.weights() as weights:
            written = write_weights(
                graph, checkpoint, weights, request.workers, tell, ready, work.importance
            )
        tell.phase("engine")
        rows = {s.name: row_bytes(s) for s in graph.states.values() if s.kind == "kv"}
        model = emit_onnx(graph, written.tensors, WEIGHTS, rows, request.tokens_per_block)
        writer.write(MODEL, model.SerializeToString(deterministic=True))
        _copy_tokenizer(checkpoint, writer)
        measured = _measured(work, written.errors)
        config = engine_config(
            request, checkpoint, graph, weights.specs, work.reports, plan, work.memory, measured
        )
        writer.stage(config, provenance(request, checkpoint))
        with ExitStack() as stack:
            evidence = _gate(
                work, lambda: _scorers(stack.enter_context(SpikeEngine(writer.path))), tell
            )
        if evidence is None:
            return None
        manifest = _publish(work, writer, evidence, tell)
    return BuildResult(
        request.output_dir, config, evidence, work.reports, plan, size, work.memory, manifest
    )


def _assemble_tensorrt(
    work: _Build, plan: StoragePlan, size: int, tell: Progress
) -> BuildResult | None:
    """The same for TensorRT: the gate comes before the engine, which it can't run."""
    request, checkpoint, graph = work.request, work.source.checkpoint, work.graph
    with EngineWriter(
        request.output_dir, version=__version__, keep_failed=request.keep_failed
    ) as writer:
        writer.require_space(3 * size + SPARE)  # constants, and the engine that holds them again
        network = _network(work, size, writer.path, tell)
        evidence = _gate(work, network.emulation.scorers, tell)
        if evidence is None:
            return None
        if evidence.status == "failed" and not request.keep_failed:
            raise _too_far(work, evidence)  # nobody would see the engine
        ran = "" if evidence.status == "off" else EXECUTED
        evidence = replace(evidence, executed=ran, validated_on_gpu=False)
        tell.phase("engine")
        built = build_engine(graph, network.plan, network.constants, network.target, tell.note)
        writer.write(MODEL, built.data)
        writer.write(NETWORK, network.json().encode())
        network.check_set(checkpoint, work.longest).save(writer.path)
        _copy_tokenizer(checkpoint, writer)
        measured = _measured(work, network.constants.errors)
        spec = network.spec(built.version)
        config = engine_config(
            request, checkpoint, graph, (), work.reports, plan, work.memory, measured, spec
        )
        writer.stage(config, provenance(request, checkpoint))
        manifest = _publish(work, writer, evidence, tell)
    return BuildResult(
        request.output_dir, config, evidence, work.reports, plan, size, work.memory, manifest
    )


def _plan_only(work: _Build, plan: StoragePlan, size: int, tell: Progress) -> BuildResult:
    """A TensorRT network as JSON, with the hashes of what it holds."""
    request = work.request
    with tempfile.TemporaryDirectory() as scratch:
        network = _network(work, size, Path(scratch), tell)
        written = write_plan(request.output_dir, plan_document(network, plan))
    off = Evidence("off", reason="--plan-only", validated_on_gpu=False)
    return BuildResult(
        request.output_dir, None, off, work.reports, plan, size, work.memory, network=written
    )


def _network(work: _Build, size: int, directory: Path, tell: Progress) -> Network:
    """A placed graph's network with its constants, which wait in the directory."""
    request, graph = work.request, work.graph
    constants = NetworkConstants(graph, directory)
    network = Network.of(request, graph, work.longest, constants)
    ready = quantize_model(request, work.source, graph, work.longest, directory, tell)
    tell.phase("weights", size, "bytes")
    constants.fill(work.source.checkpoint, ready, work.importance, request.workers, tell.advance)
    return network


def _copy_tokenizer(checkpoint: Checkpoint, writer: EngineWriter) -> None:
    for path in checkpoint.tokenizer_files():
        if path.name == TOKENIZER:
            writer.write(TOKENIZER, compact_tokenizer(path))
        else:
            writer.copy(path)


def _gate(work: _Build, open_scorers: Callable[[], Scorers], tell: Progress) -> Evidence | None:
    """Measures an engine; None if the solver wants another one."""
    tell.phase("golden gate")
    states = [s.format for s in work.graph.states.values()]
    thresholds = limits(work.request, work.tolerance, states[0] if states else "f32")
    evidence = measure(work.request, work.source.checkpoint, thresholds, open_scorers, tell)
    if work.solver is not None and not work.solver.rounds.accept(mean_kl(evidence)):
        return None
    return evidence


def _measured(work: _Build, errors: Mapping[str, float]) -> dict[str, object]:
    """Figures per tensor for the engine's report."""
    return {RELATIVE_ERROR: errors, **(work.solver.figures() if work.solver else {})}


def _publish(work: _Build, writer: EngineWriter, evidence: Evidence, tell: Progress) -> Manifest:
    """Adds the evidence to the staged engine and publishes that.

    Raises SPK580 (exit 4) if it is too far from its source.
    """
    writer.record(evidence, work.solver.pareto() if work.solver else None)
    if evidence.status == "failed":
        raise _too_far(work, evidence)
    tell.phase("publish")
    return writer.publish()


def _too_far(work: _Build, evidence: Evidence) -> SpikeError:
    return SpikeError(
        "SPK580",
        "golden gate",
        f"the engine is too far from its source: {evidence.reason}.",
        _what_to_try(work),
        ExitCode.GOLDEN_FAILED,
    )


def _what_to_try(work: _Build) -> str:
    """The remedy of SPK580, by what rounded anything."""
    steps = []
    if work.request.keep_failed:
        steps.append(f"It is kept in {work.request.output_dir}.failed.")
    assert work.storage.plan is not None
    if work.storage.plan.has_blocks and work.request.quantization not in ("none", "auto"):
        finest = work.request.backend == "tensorrt" or work.tolerance is Quantization.Q8_0
        finer = "none" if finest else "q8_0 or none"
        steps.append(
            f"Try --quantization {finer}: models of random weights, such as tests use, suffer far "
            "more from rounding than trained ones."
        )
    if any(s.format in ("int8", "int4") for s in work.graph.states.values()):
        steps.append("Try --kv-cache-dtype f16.")
    steps.append(
        "Or allow more in a recipe (golden: {thresholds: {mean_kl: ...}}). --verify-passes tells "
        "whether a pass is to blame."
    )
    return " ".join(steps)


def _scorers(engine: SpikeEngine) -> Scorers:
    """The staged engine under test, prefill in chunks and token by token."""

    def prefill(tokens: list[int]) -> npt.NDArray[np.float32]:
        return engine.score(tokens)

    def decode(tokens: list[int]) -> npt.NDArray[np.float32]:
        return engine.score(tokens, chunk_tokens=1)

    return Scorers(prefill, decode, engine.max_seq_len)
