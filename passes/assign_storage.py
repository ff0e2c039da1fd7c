"""Give every constant a storage format and every state a buffer format.

before:
    graph head fused {
      input %x : f32[T, 32]
      const @w : f32[64, 32] = parameter "lm_head" role=output
      const @s : f32[64] = parameter "scale" role=other
      state k : f32[N, 2, 8] axis=0 kind=kv
      %l = linear(%x, @w) : f32[T, 64]
      %y = mul(%l, @s) : f32[T, 64]
      output %y
    }
after:
    graph head fused {
      input %x : f32[T, 32]
      const @w : f32[64, 32] = parameter "lm_head" format=f32 role=output
      const @s : f32[64] = parameter "scale" format=array role=other
      state k : f32[N, 2, 8] axis=0 kind=kv format=f16
      %l = linear(%x, @w) : f32[T, 64]
      %y = mul(%l, @s) : f32[T, 64]
      output %y
    }

Matrices that only kernels read (linear, embedding, gated_mlp, moe) get what the policy says;
`array` is plain row-major f32; inline data keeps its dtype. The policy is an option, so that the
rules of a quantisation stay outside of the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, Graph, Level, Node
from .base import Pass, PassReport

Policy = Callable[[Sequence[Constant]], Mapping[str, str]]
MATRIX_OPERANDS = {
    "linear": (1,),
    "linear_residual": (1,),
    "embedding": (0,),
    "gated_mlp": (1, 2, 3),
    "moe": (3, 4, 5),
    "qkv": (1, 2, 3),
}


def plain_f32(matrices: Sequence[Constant]) -> Mapping[str, str]:
    """The policy without quantisation: everything f32."""
    return {c.name: "f32" for c in matrices}


@dataclass(frozen=True)
class AssignStorage(Pass):
    """Sets `Constant.format` and `State.format`.

    Args:
        policy: storage format of every matrix, by constant name.
        kv_format: f32, f16, int8 or int4.
    """

    name: ClassVar[str] = "assign-storage"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)
    policy: Policy = plain_f32
    kv_format: str = "f16"

    def run(self, graph: Graph) -> PassReport:
        """A parameter read both as a matrix and otherwise gets a second constant."""
        _split_uses(graph)
        wanted = _matrix_ids(graph)
        matrices = [c for c in graph.constants.values() if id(c) in wanted]
        formats = self.policy(matrices)
        for const in graph.constants.values():
            plain = "array" if const.data is None else const.dtype.value
            const.format = formats.get(const.name, plain)
        for state in graph.states.values():
            state.format = self.kv_format if state.input is None else "f32"
        counts = Counter(c.format for c in graph.constants.values())
        report = PassReport(self.name, fired=sorted(c.name for c in matrices))
        report.facts["constants per format"] = dict(sorted(counts.items()))
        return report


def _is_matrix(node: Node, index: int) -> bool:
    return index in MATRIX_OPERANDS.get(node.op, ())


def _matrix_ids(graph: Graph) -> set[int]:
    return {
        id(o)
        for n in graph.nodes
        for i, o in enumerate(n.operands)
        if isinstance(o, Constant) and o.parameter is not None and _is_matrix(n, i)
    }


def _split_uses(graph: Graph) -> None:
    matrices = _matrix_ids(graph)
    for node in graph.nodes:
        for index, operand in enumerate(node.operands):
            if not isinstance(operand, Constant) or id(operand) not in matrices:
                continue
            if not _is_matrix(node, index):
                node.operands[index] = _plain_twin(graph, operand)


def _plain_twin(graph: Graph, const: Constant) -> Constant:
    twin = Constant(f"{const.name}.array", const.type, const.parameter, role="other")
    twin.transposed, twin.rows, twin.plus = const.transposed, const.rows, const.plus
    return graph.constants.setdefault(twin.name, twin)
