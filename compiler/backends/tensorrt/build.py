"""Plan to engine: the network API of tensorrt_rtx."""

from __future__ import annotations

from .constants import Constants
from .plan import NetworkPlan
from .target import Target


def build_engine(plan: NetworkPlan, constants: Constants, target: Target) -> bytes:
    """The serialized engine.

    Raises SpikeError: SPK527 tensorrt_rtx isn't installed, SPK528 TensorRT refused the network.
    """
    raise NotImplementedError
