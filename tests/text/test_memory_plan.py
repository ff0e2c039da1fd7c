"""Memory plans: random graphs run inside their arena, and how near the arena is to the least."""

from __future__ import annotations

import random

import pytest
import torch
from spikeinfer.compiler.ir import (
    Builder,
    DType,
    Graph,
    Interpreter,
    TensorType,
    Value,
    parse_graph,
    symbol,
    verify,
)
from spikeinfer.passes.memory_plan import ALIGNMENT, Buffer, MemoryPlan, place, plan_memory

ROWS = 3
MOST_WIDTH = 600
TIGHT = 1.10
"""The issue's limit: peak over the lower bound."""


def random_graph(seed: int) -> Graph:
    """A DAG of 5 to 120 nodes that slice, join, add, negate and reshape; values die at random."""
    pick = random.Random(seed)
    graph = Graph(f"random{seed}")
    build = Builder(graph)
    values = [build.input("x", TensorType(DType.F32, (symbol("T"), pick.randint(1, 300))))]
    reach = pick.choice((3, 10, 100))
    for _ in range(pick.randint(5, 120)):
        values.append(_random_node(pick, build, values[-reach:]))
    graph.outputs = pick.sample(values[1:], min(3, len(values) - 1))
    graph.sweep()
    return graph


def _random_node(pick: random.Random, build: Builder, near: list[Value]) -> Value:
    x, y = pick.choice(near), pick.choice(near)
    width, other = (v.shape[1] for v in (x, y))
    assert isinstance(width, int)
    assert isinstance(other, int)
    kind = pick.randint(0, 4)
    if kind == 0 and width > 1:
        start = pick.randrange(width - 1)
        return build.emit("slice", [x], axis=1, start=start, end=pick.randint(start + 1, width))
    if kind == 1 and width + other <= MOST_WIDTH:
        return build.emit("concat", [x, y], axis=1)
    if kind == 2 and width == other:
        return build.emit("add", [x, y])
    if kind == 3:
        return build.emit("reshape", [x], shape=(symbol("T"), width))
    return build.emit("neg", [x])


def run_in_arena(graph: Graph, plan: MemoryPlan, x: torch.Tensor) -> list[torch.Tensor]:
    """The graph's outputs when every value lies where the plan says, and nowhere else."""
    arena = torch.full((plan.peak // 4,), float("nan"))
    offsets = {n: o for b, o in zip(plan.buffers, plan.offsets, strict=True) for n in b.values}

    def stored(value: Value) -> torch.Tensor:
        if value.node is None:
            return x
        shape = (x.shape[0], *(d for d in value.shape if isinstance(d, int)))
        start = offsets[value.name] // 4
        return arena[start : start + shape[0] * shape[1]].view(shape)

    for node in graph.nodes:
        single = Graph("node", inputs=[o for o in node.operands if isinstance(o, Value)])
        single.nodes, single.outputs = [node], node.results
        given = {v.name: stored(v).clone() for v in single.inputs}
        (result,) = Interpreter(single, _no_parameters).run(given)
        stored(node.result)[:] = result
    return [stored(v).clone() for v in graph.outputs]


def _no_parameters(name: str) -> torch.Tensor:
    raise KeyError(name)


@pytest.mark.parametrize("block", range(10))
def test_random_graphs_give_the_same_values_inside_their_arena(block: int) -> None:
    """200 graphs, also with fewer rows than planned for: the same bits as with memory to spare."""
    for seed in range(20 * block, 20 * block + 20):
        graph = random_graph(seed)
        verify(graph)
        plan = plan_memory(graph, {"T": ROWS})
        assert plan.lower_bound <= plan.peak <= TIGHT * plan.lower_bound, seed
        assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)
        for rows in (1, ROWS):
            x = torch.rand(rows, int(str(graph.inputs[0].shape[1])))
            expected = Interpreter(graph, _no_parameters).run({"x": x})
            found = run_in_arena(graph, plan, x)
            assert all(map(torch.equal, found, expected)), seed


def random_buffers(seed: int) -> list[Buffer]:
    """Live ranges and sizes of three characters, without a graph behind them."""
    pick = random.Random(seed)
    nodes, reach = pick.randint(5, 150), pick.choice((3, 10, 40))
    sizes = pick.choice((range(1, 4097), [2**i for i in range(13)], [1, 4, 64, 100]))
    buffers = []
    for first in range(nodes):
        span = pick.randint(1, reach) if pick.random() < 0.9 else pick.randint(1, nodes)
        size = ALIGNMENT * pick.choice(sizes)
        buffers.append(Buffer((str(first),), size, first, min(nodes, first + span)))
    return buffers


def test_random_live_ranges_never_overlap_and_lie_tight() -> None:
    for seed in range(200):
        plan = place(random_buffers(seed))
        assert plan.lower_bound <= plan.peak <= TIGHT * plan.lower_bound, seed
        placed = list(zip(plan.buffers, plan.offsets, strict=True))
        for index, (one, low) in enumerate(placed):
            for other, start in placed[:index]:
                if one.first <= other.last and other.first <= one.last:
                    assert low + one.size <= start or start + other.size <= low, seed


def test_a_plan_is_deterministic() -> None:
    assert plan_memory(random_graph(7), {"T": 5}) == plan_memory(random_graph(7), {"T": 5})


SHARING = """graph sharing fused {
  input %x : f32[T, 16]
  input %r : f32[B, 2, S, 8]
  state k : f32[B, 2, P, 8] axis=2 kind=kv
  %a = neg(%x) : f32[T, 16]
  %b = reshape(%a, shape=[T, 4, 4]) : f32[T, 4, 4]
  %c = neg(%b) : f32[T, 4, 4]
  %d = neg(%c) : f32[T, 4, 4]
  %e = add(%c, %d) : f32[T, 4, 4]
  %all = kv_append(%r, state="k", axis=2, past=P) : f32[B, 2, P+S, 8]
  output %e
}
"""


def test_views_and_dying_operands_share_bytes_and_states_take_none() -> None:
    """%d may not overwrite %c, which %e still reads; %e may."""
    plan = plan_memory(parse_graph(SHARING), {"T": 4, "B": 1, "S": 1, "P": 1})
    assert [b.values for b in plan.buffers] == [("a", "b", "c", "e"), ("d",)]
    assert plan.peak == plan.lower_bound == 2 * 4 * 16 * 4


def test_an_unknown_dimension_is_named() -> None:
    with pytest.raises(ValueError, match=r"%a: f32\[T, 16\] depends on T"):
        plan_memory(parse_graph(SHARING), {"B": 1})


def test_nothing_to_plan() -> None:
    assert place([]) == MemoryPlan((), (), 0, 0)
