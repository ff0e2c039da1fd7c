"""`spike inspect` and `spike verify`: what is in an engine directory, as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..compiler.engine import EngineDirectory, PassEntry, SpikeConfig, WeightSpec
from ..compiler.engine.manifest import MODEL, NETWORK
from ..compiler.engine.network_check import network_problems
from ..errors import ExitCode, SpikeError
from .build import config_rows, memory_line
from .inspect_quantization import quantization_data, quantization_text
from .precision import precision_text
from .tables import facts, section, sections, size, table
from .terminal import Terminal

MISSES_SHOWN = 12
EVIDENCE = "evidence.json"


def show(path: Path, what: str, terminal: Terminal) -> None:
    """Print one view of the engine at `path`. Raises SPK5xx if it is not a sound engine."""
    engine = EngineDirectory.open(path)
    text, data = VIEWS[what]
    terminal.answer(text(engine), data(engine))


def evidence_of(engine: EngineDirectory) -> dict[str, Any]:
    """evidence.json as plain data."""
    found: dict[str, Any] = json.loads((engine.path / EVIDENCE).read_text(encoding="utf-8"))
    return found


def report_text(engine: EngineDirectory) -> str:
    """Overview, sizes per role, golden figures, passes in short."""
    spike, made = engine.config.spike, engine.manifest.provenance
    stored = sum(w.bytes for w in spike.weights)
    count = sum(prod(w.shape) for w in spike.weights)
    bits = f", {8 * stored / count:.2f} bits each" if count else ""
    weights = f"{count / 1e6:,.1f} M in {size(stored)}{bits}"
    if spike.tensorrt is not None:
        weights = f"{size(spike.tensorrt.bytes.get('weights', 0))} in {MODEL}"
    algorithm = engine.config.pretrained_config.quantization.quant_algo
    rows: list[tuple[str, object]] = [
        *config_rows(engine.config),
        ("Weights", f"{weights} ({algorithm})"),
        ("Engine id", engine.manifest.engine_id[:16]),
        ("Source", made.source_hash[:16]),
        ("Made by", f"SpikeInfer {engine.manifest.spikeinfer_version}"),
    ]
    notes = spike.report.get("notes")
    lines = "\n".join(map(str, notes)) if isinstance(notes, list | tuple) else ""
    return sections(
        [
            facts(rows),
            section("Weights by role", _by_role(spike)),
            section("Golden check", _golden(evidence_of(engine))),
            section("Passes that fired", _fired(engine)),
            section("Memory of one step", memory_line(_memory(engine))),
            section("Notes", lines),
        ]
    )


def _by_role(spike: SpikeConfig) -> str:
    """From the table of rank0.weights; a TensorRT engine has the plan of its storage instead."""
    if spike.tensorrt is None:
        return _roles(spike.weights)
    storage = spike.report.get("storage")
    rows = [
        (row["role"], row["format"], row["tensors"], f"{row['megabytes']:.2f}", row["why"])
        for row in (storage if isinstance(storage, tuple | list) else ())
    ]
    return table(("Role", "Format", "#Tensors", "#MB", "Why"), rows)


def _memory(engine: EngineDirectory) -> Mapping[str, Any]:
    plan = engine.config.spike.report.get("memory plan")
    return plan if isinstance(plan, Mapping) else {}


def _roles(weights: tuple[WeightSpec, ...]) -> str:
    groups: dict[tuple[str, str], list[WeightSpec]] = defaultdict(list)
    for weight in weights:
        groups[weight.role, weight.format].append(weight)
    total = sum(w.bytes for w in weights) or 1
    sized = [(sum(w.bytes for w in group), key, group) for key, group in groups.items()]
    rows = [
        (role, form, len(group), f"{stored / 1e6:.2f}", f"{stored / total:.1%}",
         f"{8 * stored / max(1, sum(prod(w.shape) for w in group)):.2f}")
        for stored, (role, form), group in sorted(sized, key=lambda s: (-s[0], s[1]))
    ]  # fmt: skip
    rows.append(("all", "", len(weights), f"{sum(w.bytes for w in weights) / 1e6:.2f}", "", ""))
    return table(("Role", "Format", "#Tensors", "#MB", "#Share", "#Bits"), rows)


def _golden(evidence: Mapping[str, Any]) -> str:
    head = f"{evidence['status']} {evidence['golden_set']} {evidence['reason']}".strip()
    if evidence["validated_on_gpu"] is not None:
        ran = "yes" if evidence["validated_on_gpu"] else "no"
        head += f"\nexecuted: {evidence['executed'] or 'nothing'}\nvalidated on a GPU: {ran}"
    rows = [(m["name"], f"{m['value']:.4g}", _limit(m)) for m in evidence["measurements"]]
    return f"{head}\n{table(('Figure', '#Value', 'Limit'), rows)}" if rows else head


def _limit(measure: Mapping[str, Any]) -> str:
    if measure["limit"] is None:
        return ""
    return f"{'at most' if measure['better'] == 'lower' else 'at least'} {measure['limit']:.4g}"


def _fired(engine: EngineDirectory) -> str:
    counts: Counter[str] = Counter()
    for entry in engine.config.spike.passes:
        counts[entry.name] += entry.fired
    return table(("Pass", "#Fired"), [(name, n) for name, n in counts.items() if n])


def weights_text(engine: EngineDirectory) -> str:
    """Every tensor of rank0.weights, or every constant of a TensorRT network."""
    if engine.config.spike.tensorrt is not None:
        held = [
            (c["source"], c["part"], c["dtype"], "x".join(map(str, c["shape"])), c["sha256"][:16])
            for c in network_constants(engine)
        ]
        return table(("Name", "Part", "Type", "Shape", "sha256"), held)
    rows = [
        (w.name, w.role, w.format, "x".join(map(str, w.shape)), f"{w.bytes:,}", w.offset)
        for w in engine.config.spike.weights
    ]
    return table(("Name", "Role", "Format", "Shape", "#Bytes", "#Offset"), rows)


def network_constants(engine: EngineDirectory) -> list[dict[str, Any]]:
    """What a TensorRT network holds of the model, as network.json lists it."""
    network = json.loads((engine.path / NETWORK).read_text(encoding="utf-8"))
    return [constant for constant in network["constants"] if "source" in constant]


def weights_data(engine: EngineDirectory) -> object:
    """The same as data."""
    if engine.config.spike.tensorrt is not None:
        return network_constants(engine)
    return _part("weights")(engine)


def passes_text(engine: EngineDirectory) -> str:
    """Each run of a pass: where it fired, and why it did not elsewhere."""
    runs = engine.config.spike.passes
    summary = [(e.name, e.fired, *_saved(e), len(e.near_misses)) for e in runs]
    misses: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for entry in runs:
        for miss in entry.near_misses:
            misses[entry.name, miss.reason] += 1
            first.setdefault((entry.name, miss.reason), miss.where)
    rows = [
        (name, count, first[name, reason], reason)
        for (name, reason), count in misses.most_common(MISSES_SHOWN)
    ]
    more = len(misses) - len(rows)
    return sections(
        [
            table(("Pass", "#Fired", "#Bytes saved", "#Launches", "#Near misses"), summary),
            "Bytes of activations and kernel launches saved for one token (estimated; see docs).",
            section(
                "Near misses",
                table(("Pass", "#Times", "First at", "Why not"), rows) if rows else "none",
            ),
            f"and {more} more reasons (--json lists all)" if more > 0 else "",
        ]
    )


def _saved(entry: PassEntry) -> tuple[object, object]:
    """Bytes per token and launches that a pass saved, by the cost model of passes/cost.py."""
    saved = entry.facts.get("saved")
    if not isinstance(saved, Mapping):
        return "", ""
    return f"{saved['bytes per token']:,}", saved["launches"]


def report_data(engine: EngineDirectory) -> dict[str, Any]:
    """Everything: config, manifest, evidence."""
    return {
        "path": str(engine.path),
        "config": dataclasses.asdict(engine.config),
        "manifest": dataclasses.asdict(engine.manifest),
        "evidence": evidence_of(engine),
    }


def _part(name: str) -> Callable[[EngineDirectory], object]:
    return lambda engine: [dataclasses.asdict(e) for e in getattr(engine.config.spike, name)]


View = tuple[Callable[[EngineDirectory], str], Callable[[EngineDirectory], object]]
VIEWS: dict[str, View] = {
    "report": (report_text, report_data),
    "weights": (weights_text, weights_data),
    "precision": (precision_text, _part("precision")),
    "passes": (passes_text, _part("passes")),
    "quantization": (quantization_text, quantization_data),
}


def verify(path: Path, terminal: Terminal) -> int:
    """Hash every file of an engine against its manifest; exit code 3 if one differs.

    A TensorRT engine's network is held against its config besides, and its file is shown to
    TensorRT, where that is installed; neither needs a GPU. Raises SPK562 if either is not in order.
    """
    engine = EngineDirectory.open(path)
    checks = engine.verify()
    rows = [
        (c.name, f"{c.size:,}", (c.found or "unreadable")[:16], "ok" if c.ok else "DIFFERS")
        for c in checks
    ]
    bad = [c.name for c in checks if not c.ok]
    verdict = (
        f"{len(bad)} of {len(checks)} files differ: {', '.join(bad)}"
        if bad
        else f"{path} is whole: {len(checks)} files, engine {engine.manifest.engine_id[:16]}"
    )
    structure = _structure(engine) if not bad else ""
    verdict += f"\n{structure}" if structure else ""
    data = {
        "path": str(path),
        "engine_id": engine.manifest.engine_id,
        "structure": structure,
        "ok": not bad,
        "files": [{**dataclasses.asdict(c), "ok": c.ok} for c in checks],
    }
    terminal.answer(f"{table(('File', '#Bytes', 'sha256', ''), rows)}\n{verdict}", data)
    if bad:
        # The same words as on loading, with the damaged tensors by name.
        EngineDirectory.open(path, verify=True)
    return int(ExitCode.BAD_INPUT if bad else ExitCode.OK)


def _structure(engine: EngineDirectory) -> str:
    """What was checked of a TensorRT engine besides its bytes; empty for others. Raises SPK562."""
    if engine.config.spike.tensorrt is None:
        return ""
    from ..runtime.tensorrt_session import malformed

    problems = network_problems(engine)
    found = malformed(engine.model_path)
    if found:
        problems.append(f"TensorRT finds {MODEL} malformed")
    if problems:
        raise SpikeError(
            "SPK562",
            "engine",
            f"{engine.path}: the network is not what config.json says: {'; '.join(problems[:5])}.",
            "The directory mixes two engines, or a bug wrote it: build it again.",
        )
    header = "tensorrt-rtx is not installed, so that its file was not shown to TensorRT"
    if found is not None:
        header = "TensorRT finds its file well-formed"
    ran = "have run" if evidence_of(engine)["validated_on_gpu"] else "have not run"
    return f"the network agrees with config.json; {header}; its kernels {ran} on a GPU"
