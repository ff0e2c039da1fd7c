"""What a pass is: a frozen dataclass with a name, a contract, and a report of what it did.

A pass rewrites the graph in place. The manager checks the contract, sweeps dead code and verifies
the graph after each pass; a pass never deletes dead nodes itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from ..compiler.analysis import Certificate
from ..compiler.ir import Graph, Level


@dataclass(frozen=True)
class NearMiss:
    """A place where a pass almost fired, and the reason why it did not."""

    where: str
    reason: str


class Refusal(ValueError):
    """Why a place that a pass nearly rewrites stays as it is: the reason of a near miss."""


@dataclass
class PassReport:
    """What one run of a pass did.

    Args:
        fired: one entry per rewrite: the module path it happened in.
        missed: near misses with their reasons.
        facts: numbers and decisions for the build report, JSON-able.
        certificates: precision decisions, one per value.
    """

    name: str
    fired: list[str] = field(default_factory=list)
    missed: list[NearMiss] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)

    @property
    def modified(self) -> bool:
        """Whether the graph changed."""
        return bool(self.fired)


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of the graph. Subclasses add typed options as dataclass fields.

    Class attributes:
        name: as in recipes, reports and (with underscores) the file name.
        requires: levels it accepts.
        ensures: the graph's level afterwards; None leaves it.
        tolerance: largest relative error it may cause in any output (fp32 interpreter): 0 for
            passes that only move or rename, about 1e-6 x a few where rounding order changes.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[Level, ...]]
    ensures: ClassVar[Level | None] = None
    tolerance: ClassVar[float] = 0.0

    @property
    def allowed(self) -> float:
        """`tolerance` under the options of this run."""
        return self.tolerance

    @abstractmethod
    def run(self, graph: Graph) -> PassReport:
        """Rewrites `graph` in place and says what fired, where, and what nearly did."""
