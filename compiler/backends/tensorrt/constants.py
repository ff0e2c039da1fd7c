"""What a network holds of a constant: values rounded to its element type, or int4 blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

INT4_BLOCK = 32


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [N, K] in storage format ``int4_sym``: value = nibble * scale of its block.

    Args:
        packed: uint8 [N, K / 2]; two signed nibbles (-8..7) a byte, the lower k in the low one.
        scales: f16 [N, K / 32], none of them zero.
    """

    packed: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.packed.shape[0], 2 * self.packed.shape[1]


Constants = Callable[[str], npt.NDArray[np.generic] | Int4Matrix]
"""The values of a graph's constant by its name: float32 or float16 in the constant's own shape, or
int4 blocks where its format says so."""
