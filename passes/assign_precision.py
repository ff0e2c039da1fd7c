"""Give every value the lowest precision that is safe, with f32 islands where none is.

options:
    dtype: float16
before:
    graph angles fused {
      input %positions : i64[T]
      const @inv_freq : f32[2] = data "AACAPwrXIzw="
      const @x : f32[2] = data "AACAPwAAAEA="
      %p = reshape(%positions, shape=[T, 1]) : i64[T, 1]
      %f = cast(%p, dtype=f32) : f32[T, 1]
      %angle = mul(%f, @inv_freq) : f32[T, 2]
      %cos = cos(%angle) : f32[T, 2]
      %low = mul(%cos, @x) : f32[T, 2]
      %y = add(%low, 1.0) : f32[T, 2]
      output %y
    }
after:
    graph angles fused {
      input %positions : i64[T]
      const @inv_freq : f32[2] = data "AACAPwrXIzw="
      const @x : f32[2] = data "AACAPwAAAEA="
      %p = reshape(%positions, shape=[T, 1]) : i64[T, 1]
      %f = cast(%p, dtype=f32) : f32[T, 1]
      %angle = mul(%f, @inv_freq) : f32[T, 2]
      %cos = cos(%angle) : f32[T, 2] as f16
      %low = mul(%cos, @x) : f32[T, 2] as f16
      %y = add(%low, 1.0) : f32[T, 2]
      output %y
    }

Positions up to 8191 times a frequency of 1 give angles whose f16 rounding turns the cosine by
radians: angle and position stay f32, by their numbers and not by their names. What leaves the
graph is f32. With `round_outputs` an output is a cast of what made it, which may so be rounded: a
TensorRT head would otherwise read its matrix in f32. `compiler/analysis` decides; every decision is
a certificate in the report.

Storing rounds too: a matrix that f16 does not hold (or only as subnormal numbers) is stored in f32,
and so are both caches of an attention whose keys or values do not fit f16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.analysis import Analysis, Bound, Certificate, Evidence, Observed
from ..compiler.ir import Builder, DType, Graph, Level, Node, Parameters, Value, attribute
from .base import NearMiss, Pass, PassReport

DTYPES = {"float16": DType.F16, "bfloat16": DType.BF16}


@dataclass(frozen=True)
class AssignPrecision(Pass):
    """Sets `Value.precision`; `Constant.format` and `State.format` where f16 does not hold them.

    Args:
        dtype: float16 or bfloat16; float32 leaves the graph as it is.
        analysis: False rounds everything, safe or not (to see what the analysis is for).
        longest: tokens of one sequence.
        round_outputs: outputs may be rounded before they leave the graph as f32.
        parameters: weights by name; None: decide by the ops' meaning alone.
        observe: measures every value on calibration text; None: decide by proofs alone.
    """

    name: ClassVar[str] = "assign-precision"
    requires: ClassVar[tuple[Level, ...]] = (Level.FUSED,)
    dtype: str = "float32"
    analysis: bool = True
    longest: int = 8192
    round_outputs: bool = False
    parameters: Parameters | None = None
    observe: Callable[[Graph], Mapping[int, Observed]] | None = None

    @property
    def allowed(self) -> float:
        """Rounding every value of a deep model to bfloat16 (2^-8) or float16, on random input."""
        return {"float16": 0.03, "bfloat16": 0.25}.get(self.dtype, 0.0)

    def run(self, graph: Graph) -> PassReport:
        """Values kept in f32 are near misses, with the numbers that decided."""
        report = PassReport(self.name)
        target = DTYPES.get(self.dtype)
        if target is None:
            return report
        if self.round_outputs:
            _cast_outputs(graph)
        report.certificates = self._certificates(graph, target)
        chosen = {c.value: c for c in report.certificates if c.op != "parameter"}
        for node in graph.nodes:
            for value in node.results:
                certificate = chosen.get(value.name)
                if certificate is None:
                    continue
                if certificate.decision is target:
                    value.precision = target
                    report.fired.append(node.scope)
                else:
                    report.missed.append(NearMiss(node.scope, _sentence(certificate)))
        counts = Counter(c.decision.value for c in report.certificates)
        report.facts["values per precision"] = dict(sorted(counts.items()))
        return report

    def _certificates(self, graph: Graph, target: DType) -> list[Certificate]:
        if not self.analysis:
            return list(_blind(graph, target))
        observed = self.observe(graph) if self.observe else {}
        analysis = Analysis(graph, Evidence(self.parameters, observed, self.longest))
        _widen_caches(graph, analysis)
        return [*_widened(graph, analysis), *analysis.certificates(graph, target)]


def _cast_outputs(graph: Graph) -> None:
    builder = Builder(graph)
    for i, value in enumerate(graph.outputs):
        if value.node is not None and value.dtype is DType.F32:
            name, scope = f"{value.name}_f32", value.node.scope
            graph.outputs[i] = builder.emit("cast", [value], scope, name=name, dtype=DType.F32)


def _sentence(certificate: Certificate) -> str:
    return f"%{certificate.value} stays f32: {certificate.reason}"


def _blind(graph: Graph, target: DType) -> list[Certificate]:
    """Everything in the format, but what leaves the graph."""
    roots = {id(v) for v in graph.roots()}
    return [
        Certificate(v.name, n.op, n.scope, Bound(), None, 0.0, decision, "the analysis is off")
        for n in graph.nodes
        for v in n.results
        if v.dtype is DType.F32
        for decision in [DType.F32 if id(v) in roots else target]
    ]


def _widened(graph: Graph, analysis: Analysis) -> Iterator[Certificate]:
    """Matrices that f16 does not hold get f32; the certificate of each."""
    for const in graph.constants.values():
        if const.format == DType.F16.value:
            certificate = analysis.stored(const, DType.F16)
            const.format = certificate.decision.value
            if certificate.decision is DType.F32:
                yield certificate


def _widen_caches(graph: Graph, analysis: Analysis) -> None:
    """Keys and values of one attention share a format: f32 if f16 fails either."""
    for node in graph.nodes:
        if node.op == "paged_attention" and _too_wide(node, analysis):
            for side in ("key", "value"):
                state = graph.states[str(attribute(node, side))]
                state.format = "f32" if state.format == "f16" else state.format


def _too_wide(node: Node, analysis: Analysis) -> bool:
    written: list[Value] = [node.value(1), node.value(2)]
    return any(analysis.range_problem(v, DType.F16) for v in written)
