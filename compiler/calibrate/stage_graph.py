"""One stage as a graph of its own, whose constants are given as they are to be used.

Every constant becomes a whole parameter of its own name, so that weights are prepared once for all
chunks. A table of embeddings stays in the dtype of the checkpoint and its rows are cast instead: as
f32 it could be larger than everything else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..ir import (
    Constant,
    DType,
    Graph,
    Level,
    Node,
    Operand,
    Parameters,
    TensorType,
    Value,
    constant_tensor,
    symbol,
)
from .stages import Stage

SIZES = ("B", "S", "P")
"""Symbols of a functional graph; a stage learns their values from an input of that shape."""

STORED = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}

Loaded: TypeAlias = dict[str, Tensor]


class Weights:
    """Constants by name, as the stage at hand uses them."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._replaced: Loaded = {}
        self._loaded: Loaded = {}

    def replace(self, const: Constant, values: Tensor) -> None:
        """The constant has these values until `keep` leaves it out."""
        self._replaced[const.name] = values.detach().float()

    def load(self, const: Constant) -> None:
        """Makes `self[const.name]` its values in its compute dtype."""
        if const.name not in self._replaced and const.name not in self._loaded:
            self._loaded[const.name] = constant_tensor(const, self._parameters).detach()

    def load_table(self, const: Constant) -> DType:
        """The same in the dtype of the checkpoint, if it has one of ours; which dtype it is."""
        if const.name not in self._replaced and const.parameter and not const.plus:
            stored = const.part_of(self._parameters(const.parameter)).detach()
            if stored.dtype in STORED:
                self._loaded[const.name] = stored
                return STORED[stored.dtype]
        self.load(const)
        return const.dtype

    def of(self, operand: Operand) -> Tensor:
        """A constant's values, loaded if need be."""
        assert isinstance(operand, Constant)
        self.load(operand)
        return self[operand.name]

    def __getitem__(self, name: str) -> Tensor:
        return self._replaced[name] if name in self._replaced else self._loaded[name]

    def keep(self, names: Collection[str]) -> None:
        """Drops what was loaded, and replacements of other names."""
        self._loaded.clear()
        self._replaced = {n: t for n, t in self._replaced.items() if n in names}


def stage_graph(stage: Stage, weights: Weights) -> Graph:
    """A graph from `stage.reads` to `stage.gives`; its constants are loaded.

    Its first input, ``sizes``, has the shape [B, S, P].
    """
    sizes = Value("sizes", TensorType(DType.F32, tuple(map(symbol, SIZES))))
    graph = Graph("stage", Level.FUSED, [sizes, *stage.reads], outputs=list(stage.gives))
    for node in stage.nodes:
        table = node.operands[0] if node.op == "embedding" else None
        if isinstance(table, Constant) and (dtype := weights.load_table(table)) is not table.dtype:
            graph.nodes += _cast_rows(node, _whole(table, dtype))
            continue
        operands = [_prepared(o, weights) for o in node.operands]
        graph.nodes.append(replace(node, operands=operands))
    return graph


def _prepared(operand: Operand, weights: Weights) -> Operand:
    if not isinstance(operand, Constant) or operand.data is not None:
        return operand
    weights.load(operand)
    return _whole(operand, operand.dtype)


def _whole(const: Constant, dtype: DType) -> Constant:
    return Constant(const.name, TensorType(dtype, const.shape), parameter=const.name)


def _cast_rows(node: Node, table: Constant) -> list[Node]:
    """Rows of a table of another dtype, then cast to the result's."""
    result = node.result
    rows = Value(f"{result.name}.stored", TensorType(table.dtype, result.shape))
    gather = Node("embedding", [table, *node.operands[1:]], dict(node.attrs), [rows])
    return [gather, Node("cast", [rows], {"dtype": result.dtype}, [result])]
