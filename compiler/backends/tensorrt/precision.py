"""The element type of everything in a network, from the placed graph alone.

assign-precision says which values are rounded to half precision; every other float is f32. A node
computes in half precision if all floats around it are half, numbers in it too, else in f32 and its
result is rounded.
Builder and checker both follow these rules; they are their definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...ir import HALVES, Constant, DType, Graph, Node, Value, attribute
from ...ir.primitives import TORCH_DTYPE

INTEGERS = (DType.I64, DType.I32, DType.U8)


@dataclass(frozen=True)
class ElementTypes:
    """The rules for one graph; `half` is f16 or bf16."""

    graph: Graph
    half: DType

    def of(self, value: Value) -> str:
        """A value's element type in the network; integers are i32 there."""
        if value.node is not None and value.node.op == "kv_append":
            return self.of_state(value.node)
        if value.dtype is DType.BOOL:
            return "bool"
        if value.dtype in INTEGERS:
            return "i32"
        return self.half.value if value.precision in HALVES else "f32"

    def of_state(self, append: Node) -> str:
        """A cache's: half precision if its format and what is appended both are."""
        state = self.graph.states[str(attribute(append, "state"))]
        narrow = state.format in ("f16", "bf16") and self.of(append.value(0)) != "f32"
        return self.half.value if narrow else "f32"

    def computed_in(self, node: Node) -> str:
        """What a node with float results computes in."""
        around = [o for o in node.operands if isinstance(o, Value) and o.dtype.is_float]
        exact = any(self.of(v) == "f32" for v in (*around, *node.results))
        exact = exact or _wide_weight(node) or self._odd_number(node)
        return "f32" if exact else self.half.value

    def _odd_number(self, node: Node) -> bool:
        """Whether a number that the node names would itself be rounded, as Gemma's sqrt(640)."""
        numbers = torch.tensor([o for o in node.operands if isinstance(o, float)])
        half = TORCH_DTYPE[self.half]
        return not torch.equal(numbers.to(half).float(), numbers)


def _wide_weight(node: Node) -> bool:
    """Whether a matrix of the node is stored in f32, because half precision does not hold it."""
    return any(isinstance(o, Constant) and o.format == "f32" for o in node.operands)
