"""Patterns over the graph, as data: what a subgraph must look like, and why one does not.

    x = var("x")
    square = either(op("pow", x, 2), op("mul", x, x))
    found = match(op("mean", square, axis=LAST, keepdim=True), value)

Operands of commutative ops match in either order, one variable must be the same tensor wherever it
stands, and casts that lose nothing are looked through. A failing match gives the deepest reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..compiler.ir import Constant, DType, Node, Operand, Shape, Value, attribute
from ..compiler.ir.rules import shape_of

COMMUTATIVE = frozenset(
    ("add", "mul", "maximum", "minimum", "logical_and", "logical_or", "eq", "ne")
)
LAST = "last axis"
_WIDTH = {DType.F16: 1, DType.BF16: 1, DType.F32: 2, DType.F64: 3}

Bound = dict[str, Operand]


@dataclass
class Trail:
    """The deepest failure of a match so far: where a reader would look first."""

    depth: int = -1
    reason: str = "nothing to match"

    def fail(self, depth: int, reason: str) -> None:
        """Keeps the reason if it lies deeper than the one kept."""
        if depth > self.depth:
            self.depth, self.reason = depth, reason


@dataclass(frozen=True)
class Match:
    """A successful match: operands by variable name."""

    bound: Bound

    def value(self, name: str) -> Value:
        """The value bound to a variable; TypeError if it is no value."""
        operand = self.bound[name]
        if not isinstance(operand, Value):
            raise TypeError(f"{name} is bound to {operand!r}")
        return operand

    def shape(self, name: str) -> Shape:
        """The shape of what is bound to a variable."""
        return shape_of(self.bound[name])

    def number(self, name: str, default: float = 0.0) -> float:
        """The number bound to a variable, or the default if the pattern left it out."""
        operand = self.bound.get(name, default)
        number = number_of(operand)
        assert number is not None
        return number


@dataclass(frozen=True)
class Miss:
    """A failed match: how deep it got (0 = not even the root) and why it failed there."""

    depth: int
    reason: str


class Pattern:
    """What an operand must look like."""

    def search(self, operand: Operand, bound: Bound, trail: Trail, depth: int) -> Iterator[Bound]:
        """Every way to match, as bindings that extend `bound`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Variable(Pattern):
    """Any operand, or only a number or a constant; the same name is the same operand."""

    name: str
    kind: str = "any"

    def search(self, operand: Operand, bound: Bound, trail: Trail, depth: int) -> Iterator[Bound]:
        """Binds the name, or compares with what it is bound to."""
        if self.name in bound:
            if same(bound[self.name], operand):
                yield bound
            else:
                trail.fail(depth, f"{show(operand)} is not {show(bound[self.name])}")
        elif self.kind == "number" and number_of(operand) is None:
            trail.fail(depth, f"{show(operand)} is not a number")
        elif self.kind == "constant" and not isinstance(operand, Constant):
            trail.fail(depth, f"{show(operand)} is not a constant")
        else:
            yield {**bound, self.name: operand}


@dataclass(frozen=True)
class Number(Pattern):
    """One number, within a relative tolerance (constants may have been rounded to fp32)."""

    value: float
    tolerance: float = 1e-6

    def search(self, operand: Operand, bound: Bound, trail: Trail, depth: int) -> Iterator[Bound]:
        """Matches a literal or one-element constant of that value."""
        found = number_of(operand)
        if found is not None and abs(found - self.value) <= self.tolerance * abs(self.value):
            yield bound
        else:
            trail.fail(depth, f"{show(operand)} is not {self.value:g}")


@dataclass(frozen=True)
class Apply(Pattern):
    """A node of one op with matching operands and attributes."""

    op: str
    operands: tuple[Pattern, ...]
    attrs: tuple[tuple[str, object], ...] = ()

    def search(self, operand: Operand, bound: Bound, trail: Trail, depth: int) -> Iterator[Bound]:
        """Matches the node behind the operand, operands in either order where that is allowed."""
        node = producer(operand)
        if node is None or node.op != self.op or len(node.operands) != len(self.operands):
            found = node.op if node else "no node"
            trail.fail(depth, f"expected {self.op}, found {found} at {show(operand)}")
            return
        wrong = [name for name, want in self.attrs if not _attr_fits(node, name, want)]
        if wrong:
            trail.fail(depth, f"{node.op} at {show(operand)} has another {wrong[0]}")
            return
        for order in orders(node):
            yield from self._operands(order, 0, bound, trail, depth + 1)

    def _operands(
        self, order: list[Operand], index: int, bound: Bound, trail: Trail, depth: int
    ) -> Iterator[Bound]:
        if index == len(order):
            yield bound
            return
        for step in self.operands[index].search(order[index], bound, trail, depth):
            yield from self._operands(order, index + 1, step, trail, depth)


@dataclass(frozen=True)
class Choice(Pattern):
    """The first of several patterns that matches."""

    patterns: tuple[Pattern, ...]

    def search(self, operand: Operand, bound: Bound, trail: Trail, depth: int) -> Iterator[Bound]:
        """Tries each in turn."""
        for pattern in self.patterns:
            yield from pattern.search(operand, bound, trail, depth)


def var(name: str) -> Pattern:
    """Any operand."""
    return Variable(name)


def number(name: str) -> Pattern:
    """A literal or one-element constant of any value."""
    return Variable(name, "number")


def constant(name: str) -> Pattern:
    """A constant tensor."""
    return Variable(name, "constant")


def op(name: str, *operands: Pattern | float, **attrs: object) -> Pattern:
    """A node; numbers among the operands stand for themselves; ``axis=LAST`` is either spelling."""
    patterns = tuple(o if isinstance(o, Pattern) else Number(float(o)) for o in operands)
    return Apply(name, patterns, tuple(attrs.items()))


def either(*patterns: Pattern) -> Pattern:
    """Any of several patterns."""
    return Choice(patterns)


def match(pattern: Pattern, operand: Operand) -> Match | Miss:
    """The first match at an operand, or the deepest reason why there is none."""
    trail = Trail()
    for bound in pattern.search(operand, {}, trail, 0):
        return Match(bound)
    return Miss(trail.depth, trail.reason)


def matches(pattern: Pattern, operand: Operand) -> Iterator[Match]:
    """Every match at an operand: commutative operands can leave several readings."""
    return map(Match, pattern.search(operand, {}, Trail(), 0))


def orders(node: Node) -> list[list[Operand]]:
    """The node's operands, and also swapped if its op is commutative."""
    swap = node.op in COMMUTATIVE and len(node.operands) == 2
    return [node.operands, node.operands[::-1]] if swap else [node.operands]


def producer(operand: Operand) -> Node | None:
    """The node that computes an operand, behind casts that lose nothing."""
    node = operand.node if isinstance(operand, Value) else None
    while node is not None and node.op == "cast" and _lossless(node):
        inner = node.operands[0]
        node = inner.node if isinstance(inner, Value) else None
    return node


def number_of(operand: Operand) -> float | None:
    """The number an operand is: a literal or a one-element constant kept in the graph."""
    if isinstance(operand, bool | int | float):
        return float(operand)
    if isinstance(operand, Constant) and operand.data is not None and operand.data.size == 1:
        return float(operand.data.reshape(-1)[0])
    return None


def same(left: Operand, right: Operand) -> bool:
    """Whether two operands are one tensor (behind lossless casts) or equal numbers."""
    if isinstance(left, bool | int | float) or isinstance(right, bool | int | float):
        return type(left) is type(right) and left == right
    return _behind_casts(left) is _behind_casts(right)


def show(operand: Operand) -> str:
    """An operand for a reader."""
    if isinstance(operand, Value):
        return f"%{operand.name}"
    return f"@{operand.name}" if isinstance(operand, Constant) else str(operand)


def is_last_axis(node: Node) -> bool:
    """Whether the node's axis attribute is its first operand's last axis."""
    return int(attribute(node, "axis")) in (-1, len(shape_of(node.operands[0])) - 1)


def _attr_fits(node: Node, name: str, want: object) -> bool:
    return is_last_axis(node) if want is LAST else attribute(node, name) == want


def _lossless(cast: Node) -> bool:
    before, after = cast.tensor(0).dtype, cast.result.dtype
    if before not in _WIDTH or after not in _WIDTH:
        return before is after
    return before is after or _WIDTH[before] < _WIDTH[after]


def _behind_casts(operand: Value | Constant) -> Value | Constant:
    while isinstance(operand, Value) and operand.node is not None and operand.node.op == "cast":
        if not _lossless(operand.node):
            break
        operand = operand.node.tensor(0)
    return operand
