"""Quantising with error feedback: what a matrix does to typical inputs changes least.

The error of a matrix on calibration text is tr(E H E^T): E the change of the weights, H the second
moment of the inputs. `kernels.quantize_with_feedback` makes it small column after column (GPTQ,
arXiv 2210.17323) and keeps, of every row, the best of three ways to quantise it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ...kernels import Format, quantize_with_feedback
from .store import as_f32, raise_if_unrepresentable

if TYPE_CHECKING:
    import torch

    Doubles = npt.NDArray[np.float64]

METHODS = ("plain", "weighted", "feedback")
DAMPING = 0.01
"""Of H's mean diagonal, added to its diagonal: what no calibration text showed still counts."""
MOST_DAMPING = 1.0
CHUNK_ELEMENTS = 1 << 24
"""Elements quantised at a time."""


@dataclass
class Outcome:
    """What error feedback achieved, over any number of rows.

    Args:
        errors: squared change of the outputs per token by each of METHODS, f64 [3], in units of the
            mean square of the inputs.
        kept: the same of what was stored: of each row the least.
        rows: rows stored by each method.
    """

    errors: Doubles = field(default_factory=lambda: np.zeros(3))
    kept: float = 0.0
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))

    def add(self, errors: npt.NDArray[np.float32]) -> None:
        """Errors f32 [N, 3] of more rows."""
        self.errors += errors.sum(0, dtype=np.float64)
        self.kept += float(errors.min(1).sum(dtype=np.float64))
        self.rows += np.bincount(errors.argmin(1), minlength=3)

    @property
    def relative(self) -> float:
        """Error of what was stored over that of the plain quantiser; 1 if that one is exact."""
        return self.kept / self.errors[0] if self.errors[0] > 0 else 1.0


def quantize_to_inputs(
    weight: torch.Tensor,
    factor: npt.NDArray[np.float32],
    format: str,
    outcome: Outcome,
    *,
    name: str,
    threads: int = 0,
) -> Iterator[npt.NDArray[np.uint8]]:
    """Logical rows of a matrix, some rows at a time; `outcome` learns their errors.

    Args:
        weight: ``[N, K]``, any float type.
        factor: of the inputs' second moment, f32 ``[K, K]``, from `triangular_factor`.
        format: a block format.
        outcome: is added to.
        name: for the error message.
        threads: 0 for one per CPU; the bytes don't depend on it.

    Raises:
        SpikeError: SPK403 naming the first value that is NaN, infinite, or too large.
    """
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for first in range(0, len(weight), step):
        chunk = as_f32(weight[first : first + step])
        try:
            rows, errors = quantize_with_feedback(chunk, factor, cast(Format, format), threads)
        except ValueError:
            raise_if_unrepresentable(name, chunk, first, format)
            raise
        outcome.add(errors)
        yield rows


def triangular_factor(
    moment: torch.Tensor, damping: float = DAMPING
) -> npt.NDArray[np.float32] | None:
    """R f32 [K, K], upper triangular: R R^T = the moment, its mean diagonal scaled to 1, damped.

    `moment` [K, K] is the sum over tokens of x x^T, in any unit. Damping grows until the factor
    exists in spite of rounding: moments of fewer tokens than channels, and of channels that were
    always zero, are singular. None if all inputs were zero. The same for any number of threads.
    """
    import torch

    mean = float(moment.diagonal().double().mean())
    if not mean > 0:
        return None
    with _one_thread():  # the blocking inside LAPACK, and so the rounding, depends on their number
        turned = moment.flip(0, 1).double().div_(mean)
        added = 0.0
        while True:
            turned.diagonal().add_(damping - added)
            added = damping
            lower, failed = torch.linalg.cholesky_ex(turned)
            if not int(failed):
                return cast("npt.NDArray[np.float32]", lower.flip(0, 1).float().numpy())
            if damping >= MOST_DAMPING:
                raise ValueError("the moment is not positive semidefinite")
            damping = min(10 * damping, MOST_DAMPING)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
