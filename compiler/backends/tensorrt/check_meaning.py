"""Pieces of a network and of its graph, run on the same numbers.

A piece ends where a tensor of the network bears a value's name. Values that positions alone decide
(angles, cosines) have their true numbers, all others random ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...ir import (
    OPS,
    Constant,
    DType,
    Graph,
    Node,
    Operand,
    Shape,
    Value,
    attribute,
    evaluate_dim,
    op_of,
)
from ...ir.interpret import concrete
from .check_constants import source
from .constants import Constants, Int4Matrix, rounded, widened
from .meaning import evaluate
from .precision import ElementTypes
from .read import ReadLayer, ReadNetwork
from .target import Target

BATCH, STEP, ROWS = 2, 3, 2


@dataclass
class Ran:
    """The result of a piece, the values it started from, and its constants' element types."""

    result: Tensor
    leaves: set[str]
    constants: dict[str, str] = field(default_factory=dict)


@dataclass
class Pieces:
    """A network and a graph, with numbers for what they share."""

    network: ReadNetwork
    graph: Graph
    constants: Constants
    target: Target

    @cached_property
    def types(self) -> ElementTypes:
        """Element types by the rules."""
        return ElementTypes(self.graph, self.target.dtype)

    @cached_property
    def names(self) -> dict[int, str]:
        """The tensor of every value that has one."""
        found = {id(self.graph.input(n)): n for n in ("tokens", "positions")}
        for node in self.graph.nodes:
            for value in node.results:
                name = f"%{value.name}"
                if node.op == "kv_append":
                    name = f"{attribute(node, 'state')}.present"
                if value is self.graph.outputs[0]:
                    name = "logits"
                if name in self.network.tensors:
                    found[id(value)] = name
        return found

    @cached_property
    def shared(self) -> list[Value]:
        """Results that have a tensor, in order."""
        results = (v for n in self.graph.nodes for v in n.results)
        return [v for v in results if id(v) in self.names]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the graph's symbols; past and step fill the cache."""
        return {"B": BATCH, "S": STEP, "P": self.target.capacity - STEP}

    @cached_property
    def starts(self) -> Tensor:
        """Tokens that the sequences have: one fills its cache, the other has a single one."""
        return torch.tensor([self.target.capacity - STEP, min(1, self.target.capacity - STEP)])

    @cached_property
    def given(self) -> dict[str, Tensor]:
        """Numbers of the inputs, by name."""
        positions = self.starts.reshape(-1, 1) + torch.arange(STEP)
        rows = torch.tensor([[STEP - 1, 0], [0, 1]])
        numbers = {
            "positions": positions.int(),
            "write_indices": self.starts.int(),
            "kv_lens": (self.starts + STEP).int(),
            "logit_rows": rows.int(),
        }
        for tensor in self.network.inputs:
            if tensor.name.endswith(".past"):
                shape = (BATCH, *tensor.shape[1:])
                numbers[tensor.name] = random(tensor.name, shape, DType.F32)
        return numbers

    @cached_property
    def decided(self) -> set[int]:
        """Values that positions alone decide."""
        known = {id(self.graph.input("positions"))}
        for node in self.graph.nodes:
            operands = [o for o in node.operands if isinstance(o, Value)]
            if operands and all(id(o) in known for o in operands) and node.op != "linear":
                known.update(id(v) for v in node.results)
        return known

    def number(self, value: Value) -> Tensor:
        """What a shared value is, where a piece starts from it."""
        name = self.names[id(value)]
        if name in self.given:
            return self.given[name]
        if name == "tokens":
            return random(name, (BATCH, STEP), DType.I64) % self._vocabulary
        if id(value) in self.decided:
            self.given[name] = self.graph_value(value, {}).result
            return self.given[name]
        return random(name, self._shape(value.shape), value.dtype)

    @cached_property
    def _vocabulary(self) -> int:
        tokens = self.graph.input("tokens")
        tables = [n.tensor(0).shape[0] for n in self.graph.nodes
                  if n.op == "embedding" and n.operands[1] is tokens]  # fmt: skip
        return min((t for t in tables if isinstance(t, int)), default=1)

    def _shape(self, shape: Shape) -> tuple[int, ...]:
        return tuple(evaluate_dim(d, self.sizes) for d in shape)

    # The network's side.

    def layers_of(self, value: Value) -> list[ReadLayer]:
        """The layers of a value's piece, in order."""
        return self._layers(value)[0]

    def _layers(self, value: Value) -> tuple[list[ReadLayer], set[str]]:
        """Layers between a value's tensor and what they start from, and the names of that."""
        own = self.names[id(value)]
        found, leaves, wanted = set[int](), set[str](), [own]
        while wanted:
            name = wanted.pop()
            if name != own and name in self._ends:
                leaves.add(name)
            elif self._makers[name] not in found:
                found.add(self._makers[name])
                wanted += filter(None, self.network.layers[self._makers[name]].inputs)
        return [self.network.layers[i] for i in sorted(found)], leaves

    @cached_property
    def _ends(self) -> set[str]:
        return {*self.names.values(), *(t.name for t in self.network.inputs)}

    @cached_property
    def _makers(self) -> dict[str, int]:
        return {n: i for i, layer in enumerate(self.network.layers) for n in layer.outputs}

    def network_value(self, value: Value) -> Ran:
        """A value by the network's layers."""
        layers, leaves = self._layers(value)
        numbers = {name: self._start(name) for name in leaves}
        kinds: dict[str, str] = {}
        for layer in layers:
            operands = [numbers[name] if name else None for name in layer.inputs]
            numbers[layer.output] = evaluate(layer, operands, self.network)
            if layer.kind == "CONSTANT" and (const := source(layer.output, self.graph)):
                dtype = self.network.tensors[layer.output].dtype
                if dtype != "int4":  # their scales' type counts
                    kinds.setdefault(const, dtype)
        return Ran(numbers[self.names[id(value)]], leaves, kinds)

    def _start(self, name: str) -> Tensor:
        if name in self._by_name:
            return self.number(self._by_name[name])
        return self.given[name] if name in self.given else self.number(self.graph.input(name))

    @cached_property
    def _by_name(self) -> dict[str, Value]:
        return {self.names[id(v)]: v for v in self.shared}

    # The graph's side.

    def nodes_of(self, value: Value) -> list[Node]:
        """The nodes of a value's piece, in order."""
        return self._nodes(value)[0]

    def _nodes(self, value: Value) -> tuple[list[Node], list[Value]]:
        found, leaves, wanted = set[int](), list[Value](), [value]
        while wanted:
            own = wanted.pop()
            if own is not value and id(own) in self.names:
                leaves.append(own)
            elif own.node is not None and self._order[id(own.node)] not in found:
                found.add(self._order[id(own.node)])
                wanted += [o for o in own.node.operands if isinstance(o, Value)]
        return [self.graph.nodes[i] for i in sorted(found)], leaves

    @cached_property
    def _order(self) -> dict[int, int]:
        return {id(node): i for i, node in enumerate(self.graph.nodes)}

    def graph_value(self, value: Value, stored: dict[str, str]) -> Ran:
        """A value by the graph's nodes; `stored`: the element types that constants are kept in."""
        nodes, leaves = self._nodes(value)
        numbers = {id(v): self.number(v) for v in leaves}
        for node in nodes:
            operands = [self._operand(o, numbers, stored) for o in node.operands]
            results = self._run(node, operands)
            numbers.update({id(v): r for v, r in zip(node.results, results, strict=True)})
        result = numbers[id(value)]
        if value is self.graph.outputs[0]:
            rows = self.given["logit_rows"].long()
            result = torch.stack([r[i] for r, i in zip(result, rows, strict=True)])
        return Ran(result, {self.names[id(v)] for v in leaves})

    def _operand(
        self, operand: Operand, numbers: dict[int, Tensor], stored: dict[str, str]
    ) -> Tensor | float:
        if isinstance(operand, Constant):
            return self._constant(operand, stored.get(operand.name, "f32"))
        return numbers[id(operand)] if isinstance(operand, Value) else operand

    def _constant(self, const: Constant, dtype: str) -> Tensor:
        values = self.constants(const.name)
        if isinstance(values, Int4Matrix):
            return torch.from_numpy(values.values(dtype))
        return torch.from_numpy(widened(rounded(values, dtype), dtype))

    def _run(self, node: Node, operands: list[Tensor | float]) -> list[Tensor]:
        if node.op == "kv_append":
            return [self._append(node, operands[0])]
        attrs = {n: concrete(attribute(node, n), self.sizes) for n in op_of(node).attrs}
        if node.op == "attention":
            return [self._attend(operands, attrs)]
        result = OPS[node.op].reference(*operands, **attrs)
        return list(result) if isinstance(result, tuple) else [result]

    def _append(self, node: Node, new: Tensor | float) -> Tensor:
        assert isinstance(new, Tensor)
        cache = self.given[f"{attribute(node, 'state')}.past"].clone()
        for b, start in enumerate(self.starts.tolist()):
            cache[b, :, start : start + STEP] = new[b]
        return cache

    def _attend(self, operands: list[Tensor | float], attrs: dict[str, object]) -> Tensor:
        """Each sequence by itself, over as many keys as it has."""
        q, k, v, *sinks = operands
        assert isinstance(q, Tensor)
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        rows = []
        for b, length in enumerate((self.starts + STEP).tolist()):
            own = [t[b : b + 1] for t in (q, k[:, :, :length], v[:, :, :length])]
            rows.append(OPS["attention"].reference(*own, *sinks, **attrs))
        return torch.cat(rows)


def random(name: str, shape: Iterable[int], dtype: DType) -> Tensor:
    """Numbers that the name decides; rows (last axis) of magnitudes from 0.001 to 1."""
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sizes = tuple(shape)
    if dtype is DType.BOOL:
        return torch.rand(sizes, generator=source) < 0.5
    if not dtype.is_float:
        return torch.randint(0, 1 << 20, sizes, generator=source)
    scale = 10 ** (-3 * torch.rand((*sizes[:-1], 1), generator=source))
    return torch.randn(sizes, generator=source) * scale
