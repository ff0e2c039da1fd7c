"""Sizes of traced graphs become polynomials, or a clear refusal."""

from __future__ import annotations

import pytest
import sympy
from spikeinfer.compiler.frontend.lower_dims import DimTable, NotPolynomial, at_least, divide
from spikeinfer.compiler.ir import SymDim, parse_dim
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

B, S, P = (sympy.Symbol(n, positive=True, integer=True) for n in ("s0", "s1", "s2"))
TABLE = DimTable({"s0": "B", "s1": "S", "s2": "P"})


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (S + P, "P+S"),
        (2 * B * S - 3, "2*B*S-3"),
        (B * (S + P) ** 2, "B*P*P+2*B*P*S+B*S*S"),
        (FloorDiv(B * S * 576, 64), "9*B*S"),
        (FloorDiv(6 * B * S + 2 * B * P, 2 * B), "P+3*S"),
        (Mod(8 * S, 4), "0"),
        (Max(S, S + P), "P+S"),
        (Min(S, S + P), "S"),
        (Max(1, S), "S"),
        (Min(8, S + P), "min(8;P+S)"),
        (2 * Max(0, P - 8) + S, "S+2*max(0;P-8)"),
    ],
)
def test_polynomials(expression: sympy.Expr, text: str) -> None:
    assert TABLE.dim(expression) == parse_dim(text)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (FloorDiv(S, 2), r"not a polynomial"),
        (Max(0, Min(3, P) - 2), "nested"),
        (Mod(S, 4), "not a polynomial"),
        (sympy.Symbol("u0", integer=True) + S, "u0 is a size that depends on data"),
    ],
)
def test_what_is_no_polynomial_is_refused(expression: sympy.Expr, words: str) -> None:
    with pytest.raises(NotPolynomial, match=words):
        TABLE.dim(expression)


def test_refusals_name_our_sizes() -> None:
    with pytest.raises(NotPolynomial, match=r"S//2|floor\(S|FloorDiv\(S, 2\)"):
        TABLE.dim(FloorDiv(S, 2))


@pytest.mark.parametrize(
    ("dim", "bound", "sure"),
    [("S", 1, True), ("S", 2, False), ("P", 0, True), ("P", 1, False), ("P+S", 1, True),
     ("B*S", 1, True), ("B*S-S", 0, True), ("S-P", 0, False), ("7", 7, True)],
)  # fmt: skip
def test_least_values(dim: str, bound: int, sure: bool) -> None:
    assert at_least(parse_dim(dim), bound) is sure


def test_extremes_evaluate_and_substitute() -> None:
    dim = parse_dim("2*min(8;P+S)+max(0;P-8)")
    assert str(dim) == "max(0;P-8)+2*min(8;P+S)"
    assert isinstance(dim, SymDim)
    assert dim.symbols == {"P", "S"}
    assert [dim.evaluate({"P": p, "S": 1}) for p in (0, 3, 20)] == [2, 8, 28]
    assert dim.substitute({"P": 20}) == parse_dim("2*min(8;S+20)+12")
    assert at_least(parse_dim("min(8;P+S)"), 0)
    assert not at_least(parse_dim("min(8;P-1)"), 0)


def test_the_longest_sequence_decides_what_else_is_open() -> None:
    table = DimTable(TABLE.names, longest=64)
    assert table.dim(Max(0, 64 - S - P)) == parse_dim("64-P-S")
    assert table.dim(Max(0, 63 - S - P)) == parse_dim("max(0;63-P-S)")


def test_division_leaves_no_remainder() -> None:
    assert divide(parse_dim("6*B*S"), 4) is None
    assert divide(parse_dim("6*B*S"), parse_dim("3*S")) == parse_dim("2*B")
    assert divide(7, 0) is None
    assert divide(parse_dim("B+S"), parse_dim("B+S")) == 1
