"""Which float holds the product of scales and codes without rounding.

Every finite product is m * 2**e with m odd. Its bits are at most those of the scale's m plus those
of the code's, so the scales alone give a bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

F32_BITS = 24


@dataclass(frozen=True)
class Precision:
    """Bounds over all values of a weight.

    Args:
        bits: of the significand.
        unit: exponent of the smallest step: each value is a multiple of 2**unit.
        largest: magnitude.
    """

    bits: int
    unit: int
    largest: float

    @classmethod
    def of(cls, scales: torch.Tensor, bits: int, unit: int, largest: float) -> Self:
        """Of scales times codes that are multiples of 2**unit, of `bits` and up to `largest`."""
        values = scales.double().abs().flatten()
        values = values[values.isfinite() & (values > 0)]
        if not len(values):
            return cls(bits, 0, 0.0)
        mantissa, exponent = torch.frexp(values)
        whole = torch.ldexp(mantissa, torch.tensor(F32_BITS)).long()  # scales are float32 at most
        low = whole & -whole
        zeros = torch.log2(low.double()).long()
        width = F32_BITS - zeros
        step = exponent.long() - width
        return cls(int(width.max()) + bits, int(step.min()) + unit, float(values.max()) * largest)

    @classmethod
    def worst(cls, several: Iterable[Self]) -> Self:
        """Of a weight that is made of several."""
        them = list(several)
        return cls(
            max(p.bits for p in them), min(p.unit for p in them), max(p.largest for p in them)
        )

    def smallest_float(self) -> str:
        """``bf16``, ``f16`` or ``f32``: the narrowest that is exact; ``f32`` as the values are."""
        if self.bits <= 8 and self.unit >= -133:
            return "bf16"
        return "f16" if self.bits <= 11 and self.unit >= -24 and self.largest <= 65504 else "f32"
