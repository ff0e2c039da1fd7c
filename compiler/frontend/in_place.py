"""In-place ops -> functional ops, where that is plain to see.

torch's own functionalisation traces the model once more, which takes twice as long as the first
time. Most models only write to a value that they have just made and that nothing views yet, as in
``weights /= weights.sum()``: then the op's result simply takes the place of the value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node


def mutates(node: Node) -> bool:
    """Whether a traced call writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def replace_plain_writes(graph: Graph) -> bool:
    """Makes in-place ops functional, all of them or none; whether it could.

    Each has to write to a value that a call made anew, before anything became a view of it.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if mutates(node)]
    twins = {node: _functional_twin(node.target) for node in writes}
    if None in twins.values() or not all(_plain(node, order) for node in writes):
        return False
    for write in writes:
        at = order[write]
        write.target = twins[write]
        write.args[0].replace_all_uses_with(write, lambda user, at=at: order[user] > at)
    return True


def _functional_twin(target: Any) -> Any:
    """``aten.div.Tensor`` for ``aten.div_.Tensor``; None unless it takes the same arguments."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin = getattr(packet, target._overloadname, None)
    if twin is None or not name.endswith("_"):
        return None
    names = [[argument.name for argument in op._schema.arguments] for op in (target, twin)]
    fresh = not any(result.alias_info for result in twin._schema.returns)
    return twin if names[0] == names[1] and fresh else None


def _plain(write: Node, order: dict[Node, int]) -> bool:
    """Whether the written memory belongs to one new value, without views at that time.

    The value is known by several nodes if it was written to before: the result of each write.
    """
    names = _names_of(write.args[0])
    if not names or _may_view(names[0]):
        return False
    views = (u for name in names for u in name.users if _may_view(u) and not mutates(u))
    return all(order[view] > order[write] for view in views)


def _names_of(value: Any) -> list[Node]:
    """The call that made the value, and the writes to it through that node or each other."""
    while isinstance(value, Node) and mutates(value):
        value = value.args[0]
    if not isinstance(value, Node) or value.op != "call_function":
        return []
    names = [value]
    for name in names:  # grows while it is read
        names += [u for u in name.users if mutates(u) and u.args[0] is name and u not in names]
    return names


def _may_view(node: Node) -> bool:
    """Whether a result may share memory with an argument, by the op's schema."""
    if node.target is operator.getitem:
        return _may_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op not in ("output", "call_function")
    return any(result.alias_info is not None for result in schema.returns)
