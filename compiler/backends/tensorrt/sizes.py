"""What an engine takes on the device, by its plan: weights, caches, temporaries per profile."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import NetworkPlan
from .target import Profile


def device_bytes(plan: NetworkPlan) -> dict[str, int]:
    """``weights``, ``kv cache`` of all sequences, and ``NAME temporaries`` of each profile.

    Temporaries are the most bytes alive at once if every layer's result is a buffer of its own: an
    estimate from above, as TensorRT fuses layers.
    """
    most = {"B": max(p.size("B", 2) for p in plan.profiles), "S": 1, "R": 1}
    cached = {tensor.name: tensor for tensor in plan.inputs}
    return {
        "weights": sum(c.tensor.nbytes({}) for c in plan.constants.values()),
        "kv cache": sum(cached[pair.input].nbytes(most) for pair in plan.aliases),
        **{f"{p.name} temporaries": _peak(plan, p) for p in plan.profiles},
    }


def _peak(plan: NetworkPlan, profile: Profile) -> int:
    """The most bytes alive after any layer of a step of the profile's largest sizes."""
    sizes = {dim: profile.size(dim, 2) for dim in ("B", "S", "R")}
    last = {name: i for i, layer in enumerate(plan.layers) for name in layer.inputs}
    outside = {t.name for t in (*plan.inputs, *plan.outputs)} | plan.constants.keys()
    return _most_alive(plan, sizes, last, outside)


def _most_alive(
    plan: NetworkPlan, sizes: Mapping[str, int], last: Mapping[str, int], outside: set[str]
) -> int:
    alive, total, most = dict[str, int](), 0, 0
    for index, layer in enumerate(plan.layers):
        for name in layer.outputs:
            if name not in outside:
                alive[name] = plan.tensors[name].nbytes(sizes)
                total += alive[name]
        most = max(most, total)
        for name in layer.inputs:
            if last[name] == index:
                total -= alive.pop(name, 0)
    return most
