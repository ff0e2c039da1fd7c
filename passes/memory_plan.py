"""Memory plan: one arena in which temporaries share bytes whenever they are never alive together.

A temporary lives from the node that makes it to the last node that reads it, both included. A
reshape lies in its operand's bytes, and so does an elementwise result of the same shape when the
operand dies there. Inputs, constants and states lie elsewhere; outputs count and live to the end.

Offsets hold for all sizes up to the planned ones: a smaller step leaves holes, never an overlap.
What a kernel allocates for itself while it runs is not in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ..compiler.ir import OPS, Graph, Kind, Node, TensorType, Value, evaluate_dim

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector load."""
ROUNDS = 40
"""Placements tried along each order."""


@dataclass(frozen=True)
class Buffer:
    """Bytes in the arena.

    Args:
        values: names of the values that lie in them: a value, its views, what overwrites it.
        size: bytes, a multiple of `ALIGNMENT`.
        first: index of the first node that needs them.
        last: index of the last node that needs them.
    """

    values: tuple[str, ...]
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryPlan:
    """Where every buffer lies.

    Args:
        buffers: in order of `first`.
        offsets: of each buffer, bytes, multiples of `ALIGNMENT`.
        peak: size of the arena, bytes.
        lower_bound: bytes alive at the fullest node; no plan can be smaller.
    """

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    peak: int
    lower_bound: int


def plan_memory(graph: Graph, sizes: Mapping[str, int]) -> MemoryPlan:
    """The plan of a graph when every symbolic dimension has its largest size.

    Raises ValueError for a value with a dimension that `sizes` does not give.
    """
    return place(temporaries(graph, sizes))


def temporaries(graph: Graph, sizes: Mapping[str, int]) -> list[Buffer]:
    """The buffers a graph needs, in the order of their first node."""
    last = _last_uses(graph)
    groups: list[_Group] = []
    home: dict[int, _Group] = {}  # by id of a value
    for index, node in enumerate(graph.nodes):
        if node.op == "kv_append":
            continue  # its result is the state
        for value in node.results:
            group = _shared(node, index, home)
            if group is None:
                group = _Group(_bytes(value, sizes), index, index)
                groups.append(group)
            group.values.append(value.name)
            group.last = max(group.last, last.get(id(value), index))
            home[id(value)] = group
    return [Buffer(tuple(g.values), g.size, g.first, g.last) for g in groups]


@dataclass
class _Group:
    """A buffer while it is found out who lies in it."""

    size: int
    first: int
    last: int
    values: list[str] = field(default_factory=list)


def _last_uses(graph: Graph) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        last.update({id(o): index for o in node.operands if isinstance(o, Value)})
    last.update({id(v): len(graph.nodes) for v in graph.roots()})
    return last


def _shared(node: Node, index: int, home: Mapping[int, _Group]) -> _Group | None:
    """The bytes of an operand that the node's result may lie in."""
    if node.op == "reshape":
        return home.get(id(node.operands[0]))
    if OPS[node.op].kind is not Kind.ELEMENTWISE:
        return None
    for operand in node.operands:
        if isinstance(operand, Value) and _same_bytes(operand.type, node.result.type):
            group = home.get(id(operand))
            if group is not None and group.last == index:
                return group
    return None


def _same_bytes(one: TensorType, other: TensorType) -> bool:
    return one.shape == other.shape and one.dtype.bytes == other.dtype.bytes


def _bytes(value: Value, sizes: Mapping[str, int]) -> int:
    try:
        count = prod(evaluate_dim(d, sizes) for d in value.shape)
    except KeyError as error:
        raise ValueError(f"the size of {value!r} depends on {error.args[0]}") from None
    return -(-count * value.dtype.bytes // ALIGNMENT) * ALIGNMENT


def place(buffers: Sequence[Buffer]) -> MemoryPlan:
    """Offsets for buffers given in order of `first`. Deterministic.

    Best fit and first fit along several orders, each repaired while it is above the lower bound:
    what reaches the top of the arena is placed first in the next round.
    """
    bound = live_peak(buffers)
    neighbours = _neighbours(buffers)
    best = (0, [0] * len(buffers))
    for order in _orders(buffers, neighbours):
        for attempt in range(ROUNDS):
            if best[0] == bound:
                break
            peak, offsets = _fit(buffers, neighbours, order, lowest=attempt % 3 == 2)
            if best[0] == 0 or peak < best[0]:
                best = peak, offsets
            top = {i for i in order if offsets[i] + buffers[i].size == peak}
            order = [i for i in order if i in top] + [i for i in order if i not in top]
    return MemoryPlan(tuple(buffers), tuple(best[1]), best[0], bound)


def live_peak(buffers: Sequence[Buffer]) -> int:
    """Most bytes alive at one node."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + buffer.size
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - buffer.size
    alive = most = 0
    for at in sorted(changes):
        alive += changes[at]
        most = max(most, alive)
    return most


def _neighbours(buffers: Sequence[Buffer]) -> list[list[int]]:
    """By buffer: those alive together with it."""
    found: list[list[int]] = [[] for _ in buffers]
    alive: list[int] = []
    for index, buffer in enumerate(buffers):
        alive = [other for other in alive if buffers[other].last >= buffer.first]
        for other in alive:
            found[index].append(other)
            found[other].append(index)
        alive.append(index)
    return found


def _orders(buffers: Sequence[Buffer], neighbours: list[list[int]]) -> Iterator[list[int]]:
    """Orders of placement, the likeliest first."""
    span = [b.last - b.first + 1 for b in buffers]
    crowd = [b.size + sum(buffers[n].size for n in near)
             for b, near in zip(buffers, neighbours, strict=True)]  # fmt: skip
    everyone = range(len(buffers))
    yield sorted(everyone, key=lambda i: (-buffers[i].size, -span[i], i))
    yield sorted(everyone, key=lambda i: (-span[i], -buffers[i].size, i))
    yield sorted(everyone, key=lambda i: (-span[i] * buffers[i].size, i))
    yield sorted(everyone, key=lambda i: (-crowd[i], -buffers[i].size, i))
    yield list(everyone)


def _fit(
    buffers: Sequence[Buffer], neighbours: list[list[int]], order: Sequence[int], *, lowest: bool
) -> tuple[int, list[int]]:
    """Peak and offsets when each buffer in turn takes a gap, the lowest or the smallest."""
    offsets = [-1] * len(buffers)
    peak = 0
    for index in order:
        near = [(offsets[n], buffers[n].size) for n in neighbours[index] if offsets[n] >= 0]
        offsets[index] = _gap(sorted(near), buffers[index].size, lowest)
        peak = max(peak, offsets[index] + buffers[index].size)
    return peak, offsets


def _gap(taken: Sequence[tuple[int, int]], size: int, lowest: bool) -> int:
    """Start of the lowest or smallest gap between (offset, size) pairs that holds `size`."""
    end, chosen, smallest = 0, -1, 0
    for offset, length in taken:
        gap = offset - end
        if gap >= size and (chosen < 0 or gap < smallest):
            chosen, smallest = end, gap
            if lowest:
                break
        end = max(end, offset + length)
    return end if chosen < 0 else chosen
