"""`spike doctor`: what this machine has, what is installed, and whether engines can run here."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiler.engine.cpu_features import missing_cpu_features
from ..errors import ExitCode
from .options import installed
from .tables import facts, section, sections, size
from .terminal import Terminal

if TYPE_CHECKING:
    from ..kernels import CpuFeature

FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq",
            "avx512_vnni", "avx512_bf16", "amx_int8")  # fmt: skip
"""As /proc/cpuinfo spells them; those that kernels look for, and the next ones."""
PARTS = {
    "runtime": ("numpy", "onnxruntime", "tokenizers", "jinja2"),
    "build": ("torch", "transformers", "onnx", "safetensors", "gguf"),
    "serve": ("fastapi", "uvicorn", "prometheus-client"),
    "tensorrt": ("tensorrt-rtx",),
}
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")


def examine(terminal: Terminal) -> int:
    """Print the findings; exit code 5 if engines can't run here."""
    from .. import __version__

    machine = [
        ("SpikeInfer", __version__),
        ("Python", platform.python_version()),
        ("System", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("CPU", _cpu_name()),
        ("Cores", f"{os.cpu_count()} logical, {_threads()} used"),
        ("Features", _features()),
        ("Memory", _memory()),
        ("Disk", f"{size(shutil.disk_usage('.').free)} free here, {_cache()}"),
    ]
    packages = {part: {n: installed(n) for n in names} for part, names in PARTS.items()}
    checks = {"kernels": _kernels(), "ONNX Runtime with our ops": _ops()}
    problems = [f"{name}: {found}" for name, found in checks.items() if found.startswith("FAILED")]
    verdict = "Engines can't run here." if problems else "Engines can run here."
    missing = [n for n, v in packages["build"].items() if v is None]
    building = f"needs {', '.join(missing)}: pip install 'spikeinfer[build]'" if missing else "yes"
    text = sections(
        [
            section("Machine", facts(machine)),
            section("Packages", facts((p, _versions(found)) for p, found in packages.items())),
            section("Checks", facts([*checks.items(), ("building", building)])),
            verdict,
        ]
    )
    data = {"machine": dict(machine), "packages": packages, "checks": checks, "ok": not problems}
    terminal.answer(text, data)
    return int(ExitCode.UNSUPPORTED if problems else ExitCode.OK)


def _versions(found: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or '-'}" for name, version in found.items())


def _features() -> str:
    missing = missing_cpu_features(FEATURES)
    have = ", ".join(name for name in FEATURES if name not in missing)
    return "; ".join(filter(None, [have, "not " + ", ".join(missing) if missing else ""]))


def _cpu_name() -> str:
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory() -> str:
    if not MEMINFO.is_file():
        return "unknown"
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    kib = {name: int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    return f"{size(1024 * kib['MemTotal'])}, {size(1024 * kib['MemAvailable'])} available"


def _cache() -> str:
    from ..runtime.build_cache import cache_dir

    root = cache_dir()
    used = sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) if root.is_dir() else 0
    return f"cache {root} holds {size(used)}"


def _threads() -> int:
    from ..runtime.threads import default_threads

    return default_threads()


def _kernels() -> str:
    """Whether the compiled module loads, which instructions it chose, and why no better ones."""
    try:
        from ..kernels import best_tier, cpu_features, cpu_tier

        features = cpu_features()
        used, best = cpu_tier(), best_tier(f.name for f in features if f.present)
        return f"ok, {used}{_why_not_better(used, best, features)}"
    except Exception as error:  # whatever keeps a binary from loading is the finding
        return f"FAILED: {type(error).__name__}: {error}"


def _why_not_better(used: str, best: str, features: Iterable[CpuFeature]) -> str:
    """What keeps kernels from a better tier than the one used: SPIKE_CPU, or missing features."""
    if (used, best) == ("avx512", "avx512_bf16"):
        return f"; SPIKE_CPU={best} is faster for long prompts, and less exact"
    if used != best:
        return f": SPIKE_CPU lowers it, this CPU has {best}"
    lacking: dict[str, list[str]] = {}
    for feature in features:
        if not feature.present:
            lacking.setdefault(feature.tier, []).append(feature.name)
    return "".join(f"; {tier} needs {', '.join(names)}" for tier, names in lacking.items())


def _ops() -> str:
    """Whether ONNX Runtime takes our operator library."""
    try:
        import onnxruntime as ort

        from ..kernels import ops_library

        options = ort.SessionOptions()
        options.register_custom_ops_library(str(ops_library()))
        return f"ok, {ort.__version__}"
    except Exception as error:  # whatever keeps a binary from loading is the finding
        return f"FAILED: {type(error).__name__}: {error}"
