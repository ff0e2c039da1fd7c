"""What each matrix may become: formats with their bytes and the divergence that each predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ...kernels import FORMATS, Format, dequantize, quantize, row_bytes
from ..quantize import stored_bytes
from .sensitivity import Curvature, Float64

if TYPE_CHECKING:
    from torch import Tensor

SAMPLED = 1 << 21
"""Weights of one matrix whose error is measured; of a larger one every n-th row."""
CHUNK = 1 << 20
LEAST = 1e-3
"""Of the mean column's importance."""

Float32 = npt.NDArray[np.float32]
Quantizer = Callable[[Float32, str, Float32], npt.NDArray[np.uint8]]
"""Rows f32 ``[n, K]``, a format, and f32 ``[K]``, how much each column's squared error counts ->
logical rows; ValueError for values that the format does not hold."""


def weighted(rows: Float32, format: str, importance: Float32) -> npt.NDArray[np.uint8]:
    """The scale searches with importance."""
    return quantize(rows, cast(Format, format), importance=importance)


def importance(columns: Float64) -> Float32:
    """How much each column's error counts, f32 ``[..., K]``, by a matrix's curvature.

    Relative to the mean; columns that no text moved keep a thousandth of it.
    """
    mean = columns.mean(-1, keepdims=True)
    scaled = np.where(mean > 0, columns / np.where(mean > 0, mean, 1.0), 1.0)
    return np.asarray(np.maximum(scaled, LEAST), dtype=np.float32)


@dataclass(frozen=True)
class Option:
    """One format of one matrix: its bytes in rank0.weights, and the KL it adds, in nats."""

    format: str
    bytes: int
    kl: float


@dataclass(frozen=True)
class Curve:
    """A matrix's options in order of bytes, each with less KL than the one before."""

    name: str
    options: tuple[Option, ...]

    @classmethod
    def of(cls, name: str, options: Sequence[Option]) -> Curve:
        """Options in any order; those that another one beats in both respects are left out."""
        kept: list[Option] = []
        for option in sorted(options, key=lambda o: (o.bytes, o.kl, o.format)):
            if not kept or option.kl < kept[-1].kl:
                kept.append(option)
        return cls(name, tuple(kept))


def curve(
    name: str,
    values: Tensor,
    curvature: Curvature,
    formats: Sequence[str] = FORMATS,
    page: int = 1,
    quantizer: Quantizer = weighted,
) -> Curve:
    """The options of one matrix.

    Args:
        name: of the constant.
        values: ``[N, K]`` or ``[E, N, K]``, any float type.
        curvature: of the same shape.
        formats: candidates; those whose blocks don't fit K, or that don't hold a value, are left
            out.
        page: bytes are rounded up to a multiple of this.
        quantizer: what will make the stored blocks.
    """
    shape = tuple(values.shape)
    fitting = [f for f in formats if _fits(f, shape[-1])]
    predicted = divergences(values, curvature, fitting, quantizer)
    options = [
        Option(f, -(-stored_bytes(f, shape) // page) * page, kl) for f, kl in predicted.items()
    ]
    return Curve.of(name, options)


def divergences(
    values: Tensor, curvature: Curvature, formats: Sequence[str], quantizer: Quantizer = weighted
) -> dict[str, float]:
    """KL in nats of storing a matrix in each of the formats that hold it, and nothing else."""
    found = dict.fromkeys(formats, 0.0)
    for matrix, rows, columns in _matrices(values, curvature):
        if not rows.any():
            continue
        step = max(1, -(-matrix.numel() // SAMPLED))
        sampled, counts = rows[::step], importance(columns)
        # F_ij is rows_i columns_j over the sum of all rows; those sampled stand for the others.
        scale = 0.5 / max(sampled.sum(), np.finfo(np.float64).tiny)
        for weights, sensitivity in _chunks(matrix[::step], sampled):
            for format in tuple(found):
                try:
                    stored = quantizer(weights, format, counts)
                except ValueError:
                    del found[format]
                    continue
                error = weights - dequantize(stored, cast(Format, format), weights.shape[1])
                per_row = np.einsum("ij,ij,j->i", error, error, columns)
                found[format] += float(scale * (per_row * sensitivity).sum())
    return {format: float(f"{kl:.6g}") for format, kl in found.items()}


def _matrices(values: Tensor, curvature: Curvature) -> Iterator[tuple[Tensor, Float64, Float64]]:
    """Each matrix of a stack, or the one, with its margins."""
    if values.ndim == 2:
        yield values, curvature.rows, curvature.columns
        return
    chosen = curvature.total > 0
    for expert in range(values.shape[0]):
        # An expert that no token of the calibration text chose is taken for an average one.
        which = expert if chosen[expert] or not chosen.any() else chosen
        rows, columns = curvature.rows[which], curvature.columns[which]
        if rows.ndim > 1:
            rows, columns = rows.mean(0), columns.mean(0)
        yield values[expert], rows, columns


def _chunks(matrix: Tensor, rows: Float64) -> Iterator[tuple[Float32, Float64]]:
    """Some rows at a time, as f32, with their margins."""
    size = max(1, CHUNK // matrix.shape[1])
    for first in range(0, matrix.shape[0], size):
        part = matrix[first : first + size].float().numpy()
        yield np.ascontiguousarray(part), rows[first : first + size]


def _fits(format: str, k: int) -> bool:
    try:
        return row_bytes(cast(Format, format), k) > 0
    except ValueError:
        return False
