"""`spike build`: progress while it runs, then what came of it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compiler.assembly.calibration_text import text_of
from ..compiler.assembly.request import BuildRequest
from ..compiler.engine.cache import cache_line
from ..compiler.engine.checks import require_replaceable
from ..compiler.engine.manifest import MODEL, WEIGHTS
from ..compiler.gguf.reader import unreadable
from .options import require_build_extra, require_place
from .progress import progress_for
from .tables import duration, facts, section, sections, size, table
from .terminal import Terminal

HEADLINE = ("mean KL (nats)", "top-1 agreement", "perplexity ratio")

if TYPE_CHECKING:
    from ..compiler.engine import EngineConfig, Evidence
    from ..driver import BuildResult


def run_build(request: BuildRequest, terminal: Terminal) -> None:
    """Build, and show the result. Raises what the driver raises; SPK804 without its packages."""
    require_build_extra()
    _check_files(request)
    with progress_for(terminal) as progress:
        progress.phase("start")  # importing torch takes seconds, and silence looks like a hang
        from ..driver import build

        begun = time.monotonic()
        result = build(request, progress)
    seconds = time.monotonic() - begun
    if terminal.json:
        terminal.event("result", **outcome(request, result, seconds))
    elif result.network is not None:
        print(network_text(result, seconds), flush=True)
    elif request.dry_run:
        print(plan_text(request, result), flush=True)
    else:
        print(result_text(result, seconds), flush=True)


def _check_files(request: BuildRequest) -> None:
    """Raises now, before torch is imported, what reading and writing files would raise later.

    SPK504 or SPK817 for the output, SPK816 for calibration text, SPK126 for importances.
    """
    if not request.dry_run:
        require_place(request.output_dir)
        require_replaceable(Path(os.path.realpath(request.output_dir)))
    if request.calibration is not None:
        text_of(request.calibration)
    if request.imatrix is not None:
        try:
            request.imatrix.open("rb").close()
        except OSError as error:
            raise unreadable(request.imatrix, error, "importances") from error


def outcome(request: BuildRequest, result: BuildResult, seconds: float) -> dict[str, object]:
    """The result event."""
    return {
        "engine": str(result.output_dir) if result.manifest else None,
        "plan": str(result.network) if result.network else None,
        "engine_id": result.manifest.engine_id if result.manifest else None,
        "weight_bytes": result.weight_bytes,
        "bits_per_weight": result.plan.bits_per_weight,
        "storage": result.plan.table(),
        "memory_plan": dict(result.memory),
        "peak_memory": result.peak_memory,
        "passes": dict(_fired(result)),
        "golden": {
            "status": result.evidence.status,
            "set": result.evidence.golden_set,
            **{m.name: m.value for m in result.evidence.measurements},
            "executed": result.evidence.executed,
            "validated_on_gpu": result.evidence.validated_on_gpu,
        },
        "seconds": round(seconds, 3),
    }


def result_text(result: BuildResult, seconds: float) -> str:
    """A few lines: what it is, how good it is, how to use it."""
    bits = result.plan.bits_per_weight
    rows = [
        ("Engine", f"{result.output_dir}, built in {duration(seconds)}"),
        ("Weights", f"{weights_size(result)}, {bits:.2f} bits each"),
        *(config_rows(result.config) if result.config else ()),
        ("Golden", golden_line(result.evidence)),
        *device_rows(result),
        ("Try it", f'spike run {result.output_dir} "The capital of France is"'),
    ]
    return facts(rows)


def network_text(result: BuildResult, seconds: float) -> str:
    """What `--plan-only` wrote."""
    rows: list[tuple[str, object]] = [
        ("Plan", f"{result.network}, in {duration(seconds)}"),
        ("Weights", f"{size(result.weight_bytes)}, {result.plan.bits_per_weight:.2f} bits each"),
        ("Engine", "none: --plan-only builds no engine, and nothing was checked"),
    ]
    return facts(rows)


def device_rows(result: BuildResult) -> list[tuple[str, object]]:
    """What the gate of a TensorRT engine did not see."""
    if result.evidence.validated_on_gpu is None:
        return []
    ran = result.evidence.executed or "nothing has run; the golden gate was off"
    return [("Executed", ran), ("On a GPU", f"spike verify --on-device {result.output_dir}")]


def weights_size(result: BuildResult) -> str:
    """Of rank0.weights, which is what --max-size limits; what of it is padding, where it shows."""
    assert result.manifest is not None
    if WEIGHTS not in result.manifest.files:
        return f"{size(result.weight_bytes)} in {MODEL}"
    file = result.manifest.files[WEIGHTS].size
    padding = file - result.weight_bytes
    return size(file) + (f" ({size(padding)} of it pads to pages)" if 50 * padding > file else "")


def config_rows(config: EngineConfig) -> list[tuple[str, object]]:
    """Interface and capacity of an engine."""
    build, model = config.build_config, config.pretrained_config
    return [
        ("Model", f"{model.architecture}, {model.num_hidden_layers} layers"),
        ("Interface", f"{config.spike.abi} on {config.spike.backend}"),
        ("KV cache", cache_line(config)),
        ("Capacity", f"{build.max_batch_size} sequences of {build.max_seq_len} tokens, "
                     f"{build.max_num_tokens} tokens per step"),
        *gpu_rows(config),
    ]  # fmt: skip


def gpu_rows(config: EngineConfig) -> list[tuple[str, object]]:
    """What a TensorRT engine runs on, and what it takes there."""
    spec = config.spike.tensorrt
    if spec is None:
        return []
    taken = ", ".join(f"{size(count)} {name}" for name, count in spec.bytes.items())
    streamed = "; weights may stay in host memory" if spec.weight_streaming else ""
    return [
        ("GPUs", f"{', '.join(spec.sms)}, by TensorRT for RTX {spec.version}{streamed}"),
        ("On the GPU", f"{taken} (estimated)"),
    ]


def memory_line(memory: Mapping[str, Any]) -> str:
    """The memory plan in one line; empty for an engine from before there was one."""
    if "peak" not in memory:
        return f"not planned: {memory['not planned']}" if memory else ""
    ratio = memory["peak"] / max(1, memory["lower bound"])
    return (
        f"{size(memory['peak'])} of temporaries for {memory['tokens']} tokens in "
        f"{memory['buffers']} buffers, {ratio:.2f}x the least possible"
    )


def golden_line(evidence: Evidence) -> str:
    """Status and the first figures; `spike inspect` shows all of them with their limits."""
    if evidence.status == "off":
        return f"not checked ({evidence.reason})" if evidence.reason else "not checked"
    figures = {m.name: m.value for m in evidence.measurements}
    shown = [f"{name} {figures[name]:.3g}" for name in HEADLINE if name in figures]
    limited = sum(m.limit is not None for m in evidence.measurements)
    return f"{evidence.status}: {', '.join(shown)}; {limited} figures have limits"


def plan_text(request: BuildRequest, result: BuildResult) -> str:
    """What a dry run would build."""
    plan = result.plan
    rows = [
        (r["role"], r["format"], r["tensors"], r["megabytes"], r["why"], r["instead of"])
        for r in plan.table()
    ]
    header = ("Role", "Format", "#Tensors", "#MB", "Why", "Fallback")
    fired = _fired(result).items()
    misses = [(r.name, m.where, m.reason) for r in result.reports for m in r.missed]
    weights = sum(prod(c.shape) for c in plan.choices)
    total = (
        f"{weights / 1e6:,.1f} M weights in {size(result.weight_bytes)}, "
        f"{plan.bits_per_weight:.2f} bits each; nothing was written."
    )
    return sections(
        [
            section(f"Storage ({plan.quantization.value})", table(header, rows)),
            section("Passes", table(("Pass", "#Fired"), fired)),
            section("Near misses", table(("Pass", "Where", "Why not"), misses) if misses else ""),
            section("Memory of one step", memory_line(result.memory)),
            section("Building", building_line(result)),
            f"Dry run of {Path(request.model).name}: {total}",
        ]
    )


def building_line(result: BuildResult) -> str:
    """What the build itself will take."""
    peak = size(result.peak_memory or 0)
    gate = "the golden gate comes on top: it holds the source in float32 (--golden off: none)"
    return f"{peak} of memory at its peak, {size(result.weight_bytes)} of disk; {gate}"


def _fired(result: BuildResult) -> Counter[str]:
    """Rewrites by pass; a pass may run several times."""
    counts: Counter[str] = Counter()
    for report in result.reports:
        counts[report.name] += len(report.fired)
    return counts
