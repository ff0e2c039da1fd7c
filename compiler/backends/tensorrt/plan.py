"""The network as pure data: what `--plan-only` writes and what the builder follows, layer by layer.

A dimension is a number, or the name of one that the step decides: ``B`` sequences, ``S`` tokens of
each, ``R`` rows of logits of each. Element types are spelt as in the IR (``f32``, ``f16``,
``bf16``, ``i32``, ``bool``), besides ``int4`` for packed nibbles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .constants import Constants, digest, stored_array
from .target import Profile

PLAN_VERSION = 1
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "i32": 4.0, "bool": 1.0, "int4": 0.5}

Dimension = int | str
Attr = bool | int | float | str | tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A network tensor."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes it takes when the step's dimensions have these sizes."""
        count = 1
        for dim in self.shape:
            count *= sizes[dim] if isinstance(dim, str) else dim
        return int(count * BYTES[self.dtype])


@dataclass(frozen=True)
class Layer:
    """One layer of the network API.

    Args:
        kind: see `network.py`, which has one function per kind.
        inputs, outputs: tensor names; an absent optional input is the empty string.
        scope: the model's module it came from.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    scope: str = ""


@dataclass(frozen=True)
class Stored:
    """A constant of the network.

    Args:
        tensor: its name in the network, element type and shape there (leading ones included).
        source: the graph's constant it is made from; empty for a literal.
        part: ``values``, or ``scales`` of an int4 matrix.
        literal: row-major values; ``range`` stands for 0, 1, 2, ... along the last axis.
    """

    tensor: Tensor
    source: str = ""
    part: str = "values"
    literal: tuple[float, ...] | tuple[int, ...] | str = ()


@dataclass(frozen=True)
class AliasedPair:
    """A KV cache: an input and an output that must share one address at run time."""

    state: str
    input: str
    output: str


@dataclass(frozen=True)
class NetworkPlan:
    """A network, in execution order.

    Args:
        inputs, outputs: the engine's interface, in order.
        tensors: every tensor by name, constants too.
        constants: by the name of their tensor.
        aliases: the KV caches.
        profiles: one per phase.
        capacity: tokens that the cache of one sequence holds.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Stored]
    aliases: tuple[AliasedPair, ...]
    profiles: tuple[Profile, ...]
    capacity: int

    def weight_types(self) -> frozenset[str]:
        """Element types of the constants that come from the model."""
        return frozenset(c.tensor.dtype for c in self.constants.values() if c.source)

    def to_json(self, constants: Constants | None = None) -> str:
        """The plan as deterministic JSON; with `constants`, sha256 of the bytes of each."""
        return json.dumps(self.document(constants), indent=1, sort_keys=True) + "\n"

    def document(self, constants: Constants | None) -> dict[str, object]:
        """What `to_json` writes."""
        return {
            "version": PLAN_VERSION,
            "name": self.name,
            "capacity": self.capacity,
            "inputs": [_tensor(t) for t in self.inputs],
            "outputs": [_tensor(t) for t in self.outputs],
            "aliases": [vars(a) for a in self.aliases],
            "profiles": [vars(p) for p in self.profiles],
            "constants": [_stored(c, constants) for c in self.constants.values()],
            "layers": [self._layer(layer) for layer in self.layers],
        }

    def _layer(self, layer: Layer) -> dict[str, object]:
        outputs = [_tensor(self.tensors[name]) for name in layer.outputs]
        entry: dict[str, object] = {"kind": layer.kind, "in": layer.inputs, "out": outputs}
        if layer.attrs:
            entry["attrs"] = dict(layer.attrs)
        return entry | ({"scope": layer.scope} if layer.scope else {})


def _tensor(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape}


def _stored(stored: Stored, constants: Constants | None) -> dict[str, object]:
    entry = _tensor(stored.tensor)
    if not stored.source:
        return entry | {"literal": stored.literal}
    entry |= {"source": stored.source, "part": stored.part}
    if constants is not None:
        entry["sha256"] = digest(stored_array(stored, constants))
    return entry
