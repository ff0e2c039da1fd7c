"""Ops that our kernels run, as nodes of the `spike` domain (docs/custom-ops.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir import Constant, Dim, DType, Node, Operand, Shape, SymDim, Value, attribute, op_of
from .emission import DOMAIN, ONNX_DTYPE, Emission
from .folds import Rotated
from .primitive_nodes import Emit


def _matrix(operand: Operand) -> Constant:
    assert isinstance(operand, Constant)
    return operand


def _int(dim: Dim) -> int:
    assert not isinstance(dim, SymDim)
    return dim


def _spike(emission: Emission, op: str, inputs: list[str], node: Node, **attrs: Any) -> None:
    emission.node(op, inputs, node.results[0].name, domain=DOMAIN, **attrs)


def _in_place(names: list[str], place: int, name: str) -> None:
    """Puts an optional input where it belongs, behind empty names for those that are missing."""
    names.extend([""] * (place + 1 - len(names)))
    names[place] = name


def _normed(emission: Emission, node: Node, names: list[str], place: int) -> dict[str, float]:
    """The input of a product, and the norm in front of it at its place; attributes of that norm."""
    norm = emission.folds.norms.get(id(node))
    if norm is None:
        return {}
    names[0] = emission.operand(norm.operands[0])
    _in_place(names, place, emission.operand(norm.operands[1]))
    return {"norm_eps": float(attribute(norm, "eps"))}


def _names(emission: Emission, node: Node) -> list[str]:
    """A product's operands; its input may be a value that is never made."""
    first = "" if id(node) in emission.folds.norms else emission.operand(node.operands[0])
    return [first, *(emission.operand(o) for o in node.operands[1:])]


def _linear(emission: Emission, node: Node) -> None:
    names = _names(emission, node)
    if not isinstance(node.operands[1], Constant):
        return _product(emission, node, names)
    norm = _normed(emission, node, names, 4)
    weight = _matrix(node.operands[1])
    n, k = map(_int, weight.shape)
    return _spike(emission, "Linear", names, node, format=weight.format, n=n, k=k, **norm)


def emit_choice(emission: Emission, logits: Value, wanted: str, outputs: list[str]) -> None:
    """The best of each row of logits, and the wanted rows; by the product itself if it can."""
    head = emission.folds.head
    if head is None:
        inputs, op, attrs = [logits.name, wanted], "Choose", dict[str, Any]()
    else:
        weight = _matrix(head.operands[1])
        x, w, *bias = _names(emission, head)
        inputs, op = [x, w, wanted, *bias], "Head"
        attrs = dict(zip("nk", map(_int, weight.shape), strict=True))
        attrs |= {"format": weight.format, **_normed(emission, head, inputs, 4)}
    emission.node(op, inputs, outputs[0], domain=DOMAIN, **attrs)
    emission.nodes[-1].output.extend(outputs[1:])


def _product(emission: Emission, node: Node, names: list[str]) -> None:
    """linear with a computed weight."""
    transposed = emission.node("Transpose", [names[1]], perm=[1, 0])
    if len(names) == 2:
        emission.node("MatMul", [names[0], transposed], node.result.name)
    else:
        product = emission.node("MatMul", [names[0], transposed])
        emission.node("Add", [product, names[2]], node.result.name)


def _linear_residual(emission: Emission, node: Node) -> None:
    _, weight, residual, *bias = node.operands
    n, k = map(_int, _matrix(weight).shape)
    names = _names(emission, node)[:2]
    names += [emission.operand(bias[0]) if bias else "", emission.operand(residual)]
    norm = _normed(emission, node, names, 4)
    _spike(emission, "Linear", names, node, format=_matrix(weight).format, n=n, k=k, **norm)


def _embedding(emission: Emission, node: Node) -> None:
    weight = _matrix(node.operands[0])
    n, k = map(_int, weight.shape)
    names = [emission.operand(node.operands[1]), emission.constant(weight)]
    _spike(emission, "Embedding", names, node, format=weight.format, n=n, k=k)


def _gated_mlp(emission: Emission, node: Node) -> None:
    names = _names(emission, node)
    if attribute(node, "biases"):
        biases, residual = names[4:7], names[7:] or [""]
        names = [*names[:4], *residual, *biases]
    norm = _normed(emission, node, names, 8)
    gate, up, down = (_matrix(o) for o in node.operands[1:4])
    m, k = map(_int, gate.shape)
    _spike(
        emission,
        "GatedMlp",
        names,
        node,
        activation=attribute(node, "activation"),
        gate_format=gate.format,
        up_format=up.format,
        down_format=down.format,
        k=k,
        m=m,
        n=_int(down.shape[0]),
        **norm,
    )


def _route(emission: Emission, node: Node) -> None:
    names = [emission.operand(o) for o in node.operands]
    attrs = {name: attribute(node, name) for name in op_of(node).attrs}
    attrs = {name: int(v) if isinstance(v, bool) else v for name, v in attrs.items()}
    attrs |= {name: float(attrs[name]) for name in ("eps", "floor", "scale")}
    _spike(emission, "Route", names, node, experts=_int(node.value(0).shape[-1]), **attrs)
    emission.nodes[-1].output.append(node.results[1].name)


def _moe(emission: Emission, node: Node) -> None:
    gate, up, down = (_matrix(o) for o in node.operands[3:6])
    experts, m, k = map(_int, gate.shape)
    _spike(
        emission,
        "MoE",
        [emission.operand(o) for o in node.operands],
        node,
        activation=attribute(node, "activation"),
        limit=float(attribute(node, "limit")),
        alpha=float(attribute(node, "alpha")),
        gate_format=gate.format,
        up_format=up.format,
        down_format=down.format,
        experts=experts,
        k=k,
        m=m,
        n=_int(down.shape[1]),
    )


def _qkv(emission: Emission, node: Node) -> None:
    _emit_qkv(emission, node, _names(emission, node), {})


def _emit_qkv(emission: Emission, node: Node, names: list[str], attrs: dict[str, Any]) -> None:
    attrs = {**attrs, **_normed(emission, node, names, 7)}
    weights = dict(zip("qkv", map(_matrix, node.operands[1:4]), strict=True))
    attrs |= {f"{name}_format": w.format for name, w in weights.items()}
    attrs |= {f"{name}_n": _int(w.shape[0]) for name, w in weights.items()}
    k = _int(weights["q"].shape[1])
    results = [v.name for v in node.results]
    emission.node("Qkv", names, results[0], domain=DOMAIN, k=k, **attrs)
    emission.nodes[-1].output.extend(results[1:])


def _rotated_qkv(emission: Emission, attention: Node, rotated: Rotated) -> list[str]:
    """Queries, keys and values as the attention reads them, from one node."""
    product = rotated.product
    names, attrs = _names(emission, product), dict[str, Any]()
    for place, (letter, norm) in enumerate(zip("qk", rotated.norms, strict=True)):
        attrs[f"{letter}_heads"] = _int(attention.value(place).shape[1])
        if norm is not None:
            _in_place(names, 8 + place, emission.operand(norm.operands[1]))
            attrs[f"{letter}_norm_eps"] = float(attribute(norm, "eps"))
    if rotated.ropes is not None:
        rope = rotated.ropes[0]
        for place in (1, 2):
            table = _table(emission, rope.value(place), rope.result.shape[:-2])
            _in_place(names, 9 + place, table)
        attrs["style"] = attribute(rope, "style")
    _emit_qkv(emission, product, names, attrs)
    return [v.name for v in product.results]


def _rms_norm(emission: Emission, node: Node) -> None:
    x = emission.operand(node.operands[0])
    if len(node.operands) == 1:
        weight = emission.array(np.ones(_int(node.result.shape[-1]), np.float32))
    else:
        weight = emission.operand(node.operands[1])
    _spike(emission, "RmsNorm", [x, weight], node, eps=float(attribute(node, "eps")))


def emit_sum(emission: Emission, node: Node) -> None:
    """An add as part of the norm that gives one of its operands."""
    norm = emission.folds.sums[id(node)]
    (other,) = (o for o in node.operands if o is not norm.result)
    names = [emission.operand(o) for o in (*norm.operands, other)]
    _spike(emission, "RmsNorm", names, node, eps=float(attribute(norm, "eps")))


def _rope(emission: Emission, node: Node) -> None:
    x = emission.operand(node.operands[0])
    lead = node.result.shape[:-2]
    tables = [_table(emission, node.value(i), lead) for i in (1, 2)]
    _spike(emission, "Rope", [x, *tables], node, style=attribute(node, "style"))


def _table(emission: Emission, table: Value, lead: Shape) -> str:
    """cos or sin as [..., R]: without the head axis, with x's leading axes."""
    wanted: Shape = (*lead, table.shape[-1])
    name = table.name
    if table.shape[:-2] != lead:
        full = (*lead, *table.shape[-2:])
        name = emission.node("Expand", [name, emission.full_shape(full)])
    return emission.reshaped(name, wanted)


def _paged_attention(emission: Emission, node: Node) -> None:
    """q, k, v become [T, heads * width]; the pools are graph inputs and, in place, outputs."""
    if rotated := emission.folds.rotated.get(id(node)):
        rows = _rotated_qkv(emission, node, rotated)
    else:
        rows = [emission.reshaped(v.name, _two_axes(v.shape)) for v in map(node.value, range(3))]
    states = [emission.graph.states[str(attribute(node, n))] for n in ("key", "value")]
    step = [emission.operand(o) for o in node.operands[3:]]
    heads, width = node.value(0).shape[1], node.result.shape[2]
    flat = emission.fresh("attention")
    names = [*rows, *(f"kv.{s.name}" for s in states), *step]
    if slopes := attribute(node, "slopes"):
        sinks = [] if len(step) > 4 else [""]
        names += [*sinks, emission.array(np.array(slopes, np.float32))]
    emission.node(
        "Attention",
        names,
        flat,
        domain=DOMAIN,
        heads=heads,
        kv_heads=node.value(1).shape[1],
        scale=float(attribute(node, "scale")),
        window=attribute(node, "window"),
        chunk=attribute(node, "chunk"),
        softcap=float(attribute(node, "softcap")),
        kv_format=states[0].format,
    )
    emission.nodes[-1].output.extend(f"kv.{s.name}.out" for s in states)
    shape: Shape = (node.result.shape[0], _int(heads) * _int(width))
    emission.once[("reshape", node.result.name, shape)] = flat
    readers = emission.folds.users.of(node.result)
    if node.result.precision is None and all(_flattens(reader, shape) for reader in readers):
        for reader in readers:  # the op's own result is what they would make
            reader.result.name = flat
            emission.folds.inside.add(id(reader))
    else:
        emission.node("Reshape", [flat, emission.shape(node.result.shape)], node.result.name)


def _flattens(reader: Node, shape: Shape) -> bool:
    result = reader.result
    return reader.op == "reshape" and result.shape == shape and result.precision is None


def _two_axes(shape: Shape) -> Shape:
    return (shape[0], _int(shape[1]) * _int(shape[2]))


def _attention(emission: Emission, node: Node) -> None:
    """Functional attention as standard nodes; the mask is computed from the shapes."""
    q, k, v = (node.value(i) for i in range(3))
    groups = _int(q.shape[1]) // _int(k.shape[1])
    keys = _repeat_heads(emission, k, groups)
    flipped = emission.node("Transpose", [keys], perm=[0, 1, 3, 2])
    scores = emission.node("MatMul", [q.name, flipped])
    scores = emission.node(
        "Mul", [scores, emission.scalar(float(attribute(node, "scale")), DType.F32)]
    )
    if cap := float(attribute(node, "softcap")):
        limit = emission.scalar(cap, DType.F32)
        squashed = emission.node("Tanh", [emission.node("Div", [scores, limit])])
        scores = emission.node("Mul", [squashed, limit])
    if slopes := attribute(node, "slopes"):
        scores = emission.node("Add", [scores, _alibi(emission, node, slopes)])
    hidden = emission.scalar(float("-inf"), DType.F32)
    scores = emission.node("Where", [_seen(emission, node), scores, hidden])
    weights = _weights(emission, node, scores)
    values = _repeat_heads(emission, v, groups)
    emission.node("MatMul", [weights, values], node.result.name)


def _alibi(emission: Emission, node: Node, slopes: tuple[float, ...]) -> str:
    """f32 [H, S, L]: slope times the key's distance from the query."""
    length, step = node.value(1).shape[2], node.value(0).shape[2]
    key = ("alibi", length, step, slopes)
    if key not in emission.once:
        i = _positions(emission, length - step, length, (step, 1))
        j = _positions(emission, 0, length, (1, length))
        distance = emission.node("Cast", [emission.node("Sub", [j, i])], to=ONNX_DTYPE[DType.F32])
        by_head = emission.array(np.array(slopes, np.float32).reshape(-1, 1, 1))
        emission.once[key] = emission.node("Mul", [by_head, distance])
    return emission.once[key]


def _repeat_heads(emission: Emission, x: Value, groups: int) -> str:
    if groups == 1:
        return x.name
    batch, heads, length, width = x.shape
    apart = emission.node("Unsqueeze", [x.name, emission.ints([2])])
    full = emission.full_shape((batch, heads, groups, length, width))
    repeated = emission.node("Expand", [apart, full])
    return emission.reshaped(repeated, (batch, _int(heads) * groups, length, width))


def _weights(emission: Emission, node: Node, scores: str) -> str:
    if len(node.operands) == 3:
        return emission.node("Softmax", [scores], axis=-1)
    batch, heads, step, _ = node.result.shape
    sinks = emission.reshaped(emission.operand(node.operands[3]), (1, heads, 1, 1))
    column = emission.node("Expand", [sinks, emission.full_shape((batch, heads, step, 1))])
    soft = emission.node("Softmax", [emission.node("Concat", [scores, column], axis=-1)], axis=-1)
    ends = [emission.ints([0]), emission.ints([-1]), emission.ints([-1])]
    return emission.node("Slice", [soft, *ends])


def _seen(emission: Emission, node: Node) -> str:
    """bool [S, L]: which key each query sees; made once per shape and kind of mask."""
    length, step = node.value(1).shape[2], node.value(0).shape[2]
    causal, window, chunk = (attribute(node, n) for n in ("causal", "window", "chunk"))
    key = ("mask", length, step, causal, window, chunk)
    if key not in emission.once:
        i = _positions(emission, length - step, length, (step, 1))
        j = _positions(emission, 0, length, (1, length))
        parts = [emission.node("LessOrEqual", [j, i])] if causal else []
        if window:
            low = emission.node("Sub", [i, emission.scalar(window, DType.I64)])
            parts.append(emission.node("Greater", [j, low]))
        if chunk:
            size = emission.scalar(chunk, DType.I64)
            which = [emission.node("Div", [p, size]) for p in (i, j)]
            parts.append(emission.node("Equal", which))
        seen = parts[0] if parts else emission.node("Equal", [j, j])
        for part in parts[1:]:
            seen = emission.node("And", [seen, part])
        emission.once[key] = seen
    return emission.once[key]


def _positions(emission: Emission, start: Dim, end: Dim, shape: Shape) -> str:
    axis = emission.ints([0])
    bounds = [emission.node("Squeeze", [emission.dim(d), axis]) for d in (start, end)]
    line = emission.node("Range", [*bounds, emission.scalar(1, DType.I64)])
    return emission.node("Reshape", [line, emission.shape(shape)])


KERNELS: dict[str, Emit] = {
    "linear": _linear,
    "linear_residual": _linear_residual,
    "embedding": _embedding,
    "gated_mlp": _gated_mlp,
    "route": _route,
    "moe": _moe,
    "qkv": _qkv,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "paged_attention": _paged_attention,
    "attention": _attention,
}
