"""Types of IR values: element type and a shape of ints and symbolic dimensions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Element types; the value is the spelling in IR text."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F64 = "f64"
    I64 = "i64"
    I32 = "i32"
    U8 = "u8"
    BOOL = "bool"

    @property
    def is_float(self) -> bool:
        """Whether values are rounded real numbers."""
        return self in (DType.F32, DType.F16, DType.BF16, DType.F64)

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2}.get(self.value, 1)


HALVES = (DType.F16, DType.BF16)
"""What an f32 value may be rounded to."""

Monomial = tuple[str, ...]
_FACTOR = r"(?:(?:min|max)\([^()]*\)|\w+)"


@dataclass(frozen=True)
class SymDim:
    """A polynomial over named symbols with integer coefficients, such as ``P+S`` or ``B*S``.

    ``terms`` is sorted by monomial; a constant has the empty monomial. Build with `symbol` and
    arithmetic; `simplify` turns a constant polynomial into an int. The smallest or largest of
    polynomials (`extreme`) is a factor of its own, such as ``min(8;P+S)``.
    """

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Dim) -> Dim:
        return simplify(_merge(_terms(self), _terms(other)))

    def __radd__(self, other: int) -> Dim:
        return self + other

    def __neg__(self) -> SymDim:
        return SymDim(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: Dim) -> Dim:
        return self + (-other)

    def __rsub__(self, other: int) -> Dim:
        return (-self) + other

    def __mul__(self, other: Dim) -> Dim:
        product: dict[Monomial, int] = {}
        for m1, c1 in _terms(self).items():
            for m2, c2 in _terms(other).items():
                key = tuple(sorted(m1 + m2))
                product[key] = product.get(key, 0) + c1 * c2
        return simplify(product)

    def __rmul__(self, other: int) -> Dim:
        return self * other

    def __str__(self) -> str:
        text = "+".join(_term_text(m, c) for m, c in sorted(self.terms, key=_term_order))
        return text.replace("+-", "-")

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols in it."""
        return frozenset().union(*(_symbols_in(f) for m, _ in self.terms for f in m))

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """Its value when every symbol has a size; KeyError names a missing symbol."""
        total = 0
        for monomial, coefficient in self.terms:
            for factor in monomial:
                coefficient *= _evaluated(factor, sizes)
            total += coefficient
        return total

    def substitute(self, dims: Mapping[str, Dim]) -> Dim:
        """The polynomial with some symbols replaced by other dims."""
        total: Dim = 0
        for monomial, coefficient in self.terms:
            product: Dim = coefficient
            for factor in monomial:
                product = product * _substituted(factor, dims)
            total = total + product
        return total


Dim = int | SymDim
Shape = tuple[Dim, ...]


def symbol(name: str) -> SymDim:
    """The dimension that consists of one symbol."""
    return SymDim((((name,), 1),))


def extreme(kind: str, dims: Collection[Dim]) -> Dim:
    """The ``min`` or ``max`` of dims; ValueError if one of them has such a factor itself."""
    numbers = [d for d in dims if isinstance(d, int)]
    others = sorted({str(d) for d in dims if isinstance(d, SymDim)})
    if any("(" in text for text in others):
        raise ValueError(f"{kind} of {', '.join(others)} is nested")
    folded = [min(numbers) if kind == "min" else max(numbers)] if numbers else []
    texts = [*map(str, folded), *others]
    return symbol(f"{kind}({';'.join(texts)})") if len(texts) > 1 else parse_dim(texts[0])


def choices(factor: str) -> tuple[str, tuple[Dim, ...]] | None:
    """Kind and dims of a factor that `extreme` made; None for a symbol."""
    match = re.fullmatch(r"(min|max)\((.*)\)", factor)
    return (match[1], tuple(map(parse_dim, match[2].split(";")))) if match else None


def _symbols_in(factor: str) -> frozenset[str]:
    found = choices(factor)
    if found is None:
        return frozenset((factor,))
    return frozenset().union(*(d.symbols for d in found[1] if isinstance(d, SymDim)))


def _evaluated(factor: str, sizes: Mapping[str, int]) -> int:
    found = choices(factor)
    if found is None:
        return sizes[factor]
    values = [evaluate_dim(d, sizes) for d in found[1]]
    return min(values) if found[0] == "min" else max(values)


def _substituted(factor: str, dims: Mapping[str, Dim]) -> Dim:
    found = choices(factor)
    if found is None:
        return dims.get(factor, symbol(factor))
    return extreme(found[0], [d.substitute(dims) if isinstance(d, SymDim) else d for d in found[1]])


def _terms(dim: Dim) -> dict[Monomial, int]:
    return dict(dim.terms) if isinstance(dim, SymDim) else {(): dim}


def _merge(left: dict[Monomial, int], right: dict[Monomial, int]) -> dict[Monomial, int]:
    merged = dict(left)
    for monomial, coefficient in right.items():
        merged[monomial] = merged.get(monomial, 0) + coefficient
    return merged


def simplify(terms: Mapping[Monomial, int]) -> Dim:
    """Drops zero terms; a constant becomes an int."""
    kept = {m: c for m, c in terms.items() if c}
    if set(kept) <= {()}:
        return kept.get((), 0)
    return SymDim(tuple(sorted(kept.items())))


def _term_order(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    return (-len(term[0]), term[0])


def _term_text(monomial: Monomial, coefficient: int) -> str:
    if not monomial:
        return str(coefficient)
    prefix = {1: "", -1: "-"}.get(coefficient, f"{coefficient}*")
    return prefix + "*".join(monomial)


def evaluate_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The int a dim stands for."""
    return dim.evaluate(sizes) if isinstance(dim, SymDim) else dim


def parse_dim(text: str) -> Dim:
    """Inverse of ``str(dim)``; ValueError for anything else."""
    total: Dim = 0
    compact = text.strip()
    if not re.fullmatch(rf"-?{_FACTOR}([*+-]{_FACTOR})*", compact):
        raise ValueError(f"not a dimension: {text!r}")
    for sign, body in re.findall(rf"([+-]?)({_FACTOR}(?:\*{_FACTOR})*)", compact):
        product: Dim = -1 if sign == "-" else 1
        for factor in re.findall(_FACTOR, body):
            product = product * _parse_factor(factor)
        total = total + product
    return total


def _parse_factor(text: str) -> Dim:
    found = choices(text)
    if found is not None:
        return extreme(*found)
    return int(text) if text.isdigit() else symbol(text)


@dataclass(frozen=True)
class TensorType:
    """dtype and shape of a value, printed as ``f32[B, S, 576]``."""

    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def with_shape(self, shape: Shape) -> TensorType:
        """Same dtype, other shape."""
        return TensorType(self.dtype, shape)

    @staticmethod
    def parse(text: str) -> TensorType:
        """Inverse of ``str``; ValueError says what is wrong."""
        match = re.fullmatch(r"(\w+)\[(.*)\]", text.strip())
        if match is None:
            raise ValueError(f"not a type: {text!r}")
        dims = tuple(parse_dim(d) for d in match[2].split(",")) if match[2].strip() else ()
        return TensorType(DType(match[1]), dims)
