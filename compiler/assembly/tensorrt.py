"""A build for TensorRT: what it is for, what its source may keep, and what its engine states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ExitCode, SpikeError
from ...passes.assign_precision import DTYPES
from ..backends.tensorrt import (
    MemoryReport,
    NetworkPlan,
    Target,
    installed_version,
    memory_report,
    plan_network,
)
from ..engine import AliasSpec, ProfileSpec, TensorRtSpec
from ..engine.durable import write_file
from ..engine.schema import encode
from ..frontend.checkpoint import Checkpoint
from ..golden import text_windows
from ..golden.sets import GoldenSet, Provenance
from ..ir import Constant, Graph
from ..quantize import Blocks, Given, StoragePlan
from ..quantize.int4 import INT4_SYM, has_positive_scales
from .emulation import Emulation, device_check
from .network_constants import NetworkConstants
from .request import LONGEST_DEFAULT, TENSORRT_FORMATS, BuildRequest
from .source import Source

CAPACITY_MULTIPLE = 8
CHECK_TOKENS, CHECK_WINDOW = 192, 96
DEVICE_CHECK = "device-check"
PLAN_FILE = "plan.json"


def require_target(request: BuildRequest) -> None:
    """Refuses, before any work, what TensorRT would refuse after minutes.

    Raises SPK520..SPK524 as `Target.check`; SPK527 if an engine is to be built and the package that
    builds it is missing.
    """
    longest = request.max_seq_len or LONGEST_DEFAULT
    types = {"int4"} if request.quantization == INT4_SYM or request.budgeted else set()
    if request.wants_fp8:
        types.add("fp8")
    target_of(request, longest).check(types)
    request.require_quantization()  # a name that only later versions know, after what it needs
    if not request.plan_only and not request.dry_run:
        installed_version()


def target_of(request: BuildRequest, longest: int) -> Target:
    """For sequences of up to `longest` tokens; a cache row has a scratch place besides."""
    names = (request.target_sm or "").split(",")
    return Target(
        sms=tuple(name.strip().lower() for name in names if name.strip()),
        dtype=DTYPES[request.dtype],
        capacity=-(-(longest + 1) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE,
        max_batch_size=request.max_batch_size,
        max_num_tokens=min(request.max_num_tokens, longest),
        weight_streaming=request.weight_streaming,
        timing_cache=request.timing_cache,
    )


def storable(source: Source) -> Source:
    """The source, keeping only what TensorRT stores: floats, and q4_0 whose scales are all above
    zero, which is int4_sym.

    Its `given` raises SPK561 for other blocks.
    """

    def given(const: Constant) -> Given | None:
        found = source.given(const)
        if found is None or found.format in TENSORRT_FORMATS:
            return found
        blocks = source.ready(replace(const, format=found.format))
        if found.format == "q4_0" and blocks is not None and has_positive_scales(blocks.rows):
            return Given(INT4_SYM, found.why, found.fallback)
        raise _asymmetric(const, found.format, source.quantised)

    def as_q4_0(const: Constant) -> Constant:
        return replace(const, format="q4_0") if const.format == INT4_SYM else const

    def ready(const: Constant) -> Blocks | None:
        found = source.ready(as_q4_0(const))
        return found and Blocks(const.format, found.rows, found.k)

    return replace(
        source, given=given, ready=ready, has_blocks=lambda c: source.has_blocks(as_q4_0(c))
    )


def _asymmetric(const: Constant, format: str, quantised: str) -> SpikeError:
    return SpikeError(
        "SPK561",
        "quantization",
        f"the source is quantised already ({quantised}), and TensorRT has no {format}, which "
        f"{const.parameter} is stored as: its int4 is symmetric, with one scale above zero per "
        "block.",
        "--quantization int4_sym quantises it again, and the report and the golden gate say what "
        "that loses; --quantization f16 keeps its values in 16 bits each. Best is the checkpoint "
        "that was never quantised.",
        ExitCode.UNSUPPORTED,
    )


@dataclass
class Network:
    """A network that is ready to be built.

    Args:
        target: what for.
        plan: its layers.
        constants: filled.
        emulation: what it computes, for the golden gate.
    """

    target: Target
    plan: NetworkPlan
    constants: NetworkConstants
    emulation: Emulation

    @classmethod
    def of(
        cls, request: BuildRequest, graph: Graph, longest: int, constants: NetworkConstants
    ) -> Network:
        """From a placed graph. Raises SPK525 and SPK526 for what has no layers."""
        target = target_of(request, longest)
        plan = plan_network(graph, target)
        return cls(target, plan, constants, Emulation(graph, plan, constants, longest))

    def json(self) -> str:
        """The plan with the hashes of its constants: the same bytes for the same inputs."""
        return self.plan.to_json(self.constants)

    def spec(self, version: str) -> TensorRtSpec:
        """What config.json states; `version` is TensorRT's."""
        return TensorRtSpec(
            version=version,
            sms=self.target.sms,
            dtype="bf16" if self.target.dtype.value == "bf16" else "f16",
            capacity=self.target.capacity,
            profiles=tuple(
                ProfileSpec(p.name, p.batches, p.steps, p.rows) for p in self.plan.profiles
            ),
            aliases=tuple(AliasSpec(a.state, a.input, a.output) for a in self.plan.aliases),
            weight_streaming=self.target.weight_streaming,
            bytes=_bytes(memory_report(self.plan)),
        )

    def check_set(self, checkpoint: Checkpoint, longest: int) -> GoldenSet:
        """Emulated logits that the engine's own are compared with where there is a GPU."""
        vocab = self.plan.outputs[0].shape[-1]
        assert isinstance(vocab, int)
        windows = text_windows(checkpoint.path, vocab, CHECK_TOKENS, min(CHECK_WINDOW, longest))
        made = Provenance(
            model=checkpoint.path.name,
            architecture=checkpoint.architecture,
            weights={},
            dtype=f"{self.target.dtype.value}, emulated",
            attention="reference interpreter",
            versions={},
        )
        return device_check(DEVICE_CHECK, windows, self.emulation.prefill, made)


def _bytes(report: MemoryReport) -> dict[str, int]:
    """By what takes them, for a person."""
    steps = {
        f"{name} step": size + report.logits[name] for name, size in report.activations.items()
    }
    return {"weights": report.weights, "kv cache": report.caches, **steps}


def plan_document(network: Network, storage: StoragePlan) -> bytes:
    """What `--plan-only` writes: target, sizes, storage and the network, as canonical JSON."""
    spec = network.spec("")
    return encode(
        {
            "format": "spikeinfer-tensorrt-plan",
            "target": {"sms": spec.sms, "dtype": spec.dtype, "capacity": spec.capacity,
                       "weight streaming": spec.weight_streaming},
            "profiles": spec.profiles,
            "bytes": memory_report(network.plan).to_json(),
            "storage": storage.table(),
            "relative error": network.constants.errors,
            "network": network.plan.document(network.constants),
        }
    )  # fmt: skip


def write_plan(directory: Path, document: bytes) -> Path:
    """`PLAN_FILE` in `directory`, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PLAN_FILE
    beside = directory / f".{PLAN_FILE}.part"
    beside.unlink(missing_ok=True)
    write_file(beside, [document])
    beside.replace(path)
    return path
