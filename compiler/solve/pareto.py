"""The solver's points as pareto.json holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..engine.pareto import Pareto, ParetoPoint
from .rounds import Rounds
from .search import Selection, frontier

POINTS = 48
"""Of the frontier, at most; spread evenly over its bytes."""


def pareto(
    rounds: Rounds, fixed_bytes: int, elements: int, calibration: Mapping[str, object]
) -> Pareto:
    """The predicted frontier and every trial; the last trial is the one chosen.

    Args:
        rounds: after its last `accept`.
        fixed_bytes: of rank0.weights besides the matrices.
        elements: weights in all matrices.
        calibration: as in `Pareto`.
    """

    def point(
        selection: Selection, measured: float | None = None, chosen: bool = False
    ) -> ParetoPoint:
        return ParetoPoint(
            selection.bytes + fixed_bytes,
            round(8 * selection.bytes / elements, 4),
            float(f"{selection.kl:.4g}"),
            selection.summary,
            measured,
            chosen,
        )

    built = {t.selection.options: t for t in rounds.trials}  # a replay counts once
    last = rounds.trials[-1].selection.options
    points = [point(s) for s in thinned(frontier(rounds.curves))]
    points += [point(t.selection, t.measured, key == last) for key, t in built.items()]
    limit = rounds.budget.max_bytes
    return Pareto(
        rounds.budget.max_kl,
        None if limit is None else limit + fixed_bytes,
        calibration,
        tuple(sorted(points, key=lambda p: (p.bytes, p.predicted_kl, p.measured_kl is None))),
    )


def thinned(states: Sequence[Selection]) -> list[Selection]:
    """The ends, and of each of `POINTS` equal ranges of bytes the first state."""
    first, last = states[0].bytes, states[-1].bytes
    kept: dict[int, Selection] = {}
    for state in states:
        kept.setdefault((state.bytes - first) * POINTS // max(1, last - first), state)
    return list(kept.values())
