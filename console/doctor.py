"""`spike doctor`: what this machine has, what is installed, and whether engines can run here."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from ..compiler.engine.cpu_features import missing_cpu_features
from ..errors import ExitCode
from .options import installed
from .tables import facts, section, sections, size
from .terminal import Terminal

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8")
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
        ("Features", ", ".join(_features()) or "none of " + ", ".join(FEATURES)),
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


def _features() -> list[str]:
    missing = missing_cpu_features(FEATURES)
    return [name for name in FEATURES if name not in missing]


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
    """Whether the compiled module loads, and which instructions it chose."""
    try:
        from ..kernels import cpu_tier

        return f"ok, {cpu_tier()}"
    except Exception as error:  # whatever keeps a binary from loading is the finding
        return f"FAILED: {type(error).__name__}: {error}"


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
