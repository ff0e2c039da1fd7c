"""The reference interpreter: runs a graph with the ops' reference functions in torch.

Slow and plain on purpose: it is the meaning of a graph, against which passes and engines are
compared. Values are freed after their last use, constants are fetched one at a time. A result with
a precision is rounded to it, as an engine would: what exceeds the format becomes infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .fused import attend, visible
from .graph import Constant, Graph, Node, Operand, Value
from .ops import OPS, attribute, op_of
from .primitives import TORCH_DTYPE
from .types import Dim, SymDim, evaluate_dim

Parameters = Callable[[str], Tensor]
Observer = Callable[[Node, list[Tensor]], None]


@dataclass
class PagedState:
    """One paged state: rows [slots, heads, width]; slot = block * tokens_per_block + offset."""

    rows: Tensor
    tokens_per_block: int


@dataclass
class Interpreter:
    """Runs `graph`; `parameters` gives a parameter's tensor by name.

    Args:
        states: content of states: past tensors by state name, or PagedState for paged ones.
            In-place ops update it.
        observe: called after every node with its results.
    """

    graph: Graph
    parameters: Parameters
    states: dict[str, Tensor | PagedState] = field(default_factory=dict)
    observe: Observer | None = None

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs of one step, then (functional graphs) updates `states` with the new ones.

        Raises KeyError for a missing input, ValueError for one that does not fit its type.
        """
        env, sizes = self._bind(inputs)
        last = self._last_uses()
        for index, node in enumerate(self.graph.nodes):
            computed = self._node(node, env, sizes)
            results = [_rounded(v, r) for v, r in zip(node.results, computed, strict=True)]
            env.update({id(v): r for v, r in zip(node.results, results, strict=True)})
            if self.observe is not None:
                self.observe(node, results)
            for dead in last.get(index, ()):
                env.pop(dead, None)
        for state in self.graph.states.values():
            if state.output is not None:
                self.states[state.name] = env[id(state.output)]
        return [env[id(v)] for v in self.graph.outputs]

    def _bind(self, inputs: Mapping[str, Tensor]) -> tuple[dict[int, Tensor], dict[str, int]]:
        given = dict(inputs)
        sizes: dict[str, int] = {}
        for state in self.graph.states.values():
            content = self.states.get(state.name)
            if isinstance(content, Tensor):
                _unify(state.name, state.type.shape, content, sizes)
                if state.input is not None:
                    given[state.input.name] = content
        env = {}
        for value in self.graph.inputs:
            _unify(value.name, value.shape, given[value.name], sizes)
            env[id(value)] = given[value.name].to(TORCH_DTYPE[value.dtype])
        return env, sizes

    def _last_uses(self) -> dict[int, list[int]]:
        last: dict[int, int] = {}
        for index, node in enumerate(self.graph.nodes):
            last.update({id(o): index for o in node.operands if isinstance(o, Value)})
        keep = set(map(id, self.graph.roots()))
        dead: dict[int, list[int]] = {}
        for key, index in last.items():
            if key not in keep:
                dead.setdefault(index, []).append(key)
        return dead

    def _operand(self, operand: Operand, env: dict[int, Tensor]) -> Tensor | float:
        if isinstance(operand, Value):
            return env[id(operand)]
        if isinstance(operand, Constant):
            return constant_tensor(operand, self.parameters)
        return operand

    def _node(self, node: Node, env: dict[int, Tensor], sizes: dict[str, int]) -> list[Tensor]:
        operands = [self._operand(o, env) for o in node.operands]
        if node.op == "kv_append":
            return [self._append(node, operands)]
        if node.op == "paged_attention":
            return [self._paged(node, operands)]
        attrs = {name: concrete(attribute(node, name), sizes) for name in op_of(node).attrs}
        result = OPS[node.op].reference(*operands, **attrs)
        return list(result) if isinstance(result, tuple) else [result]

    def _append(self, node: Node, operands: list[Tensor | float]) -> Tensor:
        name = str(attribute(node, "state"))
        past, new = self.states[name], operands[0]
        assert isinstance(past, Tensor)
        assert isinstance(new, Tensor)
        whole = torch.cat((past, new), int(attribute(node, "axis")))
        self.states[name] = whole
        return whole

    def _paged(self, node: Node, operands: list[Tensor | float]) -> Tensor:
        q, k, v, slots, starts, lens, tables = (_as_tensor(o) for o in operands[:7])
        sinks = _as_tensor(operands[7]) if len(operands) > 7 else None
        keys, values = (self.states[str(attribute(node, n))] for n in ("key", "value"))
        assert isinstance(keys, PagedState)
        assert isinstance(values, PagedState)
        written = slots >= 0
        keys.rows[slots[written].long()] = k[written]
        values.rows[slots[written].long()] = v[written]
        window, chunk = (int(attribute(node, n)) for n in ("window", "chunk"))
        logits = {n: attribute(node, n) for n in ("scale", "softcap", "slopes")}
        outputs = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
        for b in range(len(lens)):
            start, end, length = int(starts[b]), int(starts[b + 1]), int(lens[b])
            index = torch.arange(length)
            rows = tables[b].long()[index // keys.tokens_per_block] * keys.tokens_per_block
            rows = rows + index % keys.tokens_per_block
            seen = visible(end - start, length, window, chunk, True)
            past_k, past_v = (_head_major(pool.rows[rows]) for pool in (keys, values))
            here = _head_major(q[start:end])
            attended = attend(here, past_k, past_v, seen, sinks, **logits)
            outputs[start:end] = attended[0].transpose(0, 1)
        return outputs


def constant_tensor(const: Constant, parameters: Parameters) -> Tensor:
    """A constant's values in its compute dtype."""
    if const.data is not None:
        return torch.from_numpy(const.data.copy()).to(TORCH_DTYPE[const.dtype])
    assert const.parameter is not None
    stored: Tensor = const.part_of(parameters(const.parameter)).to(TORCH_DTYPE[const.dtype])
    return stored + const.plus if const.plus else stored


def _rounded(value: Value, tensor: Tensor) -> Tensor:
    if value.precision is None:
        return tensor
    return tensor.to(TORCH_DTYPE[value.precision]).to(tensor.dtype)


def _head_major(rows: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]."""
    return rows.transpose(0, 1).unsqueeze(0)


def _as_tensor(operand: Tensor | float) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


def _unify(name: str, shape: tuple[Dim, ...], tensor: Tensor, sizes: dict[str, int]) -> None:
    if len(shape) != tensor.dim():
        raise ValueError(f"{name} has rank {tensor.dim()}, not {len(shape)}")
    for dim, size in zip(shape, tensor.shape, strict=True):
        if isinstance(dim, SymDim) and dim.symbols == {str(dim)}:
            if sizes.setdefault(str(dim), size) != size:
                raise ValueError(f"{name}: {dim} is {size} here and {sizes[str(dim)]} before")
        elif not isinstance(dim, SymDim) and dim != size:
            raise ValueError(f"{name}: dimension {dim} is {size}")


def concrete(attr: object, sizes: dict[str, int]) -> object:
    """An attribute with every symbolic dimension in it worked out."""
    if isinstance(attr, tuple):
        return tuple(concrete(a, sizes) for a in attr)
    return evaluate_dim(attr, sizes) if isinstance(attr, SymDim) else attr
