"""The rules of clean-up, and the forward walk that applies them.

A rule looks at one node whose operands are already simple. It answers with an operand that has the
same value, with another node that owns the old node's values, or with None.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import numpy as np
import torch

from ..compiler.ir import (
    OPS,
    Attr,
    Builder,
    Constant,
    Graph,
    Node,
    Operand,
    Shape,
    SymDim,
    Tensor,
    Users,
    Value,
    attribute,
    has_effect,
    infer,
)
from ..compiler.ir.ops import Kind
from ..compiler.ir.primitives import TORCH_DTYPE
from ..compiler.ir.rules import axis_of, shape_of
from .match import number_of
from .rewrite import become, create

Rule = Callable[["Walk", Node], "Tensor | Node | None"]

# Ops that work on the last axis of the first operand; their other operands should be weights.
LAST_AXIS_OF_FIRST = frozenset(("linear", "rms_norm", "layer_norm", "gated_mlp"))
_NEUTRAL: dict[str, tuple[float, bool]] = {  # the number that does nothing; also as first operand
    "mul": (1.0, True), "div": (1.0, False), "pow": (1.0, False),
    "add": (0.0, True), "sub": (0.0, False), "logical_and": (1.0, True),
    "logical_or": (0.0, True),
}  # fmt: skip
_SHARED_BYTES = 1 << 16


class Walk:
    """One forward walk over a graph; `run` rebuilds its node list."""

    def __init__(self, graph: Graph, fold_elements: int, sink: bool) -> None:
        self.graph = graph
        self.builder = Builder(graph)
        self.fold_elements = fold_elements
        self.fired: list[tuple[str, str]] = []
        users = Users(graph)
        self._roots = set(map(id, graph.roots()))
        self._uses = {id(v): len(users.of(v)) for v in graph.values()}
        self._same: dict[Value, Tensor] = {}
        self._seen: dict[Hashable, Node] = {}
        self._kept: list[Node] = []
        self._rules = RULES + (SINKING if sink else ())

    def run(self) -> None:
        """Applies the rules to every node in order."""
        self._share_constants()
        for node in self.graph.nodes:
            self.visit(node)
        self.graph.nodes = self._kept
        self.graph.outputs = [self._final(v) for v in self.graph.outputs]
        for state in self.graph.states.values():
            state.output = self._final(state.output) if state.output is not None else None

    def visit(self, node: Node) -> None:
        """Simplifies one node and keeps what is left of it."""
        node.operands = [self.current(o) for o in node.operands]
        changed = len(node.results) == 1
        while changed:
            changed = False
            for name, rule in self._rules:
                result = rule(self, node)
                if result is None or (isinstance(result, Constant) and self.is_root(node.result)):
                    continue
                self.fired.append((name, node.scope))
                if not isinstance(result, Node):
                    self._forward(node.result, result)
                    return
                node, changed = result, True
                break
        if not self._shared(node):
            self._kept.append(node)

    def make(
        self, op: str, operands: list[Operand], scope: str, attrs: Mapping[str, Attr]
    ) -> Operand:
        """A new node in front of the current one; what its value is after simplification."""
        node = create(self.builder, op, operands, attrs, scope)
        self._uses[id(node.result)] = 1
        self.visit(node)
        return self.current(node.result)

    def current(self, operand: Operand) -> Operand:
        """What an operand has become."""
        while isinstance(operand, Value) and operand in self._same:
            operand = self._same[operand]
        return operand

    def is_root(self, value: Value) -> bool:
        """Whether the value leaves the graph."""
        return id(value) in self._roots

    def private(self, operand: Operand) -> bool:
        """Whether a value has one user and does not leave the graph."""
        return (
            isinstance(operand, Value)
            and self._uses.get(id(operand), 0) <= 1
            and not self.is_root(operand)
        )

    def _final(self, value: Value) -> Value:
        final = self.current(value)
        assert isinstance(final, Value)
        return final

    def _forward(self, old: Value, new: Tensor) -> None:
        self._same[old] = new
        if isinstance(new, Value):
            self._uses[id(new)] = self._uses.get(id(new), 0) + self._uses.get(id(old), 0) - 1
            if self.is_root(old):
                self._roots.add(id(new))

    def _shared(self, node: Node) -> bool:
        """Whether an equal node is there already; common subexpressions become one."""
        if has_effect(node) or len(node.results) != 1:
            return False
        key = (
            node.op,
            tuple(map(_operand_key, node.operands)),
            tuple(sorted((k, repr(v)) for k, v in node.attrs.items())),
        )
        first = self._seen.setdefault(key, node)
        if first is node:
            return False
        self._forward(node.result, first.result)
        self._uses[id(first.result)] += 1
        self.fired.append(("share", node.scope))
        return True

    def _share_constants(self) -> None:
        """Small constants with equal bytes become one."""
        first: dict[Hashable, Constant] = {}
        other: dict[int, Constant] = {}
        for const in self.graph.constants.values():
            if const.data is not None and const.data.nbytes <= _SHARED_BYTES:
                key = (const.dtype, const.shape, const.data.tobytes())
                other[id(const)] = first.setdefault(key, const)
        for node in self.graph.nodes:
            node.operands = [other.get(id(o), o) for o in node.operands]


def _operand_key(operand: Operand) -> Hashable:
    if isinstance(operand, Value | Constant):
        return id(operand)
    return type(operand).__name__, repr(operand)


def neutral(walk: Walk, node: Node) -> Tensor | None:
    """x * 1, x + 0, x ** 1, a cast to the same type, a full slice, a reshape to the same shape."""
    if not node.operands:
        return None
    x = node.operands[0]
    if node.op in _NEUTRAL:
        number, either_side = _NEUTRAL[node.op]
        if number_of(node.operands[1]) != number:
            if not either_side or number_of(x) != number:
                return None
            x = node.operands[1]
    elif node.op == "slice":
        if attribute(node, "start") != 0 or attribute(node, "step") != 1:
            return None
    elif node.op == "transpose":
        perm = attribute(node, "perm")
        if perm != tuple(range(len(perm))):
            return None
    elif node.op not in ("cast", "reshape", "expand") and not _single_concat(node):
        return None
    same = isinstance(x, Value | Constant) and x.type == node.result.type
    return x if same and isinstance(x, Value | Constant) else None


def _single_concat(node: Node) -> bool:
    return node.op == "concat" and len(node.operands) == 1


def drop_empty(walk: Walk, node: Node) -> Node | None:
    """concat without operands that have no elements along the axis."""
    if node.op != "concat":
        return None
    axis = axis_of(node, len(shape_of(node.operands[0])))
    full = [o for o in node.operands if shape_of(o)[axis] != 0]
    if len(full) == len(node.operands) or not full:
        return None
    return become(node, "concat", full, node.attrs)


def compose(walk: Walk, node: Node) -> Node | None:
    """Two reshapes, transposes, expands or step-1 slices of one axis become one."""
    inner = _producer(node.operands[0]) if node.operands else None
    if inner is None or inner.op != node.op:
        return None
    x = inner.operands[0]
    if node.op in ("reshape", "expand"):
        return become(node, node.op, [x], node.attrs)
    if node.op == "transpose":
        first, second = attribute(inner, "perm"), attribute(node, "perm")
        return become(node, "transpose", [x], {"perm": tuple(first[p] for p in second)})
    if node.op == "cast":
        return _compose_casts(node, inner)
    return _compose_slices(node, inner) if node.op == "slice" else None


def _compose_casts(node: Node, inner: Node) -> Node | None:
    """A float cast behind a widening one starts from the narrow value."""
    before, middle = inner.tensor(0).dtype, inner.result.dtype
    widens = before.is_float and middle.is_float and before.bytes < middle.bytes
    return become(node, "cast", [inner.operands[0]], node.attrs) if widens else None


def _compose_slices(node: Node, inner: Node) -> Node | None:
    rank = node.result.type.rank
    axis = axis_of(node, rank)
    if axis_of(inner, rank) != axis or attribute(inner, "step") != 1:
        return None
    offset = attribute(inner, "start")
    moved = {n: attribute(node, n) + offset for n in ("start", "end")}
    return become(node, "slice", [inner.operands[0]], {**node.attrs, **moved})


def pick_part(walk: Walk, node: Node) -> Node | Tensor | None:
    """A slice inside one operand of a concat reads that operand."""
    inner = _producer(node.operands[0]) if node.op == "slice" else None
    if inner is None or inner.op != "concat":
        return None
    axis, begin = axis_of(node, node.result.type.rank), 0
    start, end = attribute(node, "start"), attribute(node, "end")
    if axis_of(inner, node.result.type.rank) != axis or not isinstance(start, int):
        return None
    if not isinstance(end, int):
        return None
    for part in inner.operands:
        width = shape_of(part)[axis]
        if not isinstance(width, int):
            return None
        if begin <= start and end <= begin + width:
            moved = {"start": start - begin, "end": end - begin}
            return become(node, "slice", [part], {**node.attrs, **moved})
        begin += width
    return None


def to_linear(walk: Walk, node: Node) -> Node | None:
    """x @ w^T is linear(x, w)."""
    weight = _producer(node.operands[1]) if node.op == "matmul" else None
    if weight is None or weight.op != "transpose" or attribute(weight, "perm") != (1, 0):
        return None
    x, w = node.operands[0], weight.operands[0]
    return become(node, "linear", [x, w], {}) if isinstance(w, Constant) else None


def spread_full(walk: Walk, node: Node) -> Node | None:
    """A reshaped, expanded, sliced or transposed `full` is a `full` of the new shape."""
    inner = _producer(node.operands[0]) if node.operands else None
    if inner is None or inner.op != "full" or node.op not in _MOVES:
        return None
    return become(node, "full", [], {**inner.attrs, "shape": node.result.shape})


_MOVES = ("reshape", "expand", "slice", "transpose")


def to_literal(walk: Walk, node: Node) -> Node | None:
    """A one-element constant or `full` beside a larger operand becomes a literal."""
    if node.op not in OPS or OPS[node.op].kind is not Kind.ELEMENTWISE:
        return None
    for index, operand in enumerate(node.operands):
        literal = _literal(operand)
        if literal is None or (index == 0 and len(node.operands) == 1):
            continue
        trial = Node(node.op, list(node.operands), node.attrs, node.results, node.scope)
        trial.operands[index] = literal
        tensors = any(isinstance(o, Value | Constant) for o in trial.operands)
        if tensors and infer(trial) == [node.result.type]:
            return become(node, node.op, trial.operands, node.attrs)
    return None


def _literal(operand: Operand) -> bool | int | float | None:
    if isinstance(operand, Constant) and operand.data is not None and operand.data.size == 1:
        item = operand.data.reshape(-1)[0].item()
        return item if isinstance(item, bool | int | float) else None
    inner = _producer(operand)
    if inner is None or inner.op != "full":
        return None
    value = attribute(inner, "value")
    kind = bool if inner.result.dtype.value == "bool" else None
    if isinstance(value, SymDim):
        return None
    if kind is bool:
        return bool(value)
    return float(value) if inner.result.dtype.is_float else int(value)


def fold(walk: Walk, node: Node) -> Constant | None:
    """A small result of constants alone is computed now, by the op's reference function."""
    known = [_known(o) for o in node.operands]
    if any(k is None for k in known) or has_effect(node) or node.op == "full":
        return None
    size = 1
    for dim in node.result.shape:
        if isinstance(dim, SymDim):
            return None
        size *= dim
    attrs = {name: attribute(node, name) for name in OPS[node.op].attrs}
    if size > walk.fold_elements or any(_symbolic(a) for a in attrs.values()):
        return None
    result = OPS[node.op].reference(*known, **attrs).to(TORCH_DTYPE[node.result.dtype])
    if result.dtype == torch.bfloat16:
        return None
    return walk.builder.data(node.result.name, np.array(result.numpy()))


def _known(operand: Operand) -> torch.Tensor | float | None:
    if isinstance(operand, Constant):
        known = operand.data is not None
        return torch.from_numpy(np.array(operand.data)) if known else None
    return None if isinstance(operand, Value) else operand


def _symbolic(attr: object) -> bool:
    return isinstance(attr, SymDim) or (isinstance(attr, tuple) and any(map(_symbolic, attr)))


def sink_transpose(walk: Walk, node: Node) -> Node | None:
    """op(transpose(x)) is transpose(op(x)) where the op does not care; then pairs can cancel."""
    perm = _sinkable(walk, node)
    if perm is None:
        return None
    if _on_last_axis(node):
        operands = [_unwrapped(node.operands[0]), *node.operands[1:]]
    else:
        moved = [_untransposed(walk, o, perm) for o in node.operands]
        operands = [o for o in moved if o is not None]
    if len(operands) < len(node.operands):
        return None
    inner = walk.make(node.op, operands, node.scope, node.attrs)
    return become(node, "transpose", [inner], {"perm": perm})


def _on_last_axis(node: Node) -> bool:
    """Whether the node treats rows of its first operand alike: the rest are weights, no streams."""
    weights = all(isinstance(o, Constant) or len(shape_of(o)) <= 1 for o in node.operands[1:])
    return node.op in LAST_AXIS_OF_FIRST and weights


def _sinkable(walk: Walk, node: Node) -> tuple[int, ...] | None:
    """The permutation of the first transposed operand, if the op commutes with it."""
    first = _on_last_axis(node)
    if not first and OPS[node.op].kind is not Kind.ELEMENTWISE:
        return None
    for operand in node.operands[: 1 if first else None]:
        inner = _producer(operand)
        if inner is not None and inner.op == "transpose" and walk.private(operand):
            perm: tuple[int, ...] = attribute(inner, "perm")
            keeps_last = perm[-1] == len(perm) - 1
            fits = keeps_last if first else node.result.type.rank == len(perm)
            return perm if fits else None
    return None


def _unwrapped(operand: Operand) -> Operand:
    inner = _producer(operand)
    assert inner is not None
    return inner.operands[0]


def _untransposed(walk: Walk, operand: Operand, perm: tuple[int, ...]) -> Operand | None:
    """The operand as it must be in front of the transpose; None if that would cost a new one."""
    inner = _producer(operand)
    if inner is not None and inner.op == "transpose" and attribute(inner, "perm") == perm:
        return inner.operands[0] if walk.private(operand) else None
    shape = shape_of(operand)
    if not shape:
        return operand
    same_last = perm[-1] == len(perm) - 1 and all(d == 1 for d in shape[:-1])
    return operand if isinstance(operand, Constant) and same_last else None


def split_batch(walk: Walk, node: Node) -> Node | None:
    """Heads merged into the batch for a product (baddbmm) stay apart: the merge sinks below it.

    op(reshape(x)) with reshape [B, H, ...] -> [B*H, ...] is reshape(op(x)).
    """
    merged = [_merged(o) for o in node.operands]
    lead = next((m.shape[:2] for m in merged if m is not None), None)
    if lead is None or any(len(v.shape) != 3 for v in node.results):
        return None
    attrs = dict(node.attrs)
    if node.op == "transpose" and attribute(node, "perm") == (0, 2, 1):
        attrs["perm"] = (0, 1, 3, 2)
    elif node.op != "matmul" and OPS[node.op].kind is not Kind.ELEMENTWISE:
        return None
    if any(not _splits(o, lead) for o in node.operands):
        return None
    operands: list[Operand] = [
        walk.make("reshape", [o], node.scope, {"shape": (*lead, *o.shape[1:])})
        if isinstance(o, Value)
        else o
        for o in node.operands
    ]
    inner = walk.make(node.op, operands, node.scope, attrs)
    return become(node, "reshape", [inner], {"shape": node.result.shape})


def _merged(operand: Operand) -> Value | None:
    """x [B, H, ...] if the operand is its reshape to [B*H, ...], B being symbolic."""
    node = _producer(operand)
    x = node.operands[0] if node is not None and node.op == "reshape" else None
    if node is None or not isinstance(x, Value) or len(x.shape) != len(node.result.shape) + 1:
        return None
    apart = isinstance(x.shape[0], SymDim) and isinstance(x.shape[1], int)
    return x if apart and x.shape[2:] == node.result.shape[1:] else None


def _splits(operand: Operand, lead: Shape) -> bool:
    """Whether an operand is a number or has the merged axis in front."""
    if not isinstance(operand, Value | Constant):
        return True
    shape = operand.shape
    return isinstance(operand, Value) and len(shape) == 3 and shape[0] == lead[0] * lead[1]


def cancel_reshapes(walk: Walk, node: Node) -> Tensor | Node | None:
    """reshape(op(reshape(x))) is op(x) if the ops between do not look at the axes it changed."""
    value = node.operands[0] if node.op == "reshape" else None
    if not isinstance(value, Value):
        return None
    shape = node.result.shape
    lifted = _lift(walk, value, shape, value.shape[-1:] == shape[-1:], True, 4)
    return lifted if isinstance(lifted, Value | Constant) else None


def _lift(
    walk: Walk, value: Operand, shape: Shape, rowwise: bool, pointwise: bool, depth: int
) -> Operand | None:
    """`value` computed with the leading axes of `shape`; None if no reshape lies behind it.

    Args:
        shape: shape of the final reshape.
        rowwise: the reshapes keep the last axis, so ops on the last axis may lie between.
        pointwise: only ops on single elements lie between.
    """
    node = _producer(value)
    if node is None or depth == 0 or not walk.private(value) or not node.operands:
        return None
    x = node.operands[0]
    if node.op == "reshape" and isinstance(x, Value):
        if pointwise and x.shape == shape:
            return x
        rows = (*shape[:-1], node.result.shape[-1])
        return walk.make("reshape", [x], node.scope, {"shape": rows}) if rowwise else None
    pointwise = pointwise and _on_elements(node)
    if not pointwise and not (rowwise and _on_rows(node)):
        return None
    lifted = _lift(walk, x, shape, rowwise, pointwise, depth - 1)
    if lifted is None:
        return None
    return walk.make(node.op, [lifted, *node.operands[1:]], node.scope, node.attrs)


def _on_elements(node: Node) -> bool:
    scalars = all(not isinstance(o, Value | Constant) for o in node.operands[1:])
    return OPS[node.op].kind is Kind.ELEMENTWISE and scalars


def _on_rows(node: Node) -> bool:
    rest = node.operands[1:]
    if _on_last_axis(node):
        return True
    if node.op == "matmul":
        return isinstance(rest[0], Constant) and len(rest[0].shape) == 2
    small = all(len(shape_of(o)) <= 1 and not isinstance(o, Value) for o in rest)
    return OPS[node.op].kind is Kind.ELEMENTWISE and small


def _producer(operand: Operand) -> Node | None:
    return operand.node if isinstance(operand, Value) else None


RULES: tuple[tuple[str, Rule], ...] = (
    ("literal", to_literal),
    ("fold", fold),
    ("neutral", neutral),
    ("drop-empty", drop_empty),
    ("compose", compose),
    ("pick-part", pick_part),
    ("to-linear", to_linear),
    ("spread-full", spread_full),
)
SINKING: tuple[tuple[str, Rule], ...] = (
    ("cancel-reshapes", cancel_reshapes),
    ("sink-transpose", sink_transpose),
    ("split-batch", split_batch),
)
