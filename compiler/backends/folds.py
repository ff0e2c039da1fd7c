"""Which nodes a kernel computes on the way, so that they need no node of their own.

Our kernels can normalise what they read (`norm_eps`), rotate what they write (Qkv), add to a norm
(RmsNorm), and pick the best of a row (Head). What a node means is the IR's business and does not
change; this is the choice of instructions for it, and the bits are the same.

- An rms_norm that one product alone reads goes in front of that product.
- An add to an rms_norm that nothing else reads is done by the norm.
- qkv whose results reach one paged attention through reshapes, norms and rotations alone: the
  products, norms and rotations are one node, and its results go to the attention as they are.
- The model's last product chooses as well, if it gives the logits.

Values that are rounded to half precision stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..ir import Constant, Graph, Node, Operand, Users, Value, attribute

PRODUCTS = ("linear", "linear_residual", "gated_mlp", "qkv")


@dataclass(frozen=True)
class Rotated:
    """The way of queries, keys and values from their products to an attention.

    Attributes:
        product: the qkv node.
        norms: of queries and keys, per head or over all; None = none.
        ropes: of queries and keys: of both or of neither, over the same angles.
    """

    product: Node
    norms: tuple[Node | None, Node | None]
    ropes: tuple[Node, Node] | None


@dataclass
class Folds:
    """What is computed within another node.

    Attributes:
        norms: rms_norm in front of a product, by the product's id.
        sums: rms_norm whose result is added to something, by the add's id.
        rotated: by the attention's id.
        head: the product that gives the logits, if it can choose.
        inside: ids of the nodes that need no node of their own.
    """

    users: Users
    norms: dict[int, Node] = field(default_factory=dict)
    sums: dict[int, Node] = field(default_factory=dict)
    rotated: dict[int, Rotated] = field(default_factory=dict)
    head: Node | None = None
    inside: set[int] = field(default_factory=set)


def find_folds(graph: Graph) -> Folds:
    """Looks at a placed graph; nothing in it changes."""
    folds = Folds(Users(graph))
    for node in graph.nodes:
        if node.op == "rms_norm":
            _norm_in_front(folds, node)
            _norm_and_sum(folds, node)
        elif node.op == "paged_attention":
            _rotated(folds, node)
    logits = graph.outputs[0]
    chooses = any(value.name == "logit_rows" for value in graph.inputs)
    last = logits.node if chooses and not folds.users.of(logits) else None
    if last is not None and last.op == "linear" and _is_stored(last):
        folds.head = last
        folds.inside.add(id(last))
    return folds


def _is_stored(product: Node) -> bool:
    return isinstance(product.operands[1], Constant)


def _norm_in_front(folds: Folds, norm: Node) -> None:
    reader = folds.users.only(norm.result)
    fits = reader is not None and reader.op in PRODUCTS and reader.operands[0] is norm.result
    if reader is None or not fits or not _is_stored(reader):
        return
    if norm.result.precision is None and len(norm.operands) == 2:
        folds.norms[id(reader)] = norm
        folds.inside.add(id(norm))


def _norm_and_sum(folds: Folds, norm: Node) -> None:
    add = folds.users.only(norm.result)
    if add is None or add.op != "add" or norm.result.precision is not None:
        return
    same = all(isinstance(o, Value) and o.shape == add.result.shape for o in add.operands)
    if same and len(norm.operands) == 2 and id(add) not in folds.sums:
        folds.sums[id(add)] = norm
        folds.inside.add(id(norm))


def _rotated(folds: Folds, attention: Node) -> None:
    ways = [list(_way(folds.users, attention.operands[i])) for i in range(3)]
    products = [way[-1] if way else None for way in ways]
    product = products[0]
    if product is None or product.op != "qkv" or any(p is not product for p in products):
        return
    heads = [attention.value(i) for i in range(3)]
    starts = [way[-2].operands[0] if len(way) > 1 else heads[i] for i, way in enumerate(ways)]
    between = [[n for n in way[:-1] if n.op != "reshape"] for way in ways]
    steps = [[n.op for n in reversed(nodes)] for nodes in between]
    if any(start is not result for start, result in zip(starts, product.results, strict=True)):
        return
    if steps[2] or any(s not in ([], ["rms_norm"], ["rope"], ["rms_norm", "rope"]) for s in steps):
        return
    norms = tuple(next((n for n in nodes if n.op == "rms_norm"), None) for nodes in between[:2])
    ropes = [n for nodes in between[:2] for n in nodes if n.op == "rope"]
    shaped = all(n.result.shape == heads[i].shape for i in (0, 1) for n in ropes[i : i + 1])
    if ropes and not (shaped and _turn_alike(ropes)):
        return
    pair = (ropes[0], ropes[1]) if ropes else None
    folds.rotated[id(attention)] = Rotated(product, (norms[0], norms[1]), pair)
    folds.inside.update(id(node) for way in ways for node in way)


def _way(users: Users, operand: Operand) -> Iterator[Node]:
    """The nodes behind an attention's operand up to its qkv, last first, while none is shared."""
    while isinstance(operand, Value) and operand.node is not None:
        node = operand.node
        alone = len(users.of(operand)) == 1 and not users.is_root(operand)
        if not alone or operand.precision is not None:
            return
        if node.op not in ("reshape", "rope", "rms_norm", "qkv"):
            return
        if node.op == "rms_norm" and len(node.operands) != 2:
            return
        yield node
        if node.op == "qkv":
            return
        operand = node.operands[0]


def _turn_alike(ropes: list[Node]) -> bool:
    """Whether queries and keys turn by the same angles, one row of them a token."""
    if len(ropes) != 2 or len({attribute(rope, "style") for rope in ropes}) != 1:
        return False
    return all(ropes[0].operands[i] is ropes[1].operands[i] for i in (1, 2))
