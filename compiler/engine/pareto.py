"""pareto.json: sizes that the quality solver saw, and which of them were built and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParetoPoint:
    """One way to store the model.

    Args:
        bytes: of rank0.weights.
        bits_per_weight: of its matrices.
        predicted_kl: mean KL in nats by the sensitivities; the kernels' own rounding and the cache
            come on top.
        formats: how many matrices have each format.
        measured_kl: mean KL of the built engine on held-out text; None if it wasn't built.
        chosen: this engine.
    """

    bytes: int
    bits_per_weight: float
    predicted_kl: float
    formats: Mapping[str, int]
    measured_kl: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Pareto:
    """The whole of pareto.json, smallest point first.

    Args:
        max_kl: limit of the mean KL, None if there was none.
        max_bytes: limit of rank0.weights, None if there was none.
        calibration: the text that sensitivities were measured on, and how much of it.
        points: the predicted frontier, and every engine that was built.
    """

    max_kl: float | None
    max_bytes: int | None
    calibration: Mapping[str, object] = field(default_factory=dict)
    points: tuple[ParetoPoint, ...] = ()
