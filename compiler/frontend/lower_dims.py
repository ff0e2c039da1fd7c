"""Sizes of the traced graph (sympy expressions over torch's symbols) -> IR dims (polynomials)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ir import Dim, SymDim, choices, extreme, symbol
from ..ir.types import Monomial, simplify

LEAST = {"B": 1, "S": 1, "P": 0}  # what B, S and P are at least


class NotPolynomial(ValueError):
    """A size that is no polynomial in B, S, P and their extremes; the message says which part."""


class DimTable:
    """Translates sizes.

    Args:
        names: torch's symbols -> ours.
        longest: P + S is never more; None if that is open.
    """

    def __init__(self, names: Mapping[str, str], longest: int | None = None) -> None:
        self.names = names
        self.longest = longest

    def at_least(self, dim: Dim, bound: int) -> bool:
        """As the function of that name, or sure because a sequence has its longest length."""
        if at_least(dim, bound) or self.longest is None:
            return at_least(dim, bound)
        return at_least(dim + symbol("P") + symbol("S") - self.longest, bound)

    def dim(self, size: Any) -> Dim:
        """The dim of an int, SymInt or sympy expression. Raises NotPolynomial."""
        if isinstance(size, int):
            return int(size)
        return self._expr(size.node.expr if hasattr(size, "node") else size)

    def _expr(self, expr: Any) -> Dim:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            if str(expr) not in self.names:
                raise NotPolynomial(f"{expr} is a size that depends on data")
            return symbol(self.names[str(expr)])
        kind = type(expr).__name__
        args = [self._expr(a) for a in expr.args]
        if kind == "Add":
            return _fold(args, lambda a, b: a + b)
        if kind == "Mul":
            return _fold(args, lambda a, b: a * b)
        if kind == "Pow" and isinstance(args[1], int) and args[1] > 0:
            return _fold([args[0]] * args[1], lambda a, b: a * b)
        if kind in ("FloorDiv", "CleanDiv", "IntTrueDiv") and (exact := divide(*args)) is not None:
            return exact
        if kind in ("PythonMod", "Mod") and divide(*args) is not None:
            return 0
        if kind in ("Max", "Min"):
            chosen = self._extreme(args, kind == "Max")
            return self._open_extreme(kind.lower(), args) if chosen is None else chosen
        raise NotPolynomial(f"{self._named(expr)} is not a polynomial in B, S and P")

    def _open_extreme(self, kind: str, dims: list[Dim]) -> Dim:
        try:
            return extreme(kind, dims)
        except ValueError as error:
            raise NotPolynomial(str(error)) from error

    def _extreme(self, dims: list[Dim], largest: bool) -> Dim | None:
        """The dim that is surely the largest (or smallest), if one is."""
        for dim in dims:
            distances = (dim - d if largest else d - dim for d in dims)
            if all(self.at_least(d, 0) for d in distances):
                return dim
        return None

    def _named(self, expr: Any) -> str:
        text = str(expr)
        for theirs, ours in self.names.items():
            text = text.replace(theirs, ours)
        return text


def _fold(dims: list[Dim], function: Any) -> Dim:
    total = dims[0]
    for dim in dims[1:]:
        total = function(total, dim)
    return total


def divide(dim: Dim, divisor: Dim) -> Dim | None:
    """The exact quotient by one term, or None if a remainder may be left."""
    if isinstance(dim, int) and isinstance(divisor, int):
        return dim // divisor if divisor and dim % divisor == 0 else None
    if dim == divisor:
        return 1
    if len(_terms(divisor)) != 1:
        return None
    ((by, factor),) = _terms(divisor).items()
    quotient: dict[Monomial, int] = {}
    for monomial, coefficient in _terms(dim).items():
        rest = list(monomial)
        for name in by:
            if name not in rest:
                return None
            rest.remove(name)
        if coefficient % factor:
            return None
        quotient[tuple(rest)] = coefficient // factor
    return simplify(quotient)


def _terms(dim: Dim) -> dict[Monomial, int]:
    return dict(dim.terms) if isinstance(dim, SymDim) else {(): dim}


def at_least(dim: Dim, bound: int) -> bool:
    """Whether dim >= bound is sure for all B >= 1, S >= 1 and P >= 0.

    Rewritten in the distances from the least values, all coefficients must be non-negative.
    """
    shifted: Dim = dim - bound
    if isinstance(shifted, SymDim):
        if not all(_non_negative(f) for m, _ in shifted.terms for f in m):
            return False
        shifted = shifted.substitute({n: symbol(n) + least for n, least in LEAST.items()})
    return all(c >= 0 for c in _terms(shifted).values())


def _non_negative(factor: str) -> bool:
    found = choices(factor)
    if found is None:
        return True
    sure = [at_least(d, 0) for d in found[1]]
    return all(sure) if found[0] == "min" else any(sure)
