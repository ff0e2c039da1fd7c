"""Name the kernel of every node; the graph is placed afterwards.

before:
    graph step fused {
      input %x : f32[T, 32]
      const @w : f32[64, 32] = parameter "w" format=f32 role=output
      %l = linear(%x, @w) : f32[T, 64] in lm_head
      %y = tanh(%l) : f32[T, 64]
      output %y
    }
after:
    graph step placed {
      input %x : f32[T, 32]
      const @w : f32[64, 32] = parameter "w" format=f32 role=output
      %l = linear(%x, @w) : f32[T, 64] by reference.linear in lm_head
      %y = tanh(%l) : f32[T, 64] by reference.tanh
      output %y
    }

Which kernels exist is the backend's business and comes in as an option: op -> kernel name. Without
it every op has its reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Constant, DType, Graph, Level, Node, Value
from ..errors import ExitCode, SpikeError
from .base import Pass, PassReport


@dataclass(frozen=True)
class AssignKernels(Pass):
    """Sets `Node.kernel`.

    Args:
        kernels: kernel name of every op the backend runs; None means the reference interpreter.
    """

    name: ClassVar[str] = "assign-kernels"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)
    ensures: ClassVar[Level | None] = Level.PLACED
    kernels: Mapping[str, str] | None = None

    def run(self, graph: Graph) -> PassReport:
        """Raises SpikeError SPK305 naming every op without a kernel."""
        missing = [n for n in graph.nodes if self.kernels is not None and self._lacks(n)]
        if missing:
            raise _no_kernel(missing)
        for node in graph.nodes:
            node.kernel = self.kernels[node.op] if self.kernels else f"reference.{node.op}"
        counts = Counter(n.kernel for n in graph.nodes)
        report = PassReport(self.name, fired=sorted(counts))
        report.facts["nodes per kernel"] = dict(sorted(counts.items()))
        return report

    def _lacks(self, node: Node) -> bool:
        """Kernels compute in f32: a value in half precision may only be cast."""
        assert self.kernels is not None
        return node.op not in self.kernels or (node.op != "cast" and _half(node))


def _half(node: Node) -> bool:
    tensors = [o for o in node.operands if isinstance(o, Value | Constant)] + node.results
    return any(t.dtype in (DType.F16, DType.BF16) for t in tensors)


def _no_kernel(nodes: list[Node]) -> SpikeError:
    places = ", ".join(
        f"{n.op} : {n.results[0].dtype.value} in {n.scope or 'the model'}" for n in nodes[:5]
    )
    return SpikeError(
        "SPK305",
        "passes",
        f"{len(nodes)} nodes have no kernel in this backend: {places}.",
        "Report the model's type, so that they are added.",
        ExitCode.UNSUPPORTED,
    )
