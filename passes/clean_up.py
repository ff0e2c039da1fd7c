"""Drop what does nothing, fold what is known, share what is equal, and sink transposes.

before:
    input %x : f32[B, S, 64]
    const @w : f32[64] = parameter "norm.weight"
    %a = mul(%x, 1.0) : f32[B, S, 64]
    %b = reshape(%a, shape=[B, S, 4, 16]) : f32[B, S, 4, 16]
    %c = transpose(%b, perm=[0, 2, 1, 3]) : f32[B, 4, S, 16]
    %d = silu(%c) : f32[B, 4, S, 16]
    %e = transpose(%d, perm=[0, 2, 1, 3]) : f32[B, S, 4, 16]
    %f = reshape(%e, shape=[B, S, 64]) : f32[B, S, 64]
    %g = mul(%f, @w) : f32[B, S, 64]
    %h = mul(%f, @w) : f32[B, S, 64]
    %y = add(%g, %h) : f32[B, S, 64]
    output %y
after:
    input %x : f32[B, S, 64]
    const @w : f32[64] = parameter "norm.weight"
    %11 = silu(%x) : f32[B, S, 64]
    %g = mul(%11, @w) : f32[B, S, 64]
    %y = add(%g, %g) : f32[B, S, 64]
    output %y

A transpose sinks below an op when it has no other user, so that it can meet its inverse; a reshape
goes when the ops between it and its inverse do not look at the axes it merged or split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Level
from .base import Pass, PassReport
from .simplify import Walk

MAX_ROUNDS = 8


@dataclass(frozen=True)
class CleanUp(Pass):
    """Simplifies until nothing changes.

    Args:
        fold_elements: largest result that constant folding may put into the graph.
        sink_transposes: move transposes down and reshapes out of the way.
    """

    name: ClassVar[str] = "clean-up"
    requires: ClassVar[tuple[Level, ...]] = (Level.TRACED, Level.FUSED)
    tolerance: ClassVar[float] = 1e-6  # a matrix product may sum another memory layout differently

    fold_elements: int = 4096
    sink_transposes: bool = True

    def run(self, graph: Graph) -> PassReport:
        """Walks the graph forward until a round changes nothing."""
        report = PassReport(self.name)
        for _ in range(MAX_ROUNDS):
            walk = Walk(graph, self.fold_elements, self.sink_transposes)
            walk.run()
            if not walk.fired:
                break
            report.fired += [scope for _, scope in walk.fired]
            for rule, _ in walk.fired:
                count = report.facts.get(rule, 0)
                assert isinstance(count, int)
                report.facts[rule] = count + 1
            graph.sweep()  # so that the next round counts living users only
        return report
