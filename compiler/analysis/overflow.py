"""Overflow localisation: which node exceeds a format first, even where a later op hides it.

Two runs of the graph. The first in f32 measures every result: the first node, in order, whose
values exceed the format is where a half-precision run breaks. NaN and plus infinity exceed every
format: there the model breaks in f32 already. The second rounds every result to the format and
follows the infinities: where they end, and whether they reach the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir import DType, Graph, Interpreter, Node, Parameters, parse_graph, print_graph
from .formats import FORMATS
from .observe import States, Steps

SENTINEL = 1e38
"""Masks are filled with f32's own limit or with infinity: such elements are not values."""

Feed = Callable[[Graph], tuple[Steps, States]]


@dataclass(frozen=True)
class Overflow:
    """A node whose values exceed the format.

    Args:
        value: the result's name; `op` made it in module `scope`.
        largest: largest finite magnitude in f32.
        elements: how many of `total` exceed the format, in the worst step.
        broken: how many of them are NaN or infinite in f32 already.
    """

    value: str
    op: str
    scope: str
    largest: float
    elements: int
    total: int
    broken: int = 0


@dataclass(frozen=True)
class OverflowReport:
    """What two runs of one graph showed.

    Args:
        nodes: results that were examined.
        found: every node that exceeds the format, in order; the first one is the culprit.
        absorbed: (op, scope) of the first finite results computed from non-finite ones.
        reaches_output: whether an infinity or NaN arrives at the graph's outputs.
    """

    nodes: int
    found: tuple[Overflow, ...]
    absorbed: tuple[tuple[str, str], ...]
    reaches_output: bool


def locate(graph: Graph, parameters: Parameters, target: DType, feed: Feed) -> OverflowReport:
    """Runs the graph in f32 and in the format.

    Args:
        graph: at any level; the traced one shows the inside of norms and softmax.
        feed: inputs of steps, and states, of the graph it is given.
    """
    found: dict[str, Overflow] = {}
    seen: set[str] = set()

    def measure(node: Node, results: list[Tensor]) -> None:
        for value, tensor in zip(node.results, results, strict=True):
            if tensor.is_floating_point():
                seen.add(value.name)
                over = _exceeding(value.name, node, tensor, target)
                worst = found.get(value.name)
                if over and (worst is None or over.elements > worst.elements):
                    found[value.name] = over

    steps, states = feed(graph)
    runner = Interpreter(graph, parameters, dict(states), measure)
    for inputs in steps:
        runner.run(inputs)
    if not found:
        return OverflowReport(len(seen), (), (), False)
    order = [found[v.name] for n in graph.nodes for v in n.results if v.name in found]
    return OverflowReport(len(seen), tuple(order), *_consequences(graph, parameters, target, feed))


def _exceeding(name: str, node: Node, tensor: Tensor, target: DType) -> Overflow | None:
    size = tensor.abs()
    broken = int((torch.isnan(tensor) | (tensor == torch.inf)).sum())
    kept = size[size < SENTINEL]
    count = broken + int((kept > FORMATS[target].largest).sum())
    if not count:
        return None
    largest = float(kept.max()) if kept.numel() else 0.0
    return Overflow(name, node.op, node.scope, largest, count, tensor.numel(), broken)


def _consequences(
    graph: Graph, parameters: Parameters, target: DType, feed: Feed
) -> tuple[tuple[tuple[str, str], ...], bool]:
    """Where infinities vanish, and whether they reach an output, when every result is rounded."""
    low = _rounded(graph, target)
    broken: set[int] = set()
    absorbed: dict[tuple[str, str], None] = {}

    def follow(node: Node, results: list[Tensor]) -> None:
        hit = any(id(o) in broken for o in node.operands)
        for value, tensor in zip(node.results, results, strict=True):
            broken.discard(id(value))  # of an earlier step
            if _is_broken(tensor):
                broken.add(id(value))
            elif hit:
                absorbed[node.op, node.scope] = None

    steps, states = feed(low)
    runner = Interpreter(low, parameters, dict(states), follow)
    outputs = [tensor for inputs in steps for tensor in runner.run(inputs)]
    return tuple(absorbed), any(_is_broken(t) for t in outputs)


def _is_broken(tensor: Tensor) -> bool:
    """NaN, or plus infinity: minus infinity is what masks are rounded to."""
    if not tensor.is_floating_point():
        return False
    return bool(torch.isnan(tensor).any() or (tensor == torch.inf).any())


def _rounded(graph: Graph, target: DType) -> Graph:
    """A copy whose every f32 result inside has the format's precision."""
    copy = parse_graph(print_graph(graph))
    roots = {id(v) for v in copy.roots()}
    for value in (v for n in copy.nodes for v in n.results):
        if value.dtype is DType.F32 and id(value) not in roots:
            value.precision = target
    return copy
