"""Certificates: for every value, what precision is safe, by which bound, and why.

A value may be rounded to a format if (a) its range fits: proven by interval analysis, or observed
on calibration text with room to spare; (b) rounding it costs the end of its subpath no more than a
few units of the format, to first order, and it is not so small that it loses its low bits. Every
other value stays f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Constant, DType, Graph, Node, Parameters, Value
from .bounds import Bound
from .formats import FORMATS, Format
from .intervals import intervals
from .observe import Observed
from .sensitivity import Cost, costs, terms
from .weights import Weights

HEADROOM = 4.0
"""What was observed may grow this much on other text."""
STORED = 1.25
"""A proof counts if it holds for weights whose rows are this much longer: storage rounds them."""
BUDGET = 8.0
"""Units of rounding error at the end of a subpath: three of the format's bits."""


@dataclass(frozen=True)
class Certificate:
    """The decision for one value.

    Args:
        value: its name; `op` made it, in module `scope`.
        proven: bound by interval analysis, for any input.
        observed: measured on calibration text; None without.
        units: first-order error at the end of its subpath, in units of the format.
        decision: f32 or the format.
        reason: one sentence with the numbers that decided.
    """

    value: str
    op: str
    scope: str
    proven: Bound
    observed: Observed | None
    units: float
    decision: DType
    reason: str


@dataclass(frozen=True)
class Evidence:
    """What decisions rest on.

    Args:
        parameters: weights by name, read one at a time; None: nothing is known of them.
        observed: measurements by value id.
        longest: tokens of one sequence.
    """

    parameters: Parameters | None = None
    observed: Mapping[int, Observed] = field(default_factory=dict)
    longest: int = 8192


class Analysis:
    """Intervals and costs of one graph; `certificate` decides one value for one format."""

    def __init__(self, graph: Graph, evidence: Evidence) -> None:
        self._evidence = evidence
        self._roots = {id(v) for v in graph.roots()}
        self._weights = weights = Weights(evidence.parameters)
        positions = {"positions": Bound(0.0, float(evidence.longest - 1))}
        self.proven = intervals(graph, weights, evidence.longest, positions)
        scales: dict[int, Bound] = {k: self._scale(k, b) for k, b in self.proven.items()}
        for const in graph.constants.values():
            scales[id(const)] = _known(weights, const)
        self.costs = costs(graph, scales, evidence.longest)

    def _scale(self, key: int, proven: Bound) -> Bound:
        """What values are really like: the proof, tightened by what was observed."""
        seen = self._evidence.observed.get(key)
        return proven.meet(Bound(seen.low, seen.high)) if seen and seen.finite else proven

    def certificates(self, graph: Graph, target: DType) -> list[Certificate]:
        """One for every f32 result of the graph, in order."""
        return [
            self.certificate(node, value, target)
            for node in graph.nodes
            for value in node.results
            if value.dtype is DType.F32
        ]

    def certificate(self, node: Node, value: Value, target: DType) -> Certificate:
        """The decision for a result of `node`."""
        seen = self._evidence.observed.get(id(value))
        cost = self.costs.get(id(value), Cost(0.0, 0.0))
        units = cost.units * terms(node, self._evidence.longest) + lost(seen, FORMATS[target])
        refusal = self._refusal(node, value, target, cost, units)
        return Certificate(
            value.name,
            node.op,
            node.scope,
            self.proven[id(value)],
            seen,
            units,
            DType.F32 if refusal else target,
            refusal or self._grounds(value, target),
        )

    def stored(self, const: Constant, target: DType) -> Certificate:
        """The decision for a matrix that is to be stored in the format."""
        norms, form = self._weights.of(const), FORMATS[target]
        bound = norms.bound if norms else Bound()
        seen = Observed(bound.low, bound.high, norms.rms) if norms else None
        units, problem = 1.0 + lost(seen, form), ""
        if norms and bound.magnitude > form.largest:
            problem = f"holds {bound.magnitude:.5g}, over {form.largest:.5g}"
        elif seen and units > BUDGET:
            problem = _tiny(seen.rms, form)
        reason = problem or f"at most {bound.magnitude:.4g}, limit {form.largest:.5g}"
        decision = DType.F32 if problem else target
        return Certificate(const.name, "parameter", "", bound, seen, units, decision, reason)

    def _refusal(self, node: Node, value: Value, target: DType, cost: Cost, units: float) -> str:
        """Why the value stays f32; empty if it need not."""
        if id(value) in self._roots:
            return "leaves the graph as f32"
        if problem := self.range_problem(value, target):
            return problem
        if not units <= BUDGET:
            count = terms(node, self._evidence.longest)
            if count > 1:
                return f"adds up {count:.0f} terms: up to {units:.3g} units, allowed {BUDGET:g}"
            chain = " > ".join(cost.via)
            return f"rounding costs {units:.3g} units through {chain}, allowed {BUDGET:g}"
        return ""

    def range_problem(self, value: Value, target: DType) -> str:
        """Why the value's range does not fit; empty if it does."""
        form, proven = FORMATS[target], self.proven[id(value)].magnitude
        seen = self._evidence.observed.get(id(value))
        if seen is not None and not seen.finite:
            return "holds infinities"
        if lost(seen, form) > BUDGET:
            assert seen is not None
            return _tiny(seen.rms, form)
        if proven * STORED <= form.largest:
            return ""
        if seen is None:
            return "no bound is proven and nothing was observed"
        reach = seen.magnitude * HEADROOM
        if reach > form.largest:
            return f"{seen.magnitude:.5g} observed, x{HEADROOM:g} exceeds {form.largest:.5g}"
        return ""

    def _grounds(self, value: Value, target: DType) -> str:
        form, proven = FORMATS[target], self.proven[id(value)].magnitude
        if proven * STORED <= form.largest:
            return f"at most {proven:.4g} for any input, limit {form.largest:.5g}"
        seen = self._evidence.observed[id(value)]
        times = form.largest / seen.magnitude if seen.magnitude else form.largest
        return f"observed {seen.magnitude:.4g}, {times:.3g} times below {form.largest:.5g}"


def lost(seen: Observed | None, form: Format) -> float:
    """Units by which typical elements fall short of a full significand; 0 when all are zero."""
    return form.least / seen.rms if seen is not None and seen.rms > 0 else 0.0


def _tiny(rms: float, form: Format) -> str:
    lacking = form.least / rms
    return f"typically {rms:.3g}, below {form.least:.3g}: that loses {lacking:.3g} units"


def _known(weights: Weights, const: Constant) -> Bound:
    norms = weights.of(const)
    return norms.bound if norms else Bound()
