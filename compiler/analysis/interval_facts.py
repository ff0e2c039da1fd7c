"""What the rules of interval analysis share: facts that they may ask, shapes of operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir import Constant, Dim, Node, Operand, Shape, SymDim, Value
from .bounds import INF, Bound, product
from .weights import Norms, Weights


@dataclass(frozen=True)
class Facts:
    """What rules may ask besides their operands' bounds.

    Args:
        weights: norms of constants.
        longest: no symbolic dimension is larger.
    """

    weights: Weights
    longest: int

    def size(self, dim: Dim) -> float:
        """An upper bound of a dimension."""
        if not isinstance(dim, SymDim):
            return dim
        if "-" in str(dim):  # a negative coefficient, also inside of a minimum
            return INF
        return dim.evaluate(dict.fromkeys(dim.symbols, self.longest))

    def norms(self, operand: Operand) -> Norms | None:
        """Norms of a constant operand; None for anything else, or if its values are unknown."""
        return self.weights.of(operand) if isinstance(operand, Constant) else None


Rule = Callable[[Node, list[Bound], Facts], Bound]


def row_width(shape: Shape) -> Dim:
    """Elements of a row; one if the value is a number."""
    return shape[-1] if shape else 1


def shape_of(operand: Operand) -> Shape:
    """The shape of any operand; that of a number is empty."""
    return operand.shape if isinstance(operand, Value | Constant) else ()


def row_norm(node: Node, index: int, bound: Bound) -> float:
    """Norm of operand `index`'s rows after it is broadcast to the result's shape."""
    width, own = row_width(node.result.shape), row_width(shape_of(node.operands[index]))
    if own == width:
        return bound.norm
    return product(math.sqrt(width), bound.magnitude) if isinstance(width, int) else INF


def sound(bound: Bound) -> Bound:
    """inf - inf and the like say nothing."""
    if math.isnan(bound.low) or math.isnan(bound.high):
        return Bound(norm=bound.norm)
    return Bound(bound.low, bound.high, INF if math.isnan(bound.norm) else bound.norm)


def computed_by(value: Value) -> Node | None:
    """The node that computed a value's elements, not the ones that only moved them."""
    node = value.node
    while node is not None and node.op in ("reshape", "expand"):
        node = node.value(0).node
    return node
