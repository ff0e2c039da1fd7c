"""How large an engine will be: weights, caches, and what a step needs besides, from the plan alone.

The activations are an estimate: every tensor of the plan in its own memory as long as it is needed.
TensorRT fuses layers, so that most of them never exist, and adds workspace of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .plan import NetworkPlan
from .target import Profile

_VIEWS = ("shuffle", "unsqueeze")
"""Layers whose result may lie in their operand's bytes."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on the device.

    Args:
        weights: of all constants; with weight streaming less of it stays on the device.
        by_type: weights by element type.
        cache_per_token: keys and values of one token in all layers.
        caches: for all sequences, at full capacity.
        activations: the most that one step needs, by profile.
        logits: the largest output, by profile.
    """

    weights: int
    by_type: dict[str, int]
    cache_per_token: int
    caches: int
    activations: dict[str, int]
    logits: dict[str, int]

    @property
    def total(self) -> int:
        """Weights, caches, and the larger of the profiles' activations with its logits."""
        steps = [self.activations[name] + self.logits[name] for name in self.activations]
        return self.weights + self.caches + max(steps)

    def to_json(self) -> dict[str, object]:
        """As it stands in an engine's config and in `--plan-only`."""
        return {
            "weights": self.weights,
            "weights_by_type": dict(sorted(self.by_type.items())),
            "cache_per_token": self.cache_per_token,
            "caches": self.caches,
            "activations": self.activations,
            "logits": self.logits,
            "total": self.total,
        }


def memory_report(plan: NetworkPlan) -> MemoryReport:
    """The sizes of a plan's engine when it runs."""
    by_type = Counter[str]()
    for stored in plan.constants.values():
        by_type[stored.tensor.dtype] += stored.tensor.nbytes({})
    sequences = max(p.batches[2] for p in plan.profiles)
    states = {a.input for a in plan.aliases}
    one = sum(t.nbytes({"B": 1}) for t in plan.inputs if t.name in states)
    logits = next(t for t in plan.outputs if t.name not in {a.output for a in plan.aliases})
    return MemoryReport(
        weights=sum(by_type.values()),
        by_type=dict(by_type),
        cache_per_token=one // plan.capacity,
        caches=one * sequences,
        activations={p.name: _activations(plan, p) for p in plan.profiles},
        logits={p.name: logits.nbytes(_largest(p)) for p in plan.profiles},
    )


def _largest(profile: Profile) -> dict[str, int]:
    return {dim: profile.size(dim, 2) for dim in ("B", "S", "R")}


def _activations(plan: NetworkPlan, profile: Profile) -> int:
    """Peak of the tensors that are alive together; a view is its operand."""
    sizes = _largest(profile)
    root: dict[str, str] = {}
    last: dict[str, int] = {}
    for index, layer in enumerate(plan.layers):
        last.update({root.get(name, name): index for name in layer.inputs})
        if layer.kind in _VIEWS:
            root[layer.outputs[0]] = root.get(layer.inputs[0], layer.inputs[0])
    elsewhere = {t.name for t in (*plan.inputs, *plan.outputs)} | _weights(plan)
    alive: dict[str, int] = {}
    peak = 0
    for index, layer in enumerate(plan.layers):
        for name in layer.outputs:
            if name not in root and name not in elsewhere:
                alive[name] = plan.tensors[name].nbytes(sizes)
        peak = max(peak, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last.get(name, -1) > index}
    return peak


def _weights(plan: NetworkPlan) -> set[str]:
    """Constants, and what is made of constants alone: their casts and dequantised matrices."""
    names = set(plan.constants)
    for layer in plan.layers:
        if names.issuperset(layer.inputs):
            names.update(layer.outputs)
    return names
