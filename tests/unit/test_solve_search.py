"""The search against brute force, on random curves that are convex or not."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spikeinfer.compiler.solve.candidates import Curve, Option
from spikeinfer.compiler.solve.search import Selection, best, frontier, smallest

OPTIONS = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(0, 1, allow_nan=False)), min_size=1, max_size=5
)


def curves_of(drawn: list[list[tuple[int, float]]]) -> list[Curve]:
    return [
        Curve.of(f"w{i}", [Option(f"f{j}", *pair) for j, pair in enumerate(pairs)])
        for i, pairs in enumerate(drawn)
    ]


CURVES = st.lists(OPTIONS, min_size=1, max_size=5).map(curves_of)


def every(curves: list[Curve]) -> list[Selection]:
    names = tuple(c.name for c in curves)
    return [Selection(names, options) for options in product(*(c.options for c in curves))]


def largest_step(curves: list[Curve]) -> tuple[int, float]:
    """(bytes, KL) between the ends of the widest curve."""
    return (
        max(c.options[-1].bytes - c.options[0].bytes for c in curves),
        max(c.options[0].kl - c.options[-1].kl for c in curves),
    )


@given(CURVES, st.floats(0, 5))
@settings(max_examples=200, deadline=None)
def test_smallest_against_brute_force(curves: list[Curve], max_kl: float) -> None:
    found = smallest(curves, max_kl)
    allowed = [s for s in every(curves) if s.kl <= max_kl]
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.kl <= max_kl + 1e-12
    optimum = min(s.bytes for s in allowed)
    # Lagrange's bound: at most one step of one matrix is lost.
    assert optimum <= found.bytes <= optimum + largest_step(curves)[0]


@given(CURVES, st.integers(0, 5000))
@settings(max_examples=200, deadline=None)
def test_best_against_brute_force(curves: list[Curve], max_bytes: int) -> None:
    found = best(curves, max_bytes)
    allowed = [s for s in every(curves) if s.bytes <= max_bytes]
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found.bytes <= max_bytes
    optimum = min(s.kl for s in allowed)
    assert optimum - 1e-12 <= found.kl <= optimum + largest_step(curves)[1] + 1e-12


@given(CURVES)
@settings(max_examples=100, deadline=None)
def test_no_selection_lies_below_the_frontier(curves: list[Curve]) -> None:
    states = frontier(curves)
    assert [s.bytes for s in states] == sorted(s.bytes for s in states)
    for a, b in pairwise(states):
        for other in every(curves):
            if a.bytes <= other.bytes <= b.bytes and b.bytes > a.bytes:
                share = (other.bytes - a.bytes) / (b.bytes - a.bytes)
                assert other.kl >= a.kl + share * (b.kl - a.kl) - 1e-9


def many(count: int) -> list[Curve]:
    """Curves as models have them: KL falls four-fold per bit, matrices differ by 1000 times."""
    shapes = [(i % 7 + 1) * 1000 for i in range(count)]
    return [
        Curve.of(
            f"w{i}",
            [Option(f"q{b}", n * b // 8, 10.0 ** (-(i * 13 % 30) / 10) * 4.0**-b)
             for b in (2, 3, 4, 5, 6, 8)],
        )
        for i, n in enumerate(shapes)
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "loss"), [(40, 0.02), (200, 0.005)])
def test_a_models_worth_of_matrices_is_solved_closely(count: int, loss: float) -> None:
    """Against the bound that the hull gives: no selection lies below it."""
    curves = many(count)
    states = frontier(curves)
    low, high = states[0].bytes, states[-1].bytes
    for share in (0.1, 0.35, 0.6, 0.9):
        limit = int(low + share * (high - low))
        found = best(curves, limit)
        assert found is not None
        index = next(i for i, s in enumerate(states) if s.bytes > limit)
        a, b = states[index - 1], states[index]
        bound = a.kl + (limit - a.bytes) / (b.bytes - a.bytes) * (b.kl - a.kl)
        assert bound <= found.kl <= (1 + loss) * bound
        again = smallest(curves, found.kl)
        assert again is not None
        assert again.bytes <= (1 + loss) * found.bytes


def test_the_same_selection_every_time() -> None:
    assert best(many(50), 90_000) == best(many(50), 90_000)


def test_ties_go_to_the_first() -> None:
    options = [Option("q4", 4, 1.0), Option("q8", 8, 0.0)]
    curves = [Curve.of(name, options) for name in "abc"]
    found = best(curves, 16)
    assert found is not None
    assert list(found.formats.values()) == ["q8", "q4", "q4"]


def test_beaten_options_are_left_out() -> None:
    options = [Option("a", 4, 1.0), Option("b", 5, 1.0), Option("c", 4, 2.0), Option("d", 6, 0.5)]
    assert [o.format for o in Curve.of("w", options).options] == ["a", "d"]


def test_shares_add_up() -> None:
    found = best(many(10), 10_000_000)
    assert found is not None
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-3)
    assert Selection(("w",), (Option("f32", 4, 0.0),)).shares == {"w": 0.0}
