"""A placed graph to a serialized engine: plan, network, check, TensorRT's builder.

The bytes that come out differ from build to build (TensorRT's own doing); the plan doesn't.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ....errors import ExitCode, SpikeError
from ...ir import Graph
from .check import check_network
from .constants import Constants
from .network import Network, define
from .plan import NetworkPlan
from .target import Profile, Target

PACKAGE = "tensorrt-rtx"


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine.

    Args:
        data: what `Runtime.deserialize_cuda_engine` takes, on a machine with a GPU.
        version: of tensorrt_rtx; the engine runs on this version only.
        warnings: what TensorRT said meanwhile.
    """

    data: bytes
    version: str
    warnings: tuple[str, ...]


def installed_version() -> str:
    """The version of tensorrt_rtx. Raises SpikeError SPK527 if it isn't installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise SpikeError(
            "SPK527",
            "TensorRT",
            "building a TensorRT engine needs the package tensorrt-rtx, which isn't installed.",
            "pip install 'spikeinfer[tensorrt]'; or --plan-only, which needs nothing and writes "
            "what would be built.",
            ExitCode.UNSUPPORTED,
        ) from None


def build_engine(
    graph: Graph,
    plan: NetworkPlan,
    constants: Constants,
    target: Target,
    tell: Callable[[str], None] = lambda _: None,
) -> BuiltEngine:
    """Builds and checks the network of a plan, and serializes its engine.

    Args:
        graph: what the plan was made from, which the network is checked against.
        tell: called with what is done next.

    Raises SpikeError: SPK527 tensorrt_rtx isn't installed, SPK528 TensorRT refused, SPK529 the
    network differs from the graph (our bug), SPK531 a constant that can't be stored.
    """
    version = installed_version()
    trt = importlib.import_module("tensorrt_rtx")
    log = _log(trt)
    builder = trt.Builder(log)
    tell("network")
    network = define(trt, builder.create_network(0), plan, constants)
    tell("check")
    require_equal(network, graph, constants, target)
    tell("engine")
    config = _configured(trt, builder, plan, target)
    serialized = builder.build_serialized_network(network.definition, config)
    if serialized is None:
        raise _refused(log.messages)
    return BuiltEngine(bytes(serialized), version, tuple(log.messages))


def require_equal(network: Network, graph: Graph, constants: Constants, target: Target) -> None:
    """Raises SPK529 if the network is not the graph's."""
    findings = check_network(network.definition, graph, constants, target)
    if findings:
        raise SpikeError(
            "SPK529",
            "TensorRT network",
            f"it differs from the graph in {len(findings)} places, first: {findings[0]}.",
            "This is a bug of SpikeInfer; please report it with the model's config.json.",
            ExitCode.INTERNAL,
        )


def _log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        """Keeps warnings and errors."""

        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                self.messages.append(message)

    return Log()


def _configured(trt: Any, builder: Any, plan: NetworkPlan, target: Target) -> Any:
    config = builder.create_builder_config()
    capabilities = [s.upper() for s in target.sms]
    config.num_compute_capabilities = len(capabilities)
    for index, name in enumerate(capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if target.weight_streaming:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    for option in target.options:
        config.set_flag(getattr(trt.BuilderFlag, option.upper().replace("-", "_")))
    for profile in plan.profiles:
        config.add_optimization_profile(_shapes(builder, plan, profile))
    return config


def _shapes(builder: Any, plan: NetworkPlan, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for tensor in plan.inputs:
        ranges = [
            [profile.size(d, which) if isinstance(d, str) else d for d in tensor.shape]
            for which in range(3)
        ]
        made.set_shape(tensor.name, *ranges)
    return made


def _refused(messages: list[str]) -> SpikeError:
    said = next((m for m in messages if "Error Code" in m), messages[-1] if messages else "nothing")
    return SpikeError(
        "SPK528",
        "TensorRT",
        f"the builder refused the network. It said: {said.strip()}",
        "Try another --target-sm or --dtype; --plan-only writes the network for a report.",
        ExitCode.UNSUPPORTED,
    )
