"""Quantising with error feedback: what a matrix does to typical inputs changes least.

A matrix's error on calibration text is tr(E H E^T), with E the difference of the weights and H the
second moments of the inputs (X^T X / tokens). `kernels.quantize_with_feedback` minimises it column
after column (GPTQ, arXiv 2210.17323); here H becomes the triangular factor that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ...kernels import FeedbackErrors, Format, quantize_with_feedback
from .ready import Blocks
from .store import _as_f32, _raise_if_unrepresentable

if TYPE_CHECKING:
    import torch

DAMPING = 0.01
"""Of H's mean diagonal, added to its diagonal: what no calibration text showed still counts."""
MOST_DAMPING = 1.0


@dataclass(frozen=True)
class Feedback:
    """One matrix, or stack of matrices, quantised.

    Args:
        blocks: the rows, each by the method that leaves its error least.
        errors: of every method, summed over rows: squared change of the outputs, per token.
        rows: how many rows each method gave.
    """

    blocks: Blocks
    errors: FeedbackErrors
    rows: tuple[int, int, int]


def quantize_to_inputs(
    weight: torch.Tensor,
    moment: torch.Tensor,
    format: str,
    *,
    name: str,
    threads: int = 0,
    damping: float = DAMPING,
) -> Feedback | None:
    """Quantises a matrix for inputs of known second moments; None if they are all zero.

    Args:
        weight: ``[N, K]``, any float type.
        moment: ``[K, K]``, the sum over tokens of x x^T, in any unit.
        format: a block format.
        name: for the error message.
        threads: 0 for one per CPU; the bytes don't depend on it.

    Raises:
        SpikeError: SPK403 naming the first value that is NaN, infinite, or too large.
    """
    factor = triangular_factor(moment, damping)
    if factor is None:
        return None
    values = _as_f32(weight)
    try:
        rows, errors = quantize_with_feedback(values, factor, cast(Format, format), threads)
    except ValueError:
        _raise_if_unrepresentable(name, values, 0, format)
        raise
    return Feedback(Blocks(format, rows, values.shape[1]), errors.summed(), errors.wins())


def triangular_factor(
    moment: torch.Tensor, damping: float = DAMPING
) -> npt.NDArray[np.float32] | None:
    """Upper triangular R f32 [K, K] with R R^T = moment, scaled to a mean diagonal of 1, + damping.

    Damping grows until rounding lets the factor exist: second moments of fewer tokens than channels,
    and of channels that were always zero, are singular. None if everything is zero.
    """
    import torch

    mean = float(moment.diagonal().double().mean())
    if not mean > 0:
        return None
    with _one_thread():  # LAPACK's blocking, and with it the rounding, depends on their number
        reversed = moment.flip(0, 1).double().div_(mean)
        while True:
            damped = reversed.clone()
            damped.diagonal().add_(damping)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not int(failed):
                break
            if damping >= MOST_DAMPING:
                raise ValueError("the moment is not positive semidefinite")
            damping = min(10 * damping, MOST_DAMPING)
        del damped
        return lower.flip(0, 1).float().contiguous().numpy()


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
