"""Checks of single values that callers give: SPK608 says which one, and what it may be."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import SupportsFloat

from ..errors import SpikeError


def out_of_range(name: str, value: object, wanted: str) -> SpikeError:
    """The error of a value outside its range: SPK608."""
    return SpikeError("SPK608", name, f"{name}={value!r} is out of range.", f"Give {wanted}.")


def require_count(name: str, value: object, optional: bool = True) -> None:
    """A whole number of at least 1, or None where that is one's choice; SPK608 otherwise."""
    if value is None and optional:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise out_of_range(name, value, "a whole number above 0")


def require_real(
    name: str,
    value: object,
    least: float = 0.0,
    most: float = math.inf,
    finite: bool = True,
    optional: bool = False,
) -> None:
    """A number of least <= number <= most (NaN is none), or None where that is one's choice;
    SpikeError SPK608 otherwise.
    """
    if value is None and optional:
        return
    if isinstance(value, Real) and not isinstance(value, bool):
        number = as_float(value)
        if least <= number <= most and (math.isfinite(number) or not finite):
            return
    upper = f"at most {most:g}" if most < math.inf else "finite" if finite else "or inf"
    raise out_of_range(name, value, f"a number, {least:g} or more, {upper}")


def require_instance(name: str, value: object, kind: type, optional: bool = False) -> None:
    """An object of a class, or None where that is one's choice; SpikeError SPK608 otherwise."""
    if not isinstance(value, kind) and not (optional and value is None):
        raise out_of_range(name, value, f"a {kind.__name__}")


def as_float(value: SupportsFloat) -> float:
    """The number; infinity for a whole one beyond any float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
