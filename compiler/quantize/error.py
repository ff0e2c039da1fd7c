"""How far stored weights are from their source: rms(W - Q) / rms(W), measured in passing.

Of a large matrix every n-th row is measured, so that the measurement costs a build little. Sums are
taken in float64 by numpy, in order of rows: the figure does not depend on threads.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from ...kernels import Format, dequantize

SAMPLED = 1 << 20
"""Elements measured of one chunk of rows."""


class ErrorMeter:
    """Adds up the squared error and the squares of one tensor."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0

    def add(
        self, values: npt.NDArray[np.float32], blocks: npt.NDArray[np.uint8], format: str
    ) -> None:
        """One chunk: rows f32 ``[n, K]`` and the same as stored, uint8 ``[n, row_bytes]``."""
        step = sampled_step(values.size)
        values = values[::step]
        stored = dequantize(blocks[::step], cast(Format, format), values.shape[1], threads=1)
        self._sum(values, stored)

    def compare(self, values: npt.NDArray[np.float32], stored: npt.NDArray[np.float32]) -> None:
        """The same of rows f32 ``[n, K]`` whose stored values are known."""
        step = sampled_step(values.size)
        self._sum(values[::step], stored[::step])

    def _sum(self, values: npt.NDArray[np.float32], stored: npt.NDArray[np.float32]) -> None:
        self._noise += float(np.square(values - stored, dtype=np.float64).sum())
        self._signal += float(np.square(values, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        """The error to four digits; 0 for a tensor of zeros."""
        if not self._signal:
            return 0.0
        return float(f"{(self._noise / self._signal) ** 0.5:.4g}")


def sampled_step(elements: int) -> int:
    """Distance of the measured rows in a chunk of so many elements."""
    return max(1, -(-elements // SAMPLED))
