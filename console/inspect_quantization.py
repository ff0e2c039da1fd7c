"""`spike inspect quantization`: the rules that chose the formats, and what each matrix costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

from ..compiler.engine import EngineDirectory, WeightSpec
from ..compiler.engine.config import KL_SHARE, RELATIVE_ERROR
from .tables import facts, section, sections, table

NO_SHARE = (
    "Share of KL: not measured in this build; one with --max-kl, --max-bpw or --max-size "
    "measures it on calibration text."
)
SHARE = (
    "Share of KL: of the divergence that the solver predicted from sensitivities measured on "
    "calibration text."
)


def quantization_text(engine: EngineDirectory) -> str:
    """Which rule gave which tensors their format; then every matrix."""
    storage = engine.config.spike.report.get("storage")
    plan = storage if isinstance(storage, list | tuple) else []
    columns = ("role", "format", "tensors", "megabytes", "why", "instead of")
    rows = [tuple(row.get(column, "") for column in columns) for row in plan]
    header = ("Role", "Format", "#Tensors", "#MB", "Rule", "Fallback because")
    model = engine.config.pretrained_config.quantization
    bits = engine.config.spike.report.get("bits per weight")
    head = facts(
        [
            ("Weights", model.quant_algo),
            ("KV cache", model.kv_cache_quant_algo),
            ("Bits per weight", bits),
        ]
    )
    return sections(
        [
            head,
            section("Rules", table(header, rows)),
            section("Matrices", _matrices(engine)),
            SHARE if _figures(engine, KL_SHARE) else NO_SHARE,
        ]
    )


def quantization_data(engine: EngineDirectory) -> dict[str, Any]:
    """Formats, the rules behind them, and every matrix."""
    report = engine.config.spike.report
    return {
        **dataclasses.asdict(engine.config.pretrained_config.quantization),
        "bits_per_weight": report.get("bits per weight"),
        "storage": report.get("storage"),
        "matrices": [_matrix(engine, weight) for weight in _stored(engine)],
    }


def _matrices(engine: EngineDirectory) -> str:
    rows = []
    for weight in _stored(engine):
        found = _matrix(engine, weight)
        error, share = found["relative_error"], found["share_of_kl"]
        rows.append(
            (found["name"], found["role"], found["format"], f"{found['bits_per_weight']:.2f}",
             "-" if error is None else f"{error:.2e}", "-" if share is None else f"{share:.2%}")
        )  # fmt: skip
    return table(("Name", "Role", "Format", "#Bits", "#Rel. error", "#Share of KL"), rows)


def _matrix(engine: EngineDirectory, weight: WeightSpec) -> dict[str, Any]:
    """Bits of the stored size: rows are filled up to a multiple of 16."""
    return {
        "name": weight.name,
        "role": weight.role,
        "format": weight.format,
        "bits_per_weight": round(8 * weight.bytes / prod(weight.shape), 4),
        "relative_error": _figures(engine, RELATIVE_ERROR).get(weight.name),
        "share_of_kl": _figures(engine, KL_SHARE).get(weight.name),
    }


def _stored(engine: EngineDirectory) -> list[WeightSpec]:
    return [w for w in engine.config.spike.weights if len(w.shape) > 1]


def _figures(engine: EngineDirectory, key: str) -> Mapping[str, float]:
    """Of each tensor by name; none in an engine from before they were measured."""
    found = engine.config.spike.report.get(key)
    return found if isinstance(found, Mapping) else {}
