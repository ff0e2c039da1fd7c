"""Norms of constants: all that interval analysis needs of a weight, read one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ir import Constant, Parameters, constant_tensor
from .bounds import EMPTY, Bound

CHUNK = 1 << 24
"""Elements converted to float64 at a time."""


@dataclass(frozen=True)
class Norms:
    """Of a matrix [n, k]; a vector counts as one row.

    Args:
        bound: elements, and the largest row norm.
        frobenius: root of the sum of all squares: at least the largest singular value.
        rows: norm of every row, float64 [n].
        rms: root mean square of the elements.
    """

    bound: Bound
    frobenius: float
    rows: torch.Tensor
    rms: float = 0.0


class Weights:
    """Norms of a graph's constants, each read once, when first asked for.

    Args:
        parameters: values of a traced parameter; None: only inline data is known.
    """

    def __init__(self, parameters: Parameters | None) -> None:
        self._parameters = parameters
        self._found: dict[str, Norms | None] = {}

    def of(self, const: Constant) -> Norms | None:
        """None if the values are not at hand."""
        if const.name not in self._found:
            known = const.data is not None or self._parameters is not None
            self._found[const.name] = norms(self._values(const)) if known else None
        return self._found[const.name]

    def _values(self, const: Constant) -> torch.Tensor:
        return constant_tensor(const, self._parameters or _none)


def _none(name: str) -> torch.Tensor:
    raise KeyError(name)


def norms(tensor: torch.Tensor) -> Norms:
    """Norms with sums in float64; every axis but the last one counts rows."""
    if not tensor.numel():
        return Norms(EMPTY, 0.0, torch.zeros(0, dtype=torch.float64))
    matrix = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    parts = [p.double() for p in matrix.split(max(1, CHUNK // matrix.shape[1]))]
    rows = torch.cat([torch.linalg.vector_norm(p, dim=1) for p in parts])
    low, high = min(float(p.amin()) for p in parts), max(float(p.amax()) for p in parts)
    total = float(rows.square().sum().sqrt())
    rms = total / tensor.numel() ** 0.5
    return Norms(Bound(low, high, float(rows.max())), total, rows, rms)
