"""The built network against the graph it came from, without running it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...ir import Graph
from .constants import Constants
from .target import Target


@dataclass(frozen=True)
class Finding:
    """One difference between network and graph: where (a layer or node), and what."""

    where: str
    what: str


def check_network(
    network: Any, graph: Graph, constants: Constants, target: Target
) -> list[Finding]:
    """Differences between an INetworkDefinition and the placed graph; none is the proof."""
    return []
