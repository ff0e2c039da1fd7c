"""What a rewrite saves, estimated: bytes of activations moved for one token, and launches.

A kernel reads each of its operands once and writes its result once; a reshape moves nothing;
weights and caches are read either way and do not count. The token is a decode step behind 1,023
others, so that shapes with P count as they weigh in practice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

from ..compiler.ir import Dim, Node, Shape, SymDim, Value, evaluate_dim

DECODE = {"P": 1023, "B1": 2}
"""Sizes of symbols; all others are 1."""
LAUNCH_BYTES = 125_000
"""What a launch is worth: 2.5 us in a parallel graph node (measured) at 50 GB/s."""
VIEWS = ("reshape",)


@dataclass(frozen=True)
class Traffic:
    """Activation bytes for one token, and launches; the difference of two is a saving."""

    bytes: int
    launches: int

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes - other.bytes, self.launches - other.launches)

    @property
    def pays(self) -> bool:
        """Whether a saving is worth a rewrite: a launch counts as the bytes of its time."""
        return self.bytes + self.launches * LAUNCH_BYTES > 0

    def to_json(self) -> dict[str, int]:
        """For `PassReport.facts`."""
        return {"bytes per token": self.bytes, "launches": self.launches}


def traffic(nodes: Iterable[Node]) -> Traffic:
    """What the nodes move when each is one kernel."""
    total, launches = 0, 0
    for node in nodes:
        if node.op in VIEWS:
            continue
        launches += 1
        total += sum(map(_bytes, node.results))
        total += sum(_bytes(o) for o in node.operands if isinstance(o, Value))
        if node.op == "gated_mlp":  # its hidden row goes through scratch memory
            total += 2 * 4 * _size(node.tensor(1).shape[0])
    return Traffic(total, launches)


def _bytes(value: Value) -> int:
    return value.dtype.bytes * _elements(value.shape)


@cache
def _elements(shape: Shape) -> int:
    return prod(map(_size, shape))


def _size(dim: Dim) -> int:
    if not isinstance(dim, SymDim):
        return dim
    return evaluate_dim(dim, {s: DECODE.get(s, 1) for s in dim.symbols})
