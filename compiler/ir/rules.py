"""Rules that give a node's result types from its operands and attributes."""

from __future__ import annotations

from .graph import Node, Operand
from .ops import attribute, dtype_of
from .types import Dim, DType, Shape, TensorType

_RANK = [DType.BOOL, DType.U8, DType.I32, DType.I64, DType.F16, DType.BF16, DType.F32, DType.F64]


def shape_of(operand: Operand) -> Shape:
    """Shape of an operand; a literal is a scalar."""
    return () if isinstance(operand, bool | int | float) else operand.shape


def promote(operands: list[Operand]) -> DType:
    """torch's promotion: tensors decide; a literal matters only when it is of a higher category."""
    tensors = [o.dtype for o in operands if not isinstance(o, bool | int | float)]
    best = max(tensors, key=_RANK.index) if tensors else DType.BOOL
    for operand in operands:
        if isinstance(operand, float) and not best.is_float:
            best = DType.F32
        elif isinstance(operand, int) and not isinstance(operand, bool) and best is DType.BOOL:
            best = DType.I64
    return best if tensors else max(map(dtype_of, operands), key=_RANK.index)


def broadcast(*shapes: Shape) -> Shape:
    """numpy's broadcasting over symbolic dims; ValueError names the two dims that differ."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(_common(dims) for dims in zip(*padded, strict=True))


def _common(dims: tuple[Dim, ...]) -> Dim:
    kept = {d for d in dims if d != 1}
    if len(kept) > 1:
        raise ValueError(f"dimensions {' and '.join(sorted(map(str, kept)))} do not broadcast")
    return kept.pop() if kept else 1


def axis_of(node: Node, rank: int, name: str = "axis") -> int:
    """A non-negative axis attribute; ValueError if out of range."""
    axis = int(attribute(node, name))
    if not -rank <= axis < rank:
        raise ValueError(f"{node.op}: axis {axis} of a rank {rank} tensor")
    return axis % rank


def same(node: Node) -> list[TensorType]:
    """The first operand's type."""
    return [node.tensor(0).type]


def floating(node: Node) -> list[TensorType]:
    """The first operand's shape; integers become f32."""
    x = node.tensor(0)
    return [TensorType(x.dtype if x.dtype.is_float else DType.F32, x.shape)]


def elementwise(node: Node) -> list[TensorType]:
    """Broadcast shape and promoted dtype."""
    return [TensorType(promote(node.operands), broadcast(*map(shape_of, node.operands)))]


def division(node: Node) -> list[TensorType]:
    """As `elementwise`, but integers give f32."""
    (kind,) = elementwise(node)
    return [kind if kind.dtype.is_float else TensorType(DType.F32, kind.shape)]


def comparison(node: Node) -> list[TensorType]:
    """Broadcast shape, bool."""
    return [TensorType(DType.BOOL, broadcast(*map(shape_of, node.operands)))]


def selection(node: Node) -> list[TensorType]:
    """where: all three broadcast, the last two promote."""
    shape = broadcast(*map(shape_of, node.operands))
    return [TensorType(promote(node.operands[1:]), shape)]


def cast(node: Node) -> list[TensorType]:
    """The operand's shape with another dtype."""
    return [TensorType(attribute(node, "dtype"), node.tensor(0).shape)]


def reduced(node: Node) -> list[TensorType]:
    """One axis removed, or kept as 1."""
    x = node.tensor(0)
    axis = axis_of(node, x.type.rank)
    middle: Shape = (1,) if attribute(node, "keepdim") else ()
    dtype = DType.I64 if node.op == "argmax" else x.dtype
    return [TensorType(dtype, x.shape[:axis] + middle + x.shape[axis + 1 :])]


def from_shape(node: Node) -> list[TensorType]:
    """shape and dtype attributes as they are."""
    return [TensorType(attribute(node, "dtype"), attribute(node, "shape"))]


def reshaped(node: Node) -> list[TensorType]:
    """The shape attribute; the element count must not change."""
    x, shape = node.tensor(0), attribute(node, "shape")
    if _count(x.shape) != _count(shape):
        raise ValueError(f"reshape of {x.type} to [{', '.join(map(str, shape))}]")
    return [x.type.with_shape(shape)]


def _count(shape: Shape) -> Dim:
    total: Dim = 1
    for dim in shape:
        total = dim * total
    return total


def expanded(node: Node) -> list[TensorType]:
    """The shape attribute; the operand must broadcast to it."""
    x, shape = node.tensor(0), attribute(node, "shape")
    if broadcast(x.shape, shape) != shape:
        raise ValueError(f"expand of {x.type} to {shape}")
    return [x.type.with_shape(shape)]


def transposed(node: Node) -> list[TensorType]:
    """The perm attribute applied."""
    x, perm = node.tensor(0), attribute(node, "perm")
    if sorted(perm) != list(range(x.type.rank)):
        raise ValueError(f"perm {perm} of a rank {x.type.rank} tensor")
    return [x.type.with_shape(tuple(x.shape[p] for p in perm))]


def sliced(node: Node) -> list[TensorType]:
    """start <= i < end along an axis; both already clamped and non-negative."""
    x = node.tensor(0)
    axis = axis_of(node, x.type.rank)
    start, end, step = (attribute(node, n) for n in ("start", "end", "step"))
    length: Dim = end - start
    if step != 1:
        if not isinstance(length, int):
            raise ValueError("a step needs constant bounds")
        length = -(-length // step)
    return [x.type.with_shape((*x.shape[:axis], length, *x.shape[axis + 1 :]))]


def concatenated(node: Node) -> list[TensorType]:
    """Sizes add along an axis; all other dims must agree."""
    tensors = [node.tensor(i) for i in range(len(node.operands))]
    axis = axis_of(node, tensors[0].type.rank)
    total: Dim = 0
    for tensor in tensors:
        rest = (tensor.shape[:axis], tensor.shape[axis + 1 :])
        if rest != (tensors[0].shape[:axis], tensors[0].shape[axis + 1 :]):
            raise ValueError(f"concat of {tensors[0].type} and {tensor.type}")
        total = total + tensor.shape[axis]
    shape = (*tensors[0].shape[:axis], total, *tensors[0].shape[axis + 1 :])
    return [TensorType(promote(node.operands), shape)]


def matmul(node: Node) -> list[TensorType]:
    """[..., n, k] x [..., k, m]."""
    a, b = node.tensor(0), node.tensor(1)
    if a.type.rank < 2 or b.type.rank < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul of {a.type} and {b.type}")
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    return [TensorType(promote(node.operands), (*lead, a.shape[-2], b.shape[-1]))]


def linear(node: Node) -> list[TensorType]:
    """[..., k] with weight [n, k] and bias [n]."""
    x, weight = node.tensor(0), node.tensor(1)
    if weight.type.rank != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear of {x.type} and {weight.type}")
    return [x.type.with_shape((*x.shape[:-1], weight.shape[0]))]


def embedding(node: Node) -> list[TensorType]:
    """weight [n, k], ids [...] -> [..., k]."""
    weight, ids = node.tensor(0), node.tensor(1)
    return [TensorType(weight.dtype, (*ids.shape, weight.shape[1]))]


def gathered(node: Node) -> list[TensorType]:
    """index_select: the axis takes the index's length."""
    x, index = node.tensor(0), node.tensor(1)
    axis = axis_of(node, x.type.rank)
    return [x.type.with_shape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))]


def like_index(node: Node) -> list[TensorType]:
    """gather: the index's shape."""
    return [node.tensor(0).type.with_shape(node.tensor(1).shape)]


def top(node: Node) -> list[TensorType]:
    """topk: values and indices."""
    x = node.tensor(0)
    axis = axis_of(node, x.type.rank)
    shape = (*x.shape[:axis], attribute(node, "k"), *x.shape[axis + 1 :])
    return [x.type.with_shape(shape), TensorType(DType.I64, shape)]


def ranged(node: Node) -> list[TensorType]:
    """arange: (end - start) / step elements."""
    length = attribute(node, "end") - attribute(node, "start")
    step = attribute(node, "step")
    if step != 1:
        if not isinstance(length, int):
            raise ValueError("a step needs constant bounds")
        length = -(-length // step)
    return [TensorType(attribute(node, "dtype"), (length,))]


def attention(node: Node) -> list[TensorType]:
    """q [B, H, S, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv] -> [B, H, S, Dv]."""
    q, k, v = (node.tensor(i) for i in range(3))
    heads, kv_heads = q.shape[1], k.shape[1]
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} kv heads")
    if q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention of {q.type}, {k.type} and {v.type}")
    return [q.type.with_shape((*q.shape[:3], v.shape[3]))]


def paged_attention(node: Node) -> list[TensorType]:
    """q [T, H, D], v [T, Hkv, Dv] -> [T, H, Dv]."""
    q, v = node.tensor(0), node.tensor(2)
    return [q.type.with_shape((*q.shape[:2], v.shape[2]))]


def gated_mlp(node: Node) -> list[TensorType]:
    """x [..., K], gate and up [M, K], down [N, M] -> [..., N]; biases [M], [M], [N]."""
    x, gate, up, down = (node.tensor(i) for i in range(4))
    if gate.shape != up.shape or x.shape[-1] != gate.shape[1] or down.shape[1] != gate.shape[0]:
        raise ValueError(f"gated_mlp of {x.type}, {gate.type}, {up.type} and {down.type}")
    extras = [shape_of(o) for o in node.operands[4:]]
    biases = [gate.shape[:1], up.shape[:1], down.shape[:1]] if attribute(node, "biases") else []
    if (extras[:3] != biases and biases) or len(extras) - len(biases) not in (0, 1):
        raise ValueError(f"gated_mlp with biases of shape {biases} and a residual, not {extras}")
    return [x.type.with_shape((*x.shape[:-1], down.shape[0]))]


def route(node: Node) -> list[TensorType]:
    """logits [..., E] -> weights and ids [..., k]."""
    logits, k = node.tensor(0), attribute(node, "k")
    shape = (*logits.shape[:-1], k)
    return [logits.type.with_shape(shape), TensorType(DType.I64, shape)]


def moe(node: Node) -> list[TensorType]:
    """x [..., K], weights and ids [..., k], gate and up [E, M, K], down [E, N, M] -> [..., N]."""
    x, weights, ids, gate, up, down = (node.tensor(i) for i in range(6))
    if weights.shape != ids.shape or x.shape[:-1] != ids.shape[:-1]:
        raise ValueError(f"moe of {x.type} with weights {weights.type} and ids {ids.type}")
    if len({gate.type.rank, up.type.rank, down.type.rank, 3}) > 1 or gate.shape != up.shape:
        raise ValueError(f"moe of {gate.type}, {up.type} and {down.type}")
    experts, m, k = gate.shape
    n = down.shape[1]
    if down.shape != (experts, n, m) or x.shape[-1] != k:
        raise ValueError(f"moe of {x.type}, {gate.type} and {down.type}")
    biases = [node.tensor(i).shape for i in range(6, len(node.operands))]
    if biases not in ([], [(experts, m), (experts, m), (experts, n)]):
        raise ValueError(f"moe of biases {biases} with {experts} experts")
    return [x.type.with_shape((*x.shape[:-1], n))]


def qkv(node: Node) -> list[TensorType]:
    """x [..., K] with three weights [N, K] -> three [..., N]."""
    x, *weights = (node.tensor(i) for i in range(4))
    if any(w.type.rank != 2 or w.shape[1] != x.shape[-1] for w in weights):
        raise ValueError(f"qkv of {x.type} and {', '.join(str(w.type) for w in weights)}")
    biases = [shape_of(o) for o in node.operands[4:]]
    if biases and biases != [w.shape[:1] for w in weights]:
        raise ValueError(f"qkv with biases of shape {biases}")
    return [x.type.with_shape((*x.shape[:-1], w.shape[0])) for w in weights]


def appended(node: Node) -> list[TensorType]:
    """kv_append: the axis grows by the past."""
    x = node.tensor(0)
    axis = axis_of(node, x.type.rank)
    past: Dim = attribute(node, "past")
    return [x.type.with_shape((*x.shape[:axis], past + x.shape[axis], *x.shape[axis + 1 :]))]
