"""The passes of one build: the default order, with the build's policies and options set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from ...errors import ExitCode, SpikeError
from ...passes.assign_kernels import AssignKernels
from ...passes.assign_precision import DTYPES, AssignPrecision
from ...passes.assign_storage import AssignStorage
from ...passes.base import Pass, PassReport
from ...passes.manager import Observer, Phase
from ...passes.pipeline import configure, default_pipeline
from ..backends import KERNEL_NAMES
from ..frontend.checkpoint import Checkpoint
from ..ir import OPS, Constant, Graph, print_graph
from ..quantize import Given, ModelFacts, Quantization, Role, StoragePlan, TensorSpec, plan
from .calibration import observer
from .calibration_text import text_of
from .request import BuildRequest

STREAMING_ONLY = ("alias-kv", "flatten-tokens", "select-logit-rows")
NOT_FOR_TENSORRT = (
    "flatten-tokens", "select-logit-rows", "raise-gated-mlp", "fuse-residual", "fuse-qkv",
)  # fmt: skip
"""TensorRT fuses by itself, its caches are [batch, capacity], and every part of an MLP is a tensor
there, which needs its own certificate."""


GivenFormat: TypeAlias = Callable[[Constant], Given | None]
"""The format of a matrix that is settled before the quantisation's rules: None if it isn't."""


def nothing_given(_: Constant) -> Given | None:
    """The rules decide about every matrix."""
    return None


class Storage:
    """The quantisation's rules as a policy for assign-storage; keeps the plan for the report."""

    def __init__(
        self, quantization: Quantization, model: ModelFacts, given: GivenFormat = nothing_given
    ) -> None:
        self.quantization, self.model, self.given = quantization, model, given
        self.plan: StoragePlan | None = None

    def __call__(self, matrices: Sequence[Constant]) -> Mapping[str, str]:
        """Storage format of every matrix."""
        specs = [
            TensorSpec(c.name, Role(c.role), tuple(d for d in c.shape if isinstance(d, int)))
            for c in matrices
        ]
        settled = {c.name: given for c in matrices if (given := self.given(c))}
        self.plan = plan(self.quantization, specs, self.model, settled)
        return self.plan.formats


def passes_for(
    request: BuildRequest, checkpoint: Checkpoint, storage: Storage, kv_format: str, longest: int
) -> tuple[Phase, ...]:
    """The phases of this build, for sequences of up to `longest` tokens.

    A dry run reads no weights, so it does not decide about half precision.

    Raises SPK301..303 for wrong names or options in the recipe, SPK816 for calibration text.
    """
    if request.calibration is not None:
        text_of(request.calibration)  # a dry run, too, tells whether the build can read it
    left_out = set(request.without)
    tensorrt = request.backend == "tensorrt"
    if tensorrt:
        left_out.update(NOT_FOR_TENSORRT)
    elif not request.enable_streaming:
        left_out.update(STREAMING_ONLY)
    phases = configure(default_pipeline(), without=left_out, options=request.pass_options)

    kernels = {op: f"tensorrt.{op}" for op in OPS} if tensorrt else KERNEL_NAMES

    def with_policy(step: Pass) -> Pass:
        if isinstance(step, AssignStorage):
            return replace(step, policy=storage, kv_format=kv_format)
        if isinstance(step, AssignPrecision) and request.dtype in DTYPES and not request.dry_run:
            return replace(
                step,
                dtype=request.dtype,
                longest=longest,
                round_outputs=tensorrt and request.dtype == "float16",  # bfloat16 is too coarse
                parameters=checkpoint.load,
                observe=observer(checkpoint, request.calibration, longest),
            )
        return replace(step, kernels=kernels) if isinstance(step, AssignKernels) else step

    return tuple(Phase(p.name, tuple(map(with_policy, p.passes))) for p in phases)


class DumpIr(Observer):
    """Writes one IR file per phase: ``0-traced.ir``, ``1-clean.ir``, ..."""

    def __init__(self, directory: Path, traced: Graph) -> None:
        self.directory, self.count = directory, 0
        directory.mkdir(parents=True, exist_ok=True)
        self.after_phase("traced", traced)

    def after_phase(self, phase: str, graph: Graph) -> None:
        """One more file."""
        path = self.directory / f"{self.count}-{phase}.ir"
        path.write_text(print_graph(graph), encoding="utf-8")
        self.count += 1


def require_streaming(reports: Sequence[PassReport]) -> None:
    """Raises SPK306 if the graph could not be made ragged, with the node that blocks it."""
    for report in reports:
        if report.name not in ("alias-kv", "flatten-tokens") or not report.missed:
            continue
        miss = report.missed[0]
        raise SpikeError(
            "SPK306",
            "streaming",
            f"{report.name} refuses in {miss.where}: {miss.reason}.",
            "Build without --enable-streaming: the functional engine does not need it.",
            ExitCode.UNSUPPORTED,
        )
