"""Which selection to build next, until a built engine keeps the budget on held-out text.

A selection's KL is predicted; what counts is what its engine measures, which has a floor besides
(int8 activations, the cache) and other text. So: build, measure, and move the predicted KL that is
aimed at so that the measured one lands just under the limit: by their ratio at first, later along
the line through two builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from ...errors import ExitCode, SpikeError
from .candidates import Curve
from .search import Selection, best, frontier, smallest

ROUNDS = 6
"""Engines built and measured at most, before the best one is built again to be published."""
AIM = 0.97
"""Of the limit: measured KL moves by a few percent between neighbouring selections."""
NEAR = 0.9
"""An engine that uses this much of its KL is not made smaller."""
WORTH = 0.995
"""Another round must promise fewer bytes than this share."""


@dataclass(frozen=True)
class Budget:
    """What an engine may cost; at least one limit.

    Args:
        max_kl: mean KL on held-out text, nats.
        max_bytes: of all matrices, in the same rounding as the curves' bytes.
    """

    max_kl: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class Trial:
    """A selection that was built, and the mean KL that its engine measured."""

    selection: Selection
    measured: float


class Rounds:
    """The state between builds; `next` and `accept` take turns."""

    def __init__(self, curves: Sequence[Curve], budget: Budget) -> None:
        self.curves, self.budget = curves, budget
        self.trials: list[Trial] = []
        self._building: Selection | None = None
        self._replay = False

    def next(self) -> Selection:
        """What to build now.

        Raises:
            SpikeError: SPK420 if the budget can't be kept, with the best point that can be reached.
        """
        self._building = self._next()
        return self._building

    def accept(self, measured: float) -> bool:
        """Whether the engine of what `next` gave, which measured this KL, is the one to publish."""
        assert self._building is not None
        self.trials.append(Trial(self._building, measured))
        limit = self.budget.max_kl
        if limit is None or self._replay:
            return True
        return measured <= limit and self._following() is None and self._kept() is self.trials[-1]

    def _next(self) -> Selection:
        if self.budget.max_kl is None:
            return self._largest()
        found = self._following() if self.trials else self._at(AIM * self.budget.max_kl)
        if found is not None:
            return found
        kept = self._kept()
        if kept is None:
            raise self._infeasible(min(self.trials, key=lambda t: t.measured))
        self._replay = True
        return kept.selection

    def _following(self) -> Selection | None:
        """The next selection worth building, None if there is none."""
        assert self.budget.max_kl is not None
        kept = self._kept()
        if len(self.trials) >= ROUNDS or (kept and kept.measured >= NEAR * self.budget.max_kl):
            return None
        found = self._at(self._target(AIM * self.budget.max_kl))
        if any(found.options == t.selection.options for t in self.trials):
            return None
        if kept is not None and found.bytes > WORTH * kept.selection.bytes:
            return None
        return found

    def _target(self, aim: float) -> float:
        """The predicted KL whose engine should measure `aim`."""
        assert self.budget.max_kl is not None
        points = sorted({(t.selection.kl, t.measured) for t in self.trials})
        under = [p for p in points if p[1] <= self.budget.max_kl]
        over = [p for p in points if p[1] > self.budget.max_kl]
        if under and over:
            (x0, y0), (x1, y1) = under[-1], over[0]
        elif len(points) > 1:
            (x0, y0), (x1, y1) = points[:2] if over else points[-2:]
        else:
            (x0, y0), (x1, y1) = (0.0, 0.0), points[0]
        if y1 <= y0 or x1 <= x0:  # not in order: measured noise; go by the ratio
            return x1 * min(4.0, max(0.1, aim / y1))
        return max(0.0, x0 + (aim - y0) * (x1 - x0) / (y1 - y0))

    def _at(self, target: float) -> Selection:
        """The smallest selection at a predicted KL, or as near as the curves and bytes allow."""
        found = smallest(self.curves, target) or frontier(self.curves)[-1]
        if self.budget.max_bytes is not None and found.bytes > self.budget.max_bytes:
            return self._largest()
        return found

    def _largest(self) -> Selection:
        """The best selection that the bytes allow."""
        assert self.budget.max_bytes is not None
        found = best(self.curves, self.budget.max_bytes)
        if found is None:
            least = frontier(self.curves)[0]
            lacking = least.bytes - self.budget.max_bytes
            raise SpikeError(
                "SPK420",
                "quality budget",
                f"the model's matrices take at least {least.bytes:,} bytes, with a predicted KL of "
                f"{least.kl:.3g} nats; the budget leaves {self.budget.max_bytes:,}.",
                f"Allow {lacking:,} bytes more, or remove overrides that name large formats.",
                ExitCode.GOLDEN_FAILED,
            )
        return found

    def _kept(self) -> Trial | None:
        """The smallest trial that kept the limit."""
        assert self.budget.max_kl is not None
        kept = [t for t in self.trials if t.measured <= self.budget.max_kl]
        return min(kept, key=lambda t: (t.selection.bytes, t.measured), default=None)

    def _infeasible(self, reached: Trial) -> SpikeError:
        selection = reached.selection
        formats = ", ".join(f"{count} {name}" for name, count in selection.summary.items())
        within = f" within {self.budget.max_bytes:,} bytes" if self.budget.max_bytes else ""
        return SpikeError(
            "SPK420",
            "quality budget",
            f"no engine{within} kept a mean KL of {self.budget.max_kl:g} nats in "
            f"{len(self.trials)} trials; the best measured {reached.measured:.4g} nats with "
            f"{selection.bytes:,} bytes of matrices ({formats}).",
            f"Allow a KL of {rounded_up(reached.measured):g} or more, a wider --kv-cache-dtype, or "
            "remove overrides that name small formats.",
            ExitCode.GOLDEN_FAILED,
        )


def rounded_up(value: float) -> float:
    """To two significant digits, never below the value: advice that works if it is followed."""
    if value <= 0:
        return 0.0
    digits = 1 - floor(log10(value))
    return float(f"{ceil(value * 10**digits) / 10**digits:.2g}")
