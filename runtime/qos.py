"""Who goes first: classes of service as deadlines.

A request's rank is its time of submission plus its class's allowance. Ranks never change, so there
is nothing to update and no two requests can overtake each other in turns; and ageing comes by
itself: a batch request ranks before every realtime one that comes later than its allowance.
Whatever the load, only those submitted within that span can go before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from .checks import out_of_range, require_real

Qos = Literal["realtime", "interactive", "batch"]
QOS: tuple[Qos, ...] = get_args(Qos)

ALLOWANCES: Mapping[Qos, float] = MappingProxyType(
    {"realtime": 0.0, "interactive": 1.0, "batch": 30.0}
)


@dataclass(frozen=True)
class QosPolicy:
    """Ranks requests.

    Attributes:
        allowances: seconds by which requests of a class may be overtaken by the most urgent one's.

    Raises:
        SpikeError: SPK608, not one number of seconds for each class.
    """

    allowances: Mapping[Qos, float] = field(default_factory=lambda: ALLOWANCES)

    def __post_init__(self) -> None:
        given = self.allowances
        if not isinstance(given, Mapping) or set(given) != set(QOS):
            raise out_of_range("allowances", given, f"seconds for each of {', '.join(QOS)}")
        for name in QOS:
            require_real(f"allowances of {name}", given[name])

    def rank(self, qos: Qos, submitted: float) -> float:
        """The smaller, the sooner."""
        return submitted + self.allowances[qos]

    def may_displace(self, qos: Qos, other: Qos) -> bool:
        """Whether one class may take a running request's place of another: only a lower one's."""
        return QOS.index(qos) < QOS.index(other)
