"""Make the step ragged: [batch, sequence] becomes flat tokens, attention works on paged states.

before:
    graph step fused {
      input %x : f32[B, S, 16]
      const @w : f32[16, 16] = parameter "q"
      state k : f32[B, 2, P, 8] axis=2 kind=kv
      state v : f32[B, 2, P, 8] axis=2 kind=kv
      %q = linear(%x, @w) : f32[B, S, 16]
      %r = reshape(%q, shape=[B, S, 2, 8]) : f32[B, S, 2, 8]
      %t = transpose(%r, perm=[0, 2, 1, 3]) : f32[B, 2, S, 8]
      %ka = kv_append(%t, state="k", axis=2, past=P) : f32[B, 2, P+S, 8]
      %va = kv_append(%t, state="v", axis=2, past=P) : f32[B, 2, P+S, 8]
      %o = attention(%t, %ka, %va, scale=0.5) : f32[B, 2, S, 8]
      output %o
    }
after:
    graph step fused {
      input %x : f32[T, 16]
      input %slots : i32[T]
      input %seq_starts : i32[B1]
      input %kv_lens : i32[B]
      input %block_tables : i32[B, M]
      const @w : f32[16, 16] = parameter "q"
      state k : f32[N, 2, 8] axis=0 kind=kv
      state v : f32[N, 2, 8] axis=0 kind=kv
      %q = linear(%x, @w) : f32[T, 16]
      %r = reshape(%q, shape=[T, 2, 8]) : f32[T, 2, 8]
      %o = paged_attention(%r, %r, %r, %slots, %seq_starts, %kv_lens, %block_tables, key="k", value="v", scale=0.5) : f32[T, 2, 8]
      output %o
    }

Every value that depends on B and S gets a flat form: T first, then its other axes in their order.
An op may stay if it treats tokens independently (token-wise); the rules below are the proof, op by
op. One op outside attention that mixes tokens, or reads P, refuses the whole rewrite by name.

Between a cache and its attention, token-wise ops may work on all P+S rows (MLA expands its latent
rows to heads at every step). Such an op gives for each row what it gave when the row was new, so
the expanded rows can be cached instead: it works on new tokens only, and the states hold its result.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import (
    Attr,
    Builder,
    Constant,
    Dim,
    DType,
    Graph,
    Kind,
    Level,
    Node,
    Operand,
    Shape,
    SymDim,
    TensorType,
    Value,
    attribute,
    op_of,
    print_node,
    symbol,
)
from .base import NearMiss, Pass, PassReport

LOGIT_ATTRS = ("scale", "window", "chunk", "softcap", "slopes")
BATCH, STEP, PAST, TOKENS = (symbol(s) for s in ("B", "S", "P", "T"))
STEP_INPUTS = {
    "slots": TensorType(DType.I32, (TOKENS,)),
    "seq_starts": TensorType(DType.I32, (symbol("B1"),)),
    "kv_lens": TensorType(DType.I32, (BATCH,)),
    "block_tables": TensorType(DType.I32, (BATCH, symbol("M"))),
}


class NotTokenWise(Exception):
    """The op mixes tokens or cannot be shown not to; the message is the reason."""


@dataclass(frozen=True)
class FlattenTokens(Pass):
    """All or nothing: fires once, or says which node blocks it and why."""

    name: ClassVar[str] = "flatten-tokens"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)

    def run(self, graph: Graph) -> PassReport:
        """Replaces the whole graph by its flat form."""
        report = PassReport(self.name)
        flattening = _Flattening(graph)
        for node in graph.nodes:
            try:
                flattening.take(node)
            except NotTokenWise as reason:
                report.missed.append(
                    NearMiss(node.scope or node.op, f"{print_node(node)}: {reason}")
                )
                return report
        flattening.commit()
        report.fired.append(graph.name)
        return report


def token_axes(shape: Shape) -> tuple[int, ...] | None:
    """Axes that carry tokens: (batch, step), or one merged axis; None if there are none.

    Raises NotTokenWise for any other use of B, S or P.
    """
    symbolic = [i for i, d in enumerate(shape) if isinstance(d, SymDim)]
    if not symbolic:
        return None
    dims = [shape[i] for i in symbolic]
    if dims == [BATCH, STEP] or dims == [BATCH * STEP]:
        if any(d != 1 for d in shape[: symbolic[0]]):
            raise NotTokenWise(f"[{', '.join(map(str, shape))}] has an axis in front of the batch")
        return tuple(symbolic)
    raise NotTokenWise(f"a value of shape [{', '.join(map(str, shape))}] is not one row a token")


def flat_shape(shape: Shape) -> Shape:
    """T first, then the other axes in order; a token-free shape stays."""
    axes = token_axes(shape)
    return shape if axes is None else (TOKENS, *_rest(shape, axes))


def _rest(shape: Shape, axes: tuple[int, ...]) -> Shape:
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def _product(shape: Shape) -> Dim:
    total: Dim = 1
    for dim in shape:
        total = total * dim
    return total


class _Flattening:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.flat = Graph(graph.name, graph.level, constants=dict(graph.constants))
        self.builder = Builder(self.flat)
        self.values: dict[int, Operand] = {}
        self.rules: dict[str, Callable[[Node], None]] = {
            "reshape": self._reshape,
            "transpose": self._transpose,
            "expand": self._shaped,
            "full": self._shaped,
            "embedding": self._keep,
            "attention": self._attention,
            "moe": self._moe,
            "kv_append": self._append,
            "index_select": self._index_select,
            "matmul": self._matmul,
            "concat": self._along_axis,
            "slice": self._along_axis,
        }
        for name in (
            "sum",
            "mean",
            "amax",
            "argmax",
            "cumsum",
            "softmax",
            "topk",
            "gather",
            "scatter",
        ):
            self.rules[name] = self._along_axis
        self.attended: dict[str, TensorType] = {}
        self.appended: dict[int, _Rows] = {}
        self.expanded: set[str] = set()
        self.refused: dict[int, NotTokenWise] = {}
        for value in graph.inputs:
            self._input(value)
        self.step = [self.builder.input(name, kind) for name, kind in STEP_INPUTS.items()]

    def _input(self, value: Value) -> None:
        dtype = DType.I32 if value.dtype is DType.I64 else value.dtype
        kind = TensorType(dtype, flat_shape(value.shape))
        self.values[id(value)] = self.builder.input(value.name, kind)

    def take(self, node: Node) -> None:
        """Adds the node's flat form. Raises NotTokenWise."""
        if node.op != "attention" and any(id(o) in self.appended for o in node.operands):
            return self._on_rows(node)
        rule = self.rules.get(node.op)
        if rule is None:
            kind = op_of(node).kind
            if kind not in (Kind.ELEMENTWISE, Kind.LAST_AXIS):
                raise NotTokenWise(f"no rule shows that {node.op} keeps tokens apart")
            rule = self._broadcast
        try:
            rule(node)
        except NotTokenWise as reason:
            if node.op != "expand":
                raise
            self.refused[id(node.result)] = reason  # its reader may broadcast without it

    def commit(self) -> None:
        """Puts the flat graph in the place of the old one."""
        outputs = [self.operand(v) for v in self.graph.outputs]
        self.graph.outputs = [v for v in outputs if isinstance(v, Value)]
        self.graph.inputs, self.graph.nodes = self.flat.inputs, self.flat.nodes
        self.graph.constants = self.flat.constants
        for state in self.graph.states.values():
            if state.name in self.attended:
                rows = self.attended[state.name]
                state.type = state.type.with_shape((symbol("N"), *rows.shape[1:]))
                state.axis = 0
        for name in self.expanded - set(self.attended):
            del self.graph.states[name]

    def operand(self, operand: Operand) -> Operand:
        """The flat form of an operand as it is."""
        if not isinstance(operand, Value):
            return operand
        if id(operand) in self.refused:
            raise self.refused[id(operand)]
        if id(operand) not in self.values:
            raise NotTokenWise(f"it reads the whole cache %{operand.name} outside attention")
        return self.values[id(operand)]

    def _emit(self, node: Node, operands: list[Operand], attrs: dict[str, Attr]) -> None:
        made = self.builder.node(node.op, operands, node.scope, name=node.results[0].name, **attrs)
        self.flat.nodes.append(made)
        for old, new in zip(node.results, made.results, strict=True):
            if new.shape != flat_shape(old.shape):
                raise NotTokenWise(f"its flat form would be {new.type}")
            self.values[id(old)] = new

    def _keep(self, node: Node) -> None:
        self._emit(node, [self.operand(o) for o in node.operands], dict(node.attrs))

    def _broadcast(self, node: Node) -> None:
        """Operands align from the right; the token axes must stand at the same places."""
        result = node.results[0].shape
        axes = token_axes(result)
        if axes is not None and op_of(node).kind is Kind.LAST_AXIS and axes[-1] == len(result) - 1:
            raise NotTokenWise(f"{node.op} works along the token axis")
        operands = [self._aligned(node, o, axes, len(result)) for o in node.operands]
        self._emit(node, operands, dict(node.attrs))

    def _aligned(
        self, node: Node, operand: Operand, axes: tuple[int, ...] | None, rank: int
    ) -> Operand:
        if op_of(node).kind is Kind.LAST_AXIS and isinstance(operand, Constant):
            return operand
        if isinstance(operand, Value) and id(operand) in self.refused:
            operand = _unexpanded(operand)
        flat = self.operand(operand)
        if axes is None or not isinstance(operand, Value | Constant):
            return flat
        own = token_axes(operand.shape)
        shift = rank - len(operand.shape)
        if own is not None:
            if tuple(a + shift for a in own) != axes:
                raise NotTokenWise("operands carry their tokens on different axes")
            return flat
        places = tuple(a - shift for a in axes if a >= shift)
        if any(operand.shape[p] != 1 for p in places):
            raise NotTokenWise(f"{operand.type} differs from token to token without being one")
        return self._reshaped(flat, _rest(operand.shape, places), node.scope) if places else flat

    def _reshaped(self, operand: Operand, shape: Shape, scope: str, name: str = "") -> Operand:
        assert isinstance(operand, Value | Constant)
        if operand.shape == shape:
            return operand
        return self.builder.emit("reshape", [operand], scope, name=name, shape=shape)

    def _reshape(self, node: Node) -> None:
        before, after = node.tensor(0).shape, node.result.shape
        old, new = token_axes(before), token_axes(after)
        if (old is None) != (new is None):
            raise NotTokenWise("it merges tokens with other axes")
        moved = old and new and _product(before[old[-1] + 1 :]) != _product(after[new[-1] + 1 :])
        if moved:
            raise NotTokenWise("it moves elements between tokens")
        shape = flat_shape(after)
        flat = self._reshaped(self.operand(node.operands[0]), shape, node.scope, node.result.name)
        self.values[id(node.result)] = flat

    def _transpose(self, node: Node) -> None:
        x, perm = node.tensor(0), attribute(node, "perm")
        axes = token_axes(x.shape)
        if axes is None:
            return self._keep(node)
        token_axes(node.result.shape)
        rest = [i for i in range(x.type.rank) if i not in axes]
        order = tuple(1 + rest.index(p) for p in perm if p not in axes)
        flat = self.operand(node.operands[0])
        if order == tuple(range(1, len(rest) + 1)):
            self.values[id(node.result)] = flat
            return None
        return self._emit(node, [flat], {"perm": (0, *order)})

    def _shaped(self, node: Node) -> None:
        """expand and full: the shape attribute becomes flat."""
        attrs = dict(node.attrs)
        attrs["shape"] = flat_shape(attribute(node, "shape"))
        axes, rank = token_axes(attribute(node, "shape")), len(attribute(node, "shape"))
        operands = [self._aligned(node, o, axes, rank) for o in node.operands]
        self._emit(node, operands, attrs)

    def _along_axis(self, node: Node) -> None:
        """Ops with an axis attribute: the axis must not be a token axis."""
        x = node.tensor(0)
        axes = token_axes(x.shape)
        if axes is None:
            return self._keep(node)
        axis = int(attribute(node, "axis")) % x.type.rank
        if axis in axes:
            raise NotTokenWise(f"{node.op} works along the token axis")
        tensors = [o for o in node.operands if isinstance(o, Value | Constant)]
        if any(token_axes(o.shape) != axes for o in tensors):
            raise NotTokenWise("operands carry their tokens on different axes")
        attrs = dict(node.attrs)
        attrs["axis"] = 1 + [i for i in range(x.type.rank) if i not in axes].index(axis)
        return self._emit(node, [self.operand(o) for o in node.operands], attrs)

    def _matmul(self, node: Node) -> None:
        """A matrix of constants on the right, or an outer product, which is a multiplication."""
        a, b = node.tensor(0), node.tensor(1)
        if a.shape[-1] != 1:
            left = token_axes(a.shape)
            if isinstance(b, Constant) and b.type.rank == 2 and left and left[-1] < a.type.rank - 1:
                return self._keep(node)
            raise NotTokenWise("a matrix product over tokens outside attention")
        axes, rank = token_axes(node.result.shape), node.result.type.rank
        operands = [self._aligned(node, o, axes, rank) for o in node.operands]
        product = Node("mul", operands, {}, node.results, node.scope)
        return self._emit(product, operands, {})

    def _attention(self, node: Node) -> None:
        if not attribute(node, "causal"):
            raise NotTokenWise("paged attention is causal")
        q = self.operand(node.operands[0])
        keys, values = (self._appended(node.value(i)) for i in (1, 2))
        k, v = (self.operand(rows.new) for rows in (keys, values))
        key, value = _pair(keys, values)
        read = {*keys.states, *values.states}
        for name in sorted(read):
            if name in self.attended or name in self.expanded:
                raise NotTokenWise(f"another attention reads state {name} too")
        for name, flat in ((key, k), (value, v)):
            assert isinstance(flat, Value)
            self.attended[name] = flat.type
        if keys.computed or values.computed:
            self.expanded |= read
        kept: dict[str, Attr] = {"key": key, "value": value}
        kept |= {n: node.attrs[n] for n in LOGIT_ATTRS if n in node.attrs}
        sinks = [self.operand(o) for o in node.operands[3:]]
        paged = Node("paged_attention", [], {}, node.results, node.scope)
        self._emit(paged, [q, k, v, *self.step, *sinks], kept)

    def _moe(self, node: Node) -> None:
        """x, weights and ids carry the tokens; experts are the same for all of them."""
        if any(isinstance(o, Value) and token_axes(o.shape) for o in node.operands[3:]):
            raise NotTokenWise("its experts depend on the tokens")
        self._keep(node)

    def _appended(self, value: Value) -> _Rows:
        if id(value) not in self.appended:
            raise NotTokenWise(f"%{value.name} is not a state written in place (see alias-kv)")
        return self.appended[id(value)]

    def _append(self, node: Node) -> None:
        """kv_append is not kept: attention writes the rows."""
        state = str(attribute(node, "state"))
        self.appended[id(node.result)] = _Rows(node.value(0), (state,), False)

    def _on_rows(self, node: Node) -> None:
        """An op on all cached rows, as the same op on the new ones."""
        operands: list[Operand] = []
        states: dict[str, None] = {}
        for operand in node.operands:
            rows = self.appended.get(id(operand))
            if rows is None and isinstance(operand, Value) and token_axes(operand.shape):
                raise NotTokenWise("it joins cached rows with new tokens outside attention")
            operands.append(operand if rows is None else rows.new)
            states.update(dict.fromkeys(rows.states if rows else ()))
        attrs = {name: _new_rows(attr) for name, attr in node.attrs.items()}
        kinds = [v.type.with_shape(tuple(map(_new_row, v.shape))) for v in node.results]
        made = Node(node.op, operands, attrs, [], node.scope)
        made.results = [
            Value(v.name, kind, made) for v, kind in zip(node.results, kinds, strict=True)
        ]
        self.take(made)
        for old, new in zip(node.results, made.results, strict=True):
            self.appended[id(old)] = _Rows(new, tuple(states), True)

    def _index_select(self, node: Node) -> None:
        """Rows of a constant table, one for each token; or rows that no token decides."""
        if isinstance(node.operands[0], Constant) and attribute(node, "axis") == 0:
            return self._keep(node)
        if any(token_axes(node.tensor(i).shape) for i in range(2)):
            raise NotTokenWise("it picks from values that belong to tokens")
        return self._keep(node)


@dataclass(frozen=True)
class _Rows:
    """A value over all cached rows.

    Args:
        new: the same for new tokens, in a functional graph.
        states: the caches it is computed from.
        computed: whether it is more than the cache itself.
    """

    new: Value
    states: tuple[str, ...]
    computed: bool


def _pair(keys: _Rows, values: _Rows) -> tuple[str, str]:
    """The states that take the rows of keys and of values."""
    value = values.states[0]
    key = next((name for name in keys.states if name != value), None)
    if key is None:
        raise NotTokenWise(f"keys and values are both computed from the state {value}")
    return key, value


def _new_row(dim: Dim) -> Dim:
    """The number of new tokens in place of that of all cached rows."""
    if dim == PAST + STEP:
        return STEP
    return BATCH * STEP if dim == BATCH * (PAST + STEP) else dim


def _new_rows(attr: Attr) -> Attr:
    if isinstance(attr, tuple):
        return tuple(_new_row(a) if isinstance(a, SymDim) else a for a in attr)
    return _new_row(attr) if isinstance(attr, SymDim) else attr


def _unexpanded(operand: Operand) -> Operand:
    """Broadcasting makes an expand in front of a broadcasting op superfluous."""
    while isinstance(operand, Value) and operand.node is not None and operand.node.op == "expand":
        operand = operand.node.operands[0]
    return operand
