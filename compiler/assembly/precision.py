"""The engine's precision table: caches, what kernels do inside, and every value's certificate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...passes.base import PassReport
from ..analysis import Certificate
from ..engine import PrecisionEntry
from ..ir import Graph

INSIDE = {
    "spike.rms_norm": "mean of squares and root inside are f32",
    "onnx.layer_norm": "mean and variance inside are f32",
    "spike.rope": "products and sums inside are f32",
    "spike.paged_attention": "scores, their maximum, exponentials and sums inside are f32",
    "onnx.attention": "scores, their maximum, exponentials and sums inside are f32",
    "spike.gated_mlp": "gate, activation and product inside are f32; block formats read their "
    "input as int8 per 32",
    "spike.linear": "sums are f32; block formats read their input as int8 per 32",
    "spike.linear_residual": "sums are f32; block formats read their input as int8 per 32",
}


def precision_table(graph: Graph, reports: Sequence[PassReport]) -> tuple[PrecisionEntry, ...]:
    """One row per state, per kind of kernel, and (half precision only) per value."""
    widened = all(not n.kernel.startswith("tensorrt.") for n in graph.nodes)
    how = "storage of the cache; read as f32" if widened else "storage of the cache"
    caches = [PrecisionEntry(s.name, "cached rows", s.format, how) for s in graph.states.values()]
    kernels = [_inside(kernel) for kernel in sorted({n.kernel for n in graph.nodes})]
    values = [_entry(c) for report in reports for c in report.certificates]
    return (*caches, *kernels, *values)


def _inside(kernel: str) -> PrecisionEntry:
    if kernel.startswith("tensorrt."):
        why = "in half precision where all floats around it are, else in f32"
        return PrecisionEntry("*", kernel, "mixed", why)
    return PrecisionEntry("*", kernel, "f32", INSIDE.get(kernel, "computes in f32"))


def _entry(certificate: Certificate) -> PrecisionEntry:
    seen = certificate.observed
    return PrecisionEntry(
        certificate.scope,
        certificate.value,
        certificate.decision.value,
        certificate.reason,
        op=certificate.op,
        observed=(seen.low, seen.high) if seen else (),
        bound=_finite(certificate.proven.magnitude),
        units=_finite(certificate.units),
    )


def _finite(figure: float) -> float | None:
    """JSON has no infinity: no bound."""
    return figure if math.isfinite(figure) else None
