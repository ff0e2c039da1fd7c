"""What a floating-point format can hold."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import DType


@dataclass(frozen=True)
class Format:
    """A half-precision format.

    Args:
        largest: largest finite value.
        least: smallest value with a full significand (min normal).
        unit: largest relative error of rounding to nearest; errors are counted in it.
    """

    largest: float
    least: float
    unit: float


FORMATS = {
    DType.F16: Format(65504.0, 2.0**-14, 2.0**-11),
    DType.BF16: Format((2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-8),
}
