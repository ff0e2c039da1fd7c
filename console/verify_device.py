"""`spike verify --on-device`: a TensorRT engine's own kernels against what was emulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..compiler.engine import EngineDirectory, Evidence, Measurement
from ..compiler.engine.manifest import DEVICE_CHECK
from ..compiler.engine.revise import evidence_in, publish_evidence
from ..compiler.golden import GoldenReport, GoldenSet, check, thresholds_for
from ..errors import ExitCode
from .golden import FLOATS
from .options import usage
from .tables import facts
from .terminal import Terminal

ON_DEVICE = "on device: "


def verify_on_device(path: Path, terminal: Terminal) -> int:
    """Runs the engine here and records in its evidence whether it does what the build certified.

    Exit code 4 if it doesn't. Raises SPK807 for an engine that runs on CPUs, SPK508 for one that is
    damaged, SPK621..SPK624 where it can't run.
    """
    engine = EngineDirectory.open(path, verify=True)
    spec = engine.config.spike.tensorrt
    if spec is None:
        raise usage(
            f"{path} runs on CPUs: its golden gate ran the engine itself.",
            "--on-device is for engines built with --backend tensorrt.",
        )
    from ..runtime import SpikeEngine
    from ..runtime.cuda import Gpu

    expected = GoldenSet.load(path / DEVICE_CHECK)
    limits = thresholds_for(FLOATS[spec.dtype], "float32")
    with SpikeEngine(path) as running:
        report = check(
            expected, running.score, limits, lambda tokens: running.score(tokens, chunk_tokens=1)
        )
    device = Gpu()
    name = f"{device.name}, driver for CUDA {device.driver_version}"
    device.close()
    publish_evidence(engine, with_device(evidence_in(engine), report, name))
    verdict = "the engine's own kernels agree" if report.passed else "; ".join(report.failures)
    rows: list[tuple[str, object]] = [
        ("Engine", path),
        ("GPU", name),
        ("Against", f"the build's emulation, {report.positions} positions"),
        ("Mean KL", f"{report.mean_kl:.4g} nats (limit {limits.mean_kl:.4g})"),
        ("Prefill-decode", f"{report.decode_error or 0:.4g} (limit {limits.decode_error:.4g})"),
        ("Verdict", verdict if report.passed else f"FAILED: {verdict}"),
    ]
    data = {"path": str(path), "gpu": name, "validated_on_gpu": report.passed, **report.to_json()}
    terminal.answer(facts(rows), data)
    return int(ExitCode.OK if report.passed else ExitCode.GOLDEN_FAILED)


def with_device(evidence: Evidence, report: GoldenReport, device: str) -> Evidence:
    """Evidence that says what the device's kernels did; what was said of it before goes."""
    kept = [m for m in evidence.measurements if not m.name.startswith(ON_DEVICE)]
    limits = report.thresholds
    found = [
        Measurement(f"{ON_DEVICE}mean KL (nats)", report.mean_kl, limits.mean_kl),
        Measurement(f"{ON_DEVICE}p99 KL (nats)", report.p99_kl, limits.p99_kl),
        Measurement(f"{ON_DEVICE}top-1 agreement", report.top1, limits.top1, "higher"),
        Measurement(f"{ON_DEVICE}prefill - decode", report.decode_error or 0.0,
                    limits.decode_error),
    ]  # fmt: skip
    return dataclasses.replace(
        evidence,
        measurements=(*kept, *(row.storable() for row in found)),
        validated_on_gpu=report.passed,
        executed=f"{evidence.executed.split('; ')[0]}; the engine's own kernels ran on {device}",
    )
