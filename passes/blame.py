"""From "the outputs differ" to the rewrite that is to blame, and the nodes it needs.

Rewrites keep the values they replace, so most values exist before and after a pass under one name.
Both graphs run with every value recorded; the first value, in the order of the graph after, that
differs from its namesake is the blamed one: everything it is computed from still agrees. Its nodes
back to the nearest agreeing values are the rewrite, before and after. If it reads a state that an
earlier step wrote differently, the writer is to blame. This needs nothing from the pass, so it
works for every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..compiler.ir import (
    Constant,
    DType,
    Graph,
    Interpreter,
    Node,
    PagedState,
    Shape,
    SymDim,
    TensorType,
    Value,
    parse_graph,
    print_graph,
    print_node,
    symbol,
)
from .flatten_tokens import NotTokenWise, token_axes
from .probe import cone, symbols_of
from .scenarios import (
    ROWS,
    TOKENS,
    Parameters,
    Record,
    Scenario,
    States,
    Tensor,
    copied,
    in_token_order,
    run,
)

STATE_ATTRS = ("state", "key", "value")


@dataclass(frozen=True)
class View:
    """How to read a value as [tokens of one sequence, ...], so that interfaces compare.

    Args:
        axes: the token axes of a functional value; None leaves it as it is.
        rows: the sequence's rows of a flat value; None takes all.
        backwards: the rows stand as `logit_rows` asks for them.
    """

    axes: tuple[int, ...] | None = None
    rows: tuple[int, int] | None = None
    backwards: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor seen this way."""
        if self.axes is not None:
            tensor = tensor.movedim(self.axes, tuple(range(len(self.axes))))
            tensor = tensor.reshape(-1, *tensor.shape[len(self.axes) :])
        tensor = in_token_order(tensor) if self.backwards else tensor
        return tensor if self.rows is None else tensor[slice(*self.rows)]


@dataclass
class Piece:
    """A runnable part of a graph with what it reads."""

    graph: Graph
    view: View
    inputs: dict[str, Tensor]
    states: States
    parameters: frozenset[str]


@dataclass(frozen=True)
class Blame:
    """The first wrong value.

    Args:
        value: its name.
        node: the node that is to blame, as text: the one that computes the value after the pass, or
            the one that wrote a state it reads.
        scope: module path of that node.
        reason: what is wrong with it.
        before: what computed it before the pass; None if nothing of that name did.
        after: what computes it now.
    """

    value: str
    node: str
    scope: str
    reason: str
    before: Piece | None = field(repr=False)
    after: Piece = field(repr=False)


def difference(before: Tensor, after: Tensor) -> float:
    """Largest absolute difference over the largest finite magnitude before.

    inf for another shape, and for a NaN or infinity on one side only.
    """
    if before.shape != after.shape:
        return float("inf")
    if not before.is_floating_point() or not after.is_floating_point():
        return 0.0 if torch.equal(before, after) else float("inf")
    same = (before == after) | (before.isnan() & after.isnan())
    if bool(same.all()):
        return 0.0
    finite = before[before.isfinite()]
    scale = finite.abs().max().clamp_min(1e-30) if finite.numel() else torch.tensor(1.0)
    worst = float(((before - after)[~same].abs().max() / scale).item())
    return worst if worst == worst else float("inf")


def find_blame(
    before: Graph,
    after: Graph,
    parameters: Parameters,
    scenario: Scenario,
    seed: int,
    limit: float,
) -> Blame | None:
    """Who is to blame for a difference above `limit` in a scenario; None if no step shows it."""
    old, new = (_Side(g, parameters, scenario, seed) for g in (before, after))
    for record, sequence, twin in _pairs(old, new):
        blame = _Comparison(old, new, twin, record, sequence, limit).blame()
        if blame is not None:
            return blame
    return None


def tie_flipped(blame: Blame, parameters: Parameters) -> bool:
    """Whether a choice (of experts, say) differs only because of what it was computed from.

    That differs by what is allowed, since it is not to blame; a near tie then falls to the other
    side. On the same inputs both pieces choose alike, and the pass rounded no input of the choice.
    """
    node = blame.after.graph.outputs[0].node
    if blame.before is None or node is None or all(r.dtype.is_float for r in node.results):
        return False
    if any(isinstance(o, Value) and o.precision is not None for o in node.operands):
        return False
    results = [_replayed(piece, parameters) for piece in (blame.before, blame.after)]
    return difference(*results) == 0.0


def _replayed(piece: Piece, parameters: Parameters) -> Tensor:
    runner = Interpreter(piece.graph, parameters, copied(piece.states))
    return piece.view.of(runner.run(piece.inputs)[0])


class _Side:
    """A graph on one side of the pass, with all its steps."""

    def __init__(self, graph: Graph, parameters: Parameters, scenario: Scenario, seed: int) -> None:
        # A copy: the interpreter binds values by identity and a pass may be half-way rewritten.
        self.graph = parse_graph(print_graph(graph))
        self.values = {v.name: v for v in self.graph.values()}
        self.ragged = self.graph.is_ragged
        self.records: list[Record] = []
        run(self.graph, parameters, scenario, seed, self.records)

    def of(self, step: int, sequence: int) -> Record | None:
        """The step of a sequence."""
        return next((r for r in self.records if r.step == step and sequence in r.rows), None)

    def past(self, name: str, record: Record, sequence: int) -> Tensor:
        """A state's rows [past, ...] of a sequence, before the step."""
        state = record.states[name]
        if not isinstance(state, PagedState):
            return state.movedim(self.graph.states[name].axis, 1)[0]
        place = list(record.rows).index(sequence)
        start, end = record.rows[sequence]
        index = torch.arange(int(record.inputs["kv_lens"][place]) - (end - start))
        blocks = record.inputs["block_tables"][place][index // state.tokens_per_block]
        return state.rows[blocks * state.tokens_per_block + index % state.tokens_per_block]

    def writer(self, name: str) -> Node | None:
        """The last node that writes a state."""
        output = self.graph.states[name].output
        if output is not None:
            return output.node
        return next((n for n in reversed(self.graph.nodes) if name in _states_of(n)), None)


def _pairs(before: _Side, after: _Side) -> Iterator[tuple[Record, int, Record]]:
    """Every step of every sequence after the pass, and the same before it."""
    for record in after.records:
        for sequence in record.rows:
            twin = before.of(record.step, sequence)
            if twin is not None:
                yield record, sequence, twin


@dataclass
class _Comparison:
    """One step of one sequence on both sides."""

    before: _Side
    after: _Side
    old: Record
    new: Record
    sequence: int
    limit: float

    def blame(self) -> Blame | None:
        """The first value that differs, or the node that cannot be run."""
        agreed: set[str] = set()
        pairs = [(v, v) for n in self.after.graph.nodes for v in (r.name for r in n.results)]
        ends = zip(self.before.graph.outputs, self.after.graph.outputs, strict=True)
        for old, new in [*pairs, *((b.name, a.name) for b, a in ends)]:
            found = self._compare(old, new)
            if found is None:
                continue
            if found > self.limit:
                return self._blame(old, new, f"%{new} differs by {found:.3g}", agreed)
            agreed.add(old)
        if self.new.failed is None:
            return None
        node, error = self.new.failed
        name = node.results[0].name
        return self._blame(name, name, f"%{name} cannot be computed ({error})", agreed)

    def _compare(self, old: str, new: str) -> float | None:
        """Difference of two values; None if one is missing or they cannot be compared."""
        if old not in self.old.values or new not in self.new.values:
            return None
        views = self._views(old, new)
        if views is None:
            return None
        left, right = views[0].of(self.old.values[old]), views[1].of(self.new.values[new])
        if left.numel() != right.numel():
            same = self.before.values[old].shape == self.after.values[new].shape
            return float("inf") if same else None
        return difference(left.reshape(right.shape), right)

    def _views(self, old: str, new: str) -> tuple[View, View] | None:
        left, right = self.before.values[old], self.after.values[new]
        if not self.after.ragged:
            return View(), View()
        seen = self._flat(right.shape, self.new)
        if self.before.ragged:
            known = self._flat(left.shape, self.old)
            return None if known is None or seen is None else (known, seen)
        try:
            axes = token_axes(left.shape)
        except NotTokenWise:
            return None
        return None if seen is None or (axes is None) != (seen == View()) else (View(axes), seen)

    def _flat(self, shape: Shape, record: Record) -> View | None:
        symbols = [d for d in shape if isinstance(d, SymDim)]
        if not symbols:
            return View()
        if shape[0] not in (TOKENS, ROWS) or len(symbols) > 1:
            return None
        return View(None, record.rows[self.sequence], shape[0] == ROWS)

    def _blame(self, old: str, new: str, reason: str, agreed: set[str]) -> Blame:
        views = (old in self.before.values and self._views(old, new)) or (View(), View())
        value = self.after.values[new]
        assert value.node is not None
        shared = not self.after.ragged or self.before.ragged
        cut = frozenset(agreed - {old, new})
        given = {n: self.old.values[n] for n in cut} if shared else {}
        piece = cut_out(self.after.graph, value, cut, self.new, views[1])
        for name in given.keys() & piece.inputs.keys():
            if given[name].shape == piece.inputs[name].shape:
                piece.inputs[name] = given[name]
        origin = self.before.values.get(old)
        node, spoiled = self._spoiled(value.node)
        return Blame(
            new,
            print_node(node),
            node.scope,
            f"{spoiled}{reason}",
            cut_out(self.before.graph, origin, cut, self.old, views[0]) if origin else None,
            piece,
        )

    def _spoiled(self, node: Node) -> tuple[Node, str]:
        """Who wrote a state wrongly in an earlier step, if the node reads one; else the node."""
        for name in _states_of(node):
            if name in self.old.states and name in self.new.states:
                sides = ((self.before, self.old), (self.after, self.new))
                left, right = (s.past(name, r, self.sequence) for s, r in sides)
                writer = self.after.writer(name)
                if writer is not None and difference(left, right) > self.limit:
                    return writer, f"it wrote wrong rows into state {name}, so that "
        return node, ""


def _states_of(node: Node) -> list[str]:
    """The states that an op names."""
    return [str(node.attrs[a]) for a in STATE_ATTRS if isinstance(node.attrs.get(a), str)]


def cut_out(graph: Graph, value: Value, cut: frozenset[str], record: Record, view: View) -> Piece:
    """The nodes that compute `value` from the values named in `cut`, with what they read."""
    order = {id(n): i for i, n in enumerate(graph.nodes)}
    roots = [value]
    while True:
        kept = {id(v.node) for v in roots}
        nodes, leaves = cone(roots, lambda n: id(n) in kept or n.results[0].name not in cut)  # noqa: B023
        nodes.sort(key=lambda n: order[id(n)])
        names = {name for n in nodes for name in _states_of(n)}
        earlier = graph.nodes[: order[id(nodes[-1])]]
        writers = [n for n in earlier if names.intersection(_states_of(n)) and n not in nodes]
        if not writers:
            break
        roots += [n.results[0] for n in writers]  # they wrote the same states in this step
    piece = Graph(graph.name, graph.level, leaves, nodes=nodes, outputs=[value])
    piece.constants = {o.name: o for n in nodes for o in n.operands if isinstance(o, Constant)}
    piece.states = {k: s for k, s in graph.states.items() if k in names}
    inputs = {v.name: record.values[v.name] for v in leaves}
    _bind_symbols(piece, graph, inputs, record)
    parameters = {c.parameter for c in piece.constants.values() if c.parameter is not None}
    states = {k: record.states[k] for k in piece.states}
    return Piece(piece, view, inputs, states, frozenset(parameters))


def _bind_symbols(piece: Graph, graph: Graph, inputs: dict[str, Tensor], record: Record) -> None:
    """An input that carries the sizes which no other input of the piece tells."""
    states = [(s.type.shape, record.states[s.name]) for s in graph.states.values()]
    sizes = _sizes([(v.shape, record.values[v.name]) for v in graph.inputs] + states)
    here = [(v.shape, inputs[v.name]) for v in piece.inputs]
    here += [(s.type.shape, record.states[k]) for k, s in piece.states.items()]
    every = symbols_of([v for n in piece.nodes for v in n.results], piece.nodes)
    missing = sorted((every & sizes.keys()) - _sizes(here).keys())
    if missing:
        kind = TensorType(DType.U8, tuple(map(symbol, missing)))
        carrier = Value(graph.fresh("sizes"), kind)
        piece.inputs = [*piece.inputs, carrier]
        inputs[carrier.name] = torch.zeros([sizes[m] for m in missing], dtype=torch.uint8)


def _sizes(tensors: list[tuple[Shape, Tensor | PagedState]]) -> dict[str, int]:
    """Symbols that stand alone in a shape."""
    return {
        str(d): size
        for shape, tensor in tensors
        if not isinstance(tensor, PagedState)
        for d, size in zip(shape, tensor.shape, strict=True)
        if isinstance(d, SymDim) and d.symbols == {str(d)}
    }
