"""A placed graph to a serialized engine: plan, network, check, TensorRT's builder.

The bytes that come out differ from build to build (TensorRT's own doing); the plan doesn't.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ....errors import ExitCode, SpikeError
from ...ir import Graph
from .check import check_network
from .constants import Constants
from .network import Network, define
from .plan import NetworkPlan
from .target import CURRENT, Profile, Target

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
    network differs from the graph (our bug), SPK530 the timing cache can't be used, SPK531 a
    constant that can't be stored.
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
    cache = _open_cache(config, target.timing_cache)
    serialized = builder.build_serialized_network(network.definition, config)
    if serialized is None:
        raise _refused(log.messages)
    if cache is not None and target.timing_cache is not None:
        _save_cache(cache, target.timing_cache)
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


def _open_cache(config: Any, path: Path | None) -> Any:
    """The timing cache that the builder reads and adds to; None if none is asked for."""
    if path is None:
        return None
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise _cache_problem(path, str(error)) from error
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise _cache_problem(path, "another version of TensorRT wrote it, or it is damaged")
    return cache


def _save_cache(cache: Any, path: Path) -> None:
    """Written beside and renamed: whoever builds at the same time reads the old or the new one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(bytes(cache.serialize()))
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise _cache_problem(path, str(error)) from error


def _cache_problem(path: Path, reason: str) -> SpikeError:
    return SpikeError(
        "SPK530",
        "TensorRT",
        f"the timing cache {path} can't be used: {reason}.",
        "Delete the file, or name another one.",
    )


def _refused(messages: list[str]) -> SpikeError:
    said = next((m for m in messages if "Error Code" in m), messages[-1] if messages else "nothing")
    return SpikeError(
        "SPK528",
        "TensorRT",
        f"the builder refused the network. It said: {said.strip()}",
        "Try another --target-sm or --dtype; --plan-only writes the network for a report.",
        ExitCode.UNSUPPORTED,
    )


assert CURRENT.upper() == "CURRENT"  # ComputeCapability's name
