"""How long an idle engine waits for company before it starts a request.

A longer window makes fuller steps and later answers. It grows while the time to first token keeps
to the objective and shrinks when it does not: additive increase, multiplicative decrease (Chiu and
Jain 1989), between two bounds. There is no timer that could be stopped or lost: the window is a
moment computed from the oldest waiting request's submission, so no request waits longer than it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .checks import require_real

SMOOTHING = 0.2
OBSERVED = 64  # of the last times to first token; their 95th percentile is smoothed


@dataclass(frozen=True)
class WindowPolicy:
    """Objective and bounds, in seconds.

    Attributes:
        objective: 95th percentile of the time to first token; None = never wait.
        least, most: bounds of the window.
        increase: added per observation within the objective.
        decrease: factor per observation outside of it.

    Raises:
        SpikeError: SPK608, a value out of range.
    """

    objective: float | None = None
    least: float = 0.0
    most: float = 0.02
    increase: float = 0.0005
    decrease: float = 0.5

    def __post_init__(self) -> None:
        require_real("objective", self.objective, optional=True)
        require_real("least", self.least)
        require_real("most", self.most, least=self.least)
        require_real("increase", self.increase)
        require_real("decrease", self.decrease, most=1.0)


class BatchWindow:
    """The window as it is now."""

    def __init__(self, policy: WindowPolicy) -> None:
        self._policy = policy
        self._times: deque[float] = deque(maxlen=OBSERVED)
        self.seconds = policy.least
        self.p95: float | None = None

    def observe(self, first_token: float) -> None:
        """Learn a request's time from submission to its first token."""
        policy = self._policy
        if policy.objective is None:
            return
        self._times.append(first_token)
        p95 = sorted(self._times)[int(0.95 * (len(self._times) - 1) + 0.5)]
        self.p95 = p95 if self.p95 is None else self.p95 + SMOOTHING * (p95 - self.p95)
        kept = self.p95 <= policy.objective
        wanted = self.seconds + policy.increase if kept else self.seconds * policy.decrease
        self.seconds = min(max(wanted, policy.least), policy.most)

    def remaining(self, now: float, oldest: float) -> float:
        """Seconds to wait still, when the oldest waiting request was submitted at `oldest`."""
        if self._policy.objective is None:
            return 0.0
        return max(0.0, oldest + self.seconds - now)
