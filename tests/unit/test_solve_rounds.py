"""Rounds: from predicted to measured KL, for engines whose floor and slope are not known."""

from __future__ import annotations

import pytest
from spikeinfer import ExitCode, SpikeError
from spikeinfer.compiler.solve.candidates import Curve, Option
from spikeinfer.compiler.solve.pareto import POINTS, pareto
from spikeinfer.compiler.solve.rounds import NEAR, ROUNDS, Budget, Rounds, rounded_up
from spikeinfer.compiler.solve.search import Selection, frontier, smallest


def curves(count: int = 60) -> list[Curve]:
    """KL falls four-fold per bit; matrices differ by 1000 times; 16 bits are exact."""
    return [
        Curve.of(
            f"w{i}",
            [Option(f"q{b}", (i % 7 + 1) * 1000 * b // 8,
                    0.0 if b == 16 else 10.0 ** (-(i * 13 % 30) / 10) * 4.0**-b)
             for b in (2, 3, 4, 5, 6, 8, 16)],
        )
        for i in range(count)
    ]  # fmt: skip


def run(rounds: Rounds, floor: float, slope: float) -> Selection:
    """Plays the builder: what is accepted in the end."""
    for _ in range(ROUNDS + 1):
        selection = rounds.next()
        if rounds.accept(floor + slope * selection.kl):
            return selection
    raise AssertionError("no end")


@pytest.mark.parametrize("slope", [0.3, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("floor", [0.0, 0.0005, 0.004])
def test_the_measured_kl_ends_just_under_the_limit(floor: float, slope: float) -> None:
    limit = 0.01
    rounds = Rounds(curves(), Budget(max_kl=limit))
    found = run(rounds, floor, slope)
    assert NEAR * limit <= rounds.trials[-1].measured <= limit
    assert len(rounds.trials) <= ROUNDS
    ideal = smallest(curves(), (limit - floor) / slope)
    assert ideal is not None
    assert found.bytes <= 1.02 * ideal.bytes


def test_noise_ends_with_an_engine_that_kept_the_limit() -> None:
    noise = iter([1.3, 0.6, 1.4, 0.7, 1.25, 1.5, 0.9])
    rounds = Rounds(curves(), Budget(max_kl=0.01))
    for _ in range(ROUNDS + 1):
        selection = rounds.next()
        again = [t.measured for t in rounds.trials if t.selection.options == selection.options]
        if rounds.accept(again[0] if again else next(noise) * selection.kl):
            break
    assert rounds.trials[-1].measured <= 0.01
    kept = [t.selection.bytes for t in rounds.trials if t.measured <= 0.01]
    assert rounds.trials[-1].selection.bytes == min(kept)


def test_a_floor_above_the_limit_is_infeasible() -> None:
    rounds = Rounds(curves(), Budget(max_kl=0.01))
    with pytest.raises(SpikeError) as caught:
        run(rounds, floor=0.02, slope=1.0)
    error = caught.value
    assert (error.code, error.exit_code) == ("SPK420", ExitCode.GOLDEN_FAILED)
    best = min(t.measured for t in rounds.trials)
    assert f"{best:.4g} nats" in error.what
    assert best == pytest.approx(0.02)  # it tried the best there is
    assert "60 q16" in error.what


def test_bytes_that_nothing_fits_are_infeasible() -> None:
    least = frontier(curves())[0]
    with pytest.raises(SpikeError) as caught:
        Rounds(curves(), Budget(max_bytes=least.bytes - 1)).next()
    assert caught.value.code == "SPK420"
    assert f"{least.bytes:,}" in caught.value.what


def test_bytes_alone_take_one_round() -> None:
    rounds = Rounds(curves(), Budget(max_bytes=100_000))
    found = run(rounds, 0.0, 9.0)
    assert found.bytes <= 100_000
    assert len(rounds.trials) == 1


def test_both_limits() -> None:
    roomy = Rounds(curves(), Budget(max_kl=0.01, max_bytes=400_000))
    assert run(roomy, 0.0, 1.0).bytes < 400_000
    tight = Rounds(curves(), Budget(max_kl=0.01, max_bytes=70_000))
    with pytest.raises(SpikeError, match=r"SPK420.*within 70,000 bytes"):
        run(tight, 0.0, 1.0)
    assert all(t.selection.bytes <= 70_000 for t in tight.trials)


def test_the_points_of_pareto_json() -> None:
    rounds = Rounds(curves(), Budget(max_kl=0.01))
    chosen = run(rounds, 0.001, 1.5)
    found = pareto(rounds, 4096, 240_000, {"text": "own text"})
    assert [p.bytes for p in found.points] == sorted(p.bytes for p in found.points)
    [point] = [p for p in found.points if p.chosen]
    assert (point.bytes, point.formats) == (chosen.bytes + 4096, chosen.summary)
    assert point.measured_kl == rounds.trials[-1].measured
    assert sum(p.measured_kl is not None for p in found.points) == len(rounds.trials)
    assert POINTS // 2 < len(found.points) <= POINTS + 1 + len(rounds.trials)


@pytest.mark.parametrize(
    ("value", "advice"),
    [(2.342e-06, 2.4e-06), (0.4234, 0.43), (0.42, 0.42), (1.0, 1.0), (0.0, 0.0)],
)
def test_advice_is_never_below_what_was_reached(value: float, advice: float) -> None:
    assert rounded_up(value) == advice
