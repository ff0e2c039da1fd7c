"""Constants of a network against the graph's, by the SHA-256 of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...ir import Constant, Graph
from .constants import INT4_FORMAT, Constants, Int4Matrix, digest, rounded
from .finding import Finding
from .read import ReadLayer, ReadNetwork
from .target import Target

SMALL = 1024
"""Elements that a constant may have without standing for one of the graph's: scalars, slopes."""


def constant_findings(
    network: ReadNetwork, graph: Graph, constants: Constants, target: Target
) -> Iterator[Finding]:
    """Missing, changed and unknown constants."""
    layers: dict[str, list[ReadLayer]] = {}
    for layer in network.layers:
        if layer.kind == "CONSTANT":
            name = source(layer.output, graph)
            layers.setdefault(name, []).append(layer)
    for layer in layers.pop("", []):
        yield from _unknown(layer)
    for name, const in graph.constants.items():
        if name not in layers:
            yield Finding(f"@{name}", "the network doesn't have it")
            continue
        yield from _same(network, const, layers[name], constants(name), target)


def source(tensor: str, graph: Graph) -> str:
    """The constant of the graph that a network constant is named after; empty if none."""
    if not tensor.startswith("@"):
        return ""
    name = tensor[1:]
    if name in graph.constants:
        return name
    stem, _, rest = name.rpartition(".")
    if rest.isdigit():
        return source(f"@{stem}", graph)
    return stem if rest == "scales" and stem in graph.constants else ""


def _unknown(layer: ReadLayer) -> Iterator[Finding]:
    assert layer.array is not None
    array = layer.array
    counts = np.arange(array.size, dtype=array.dtype).reshape(array.shape)
    if array.size > SMALL and not np.array_equal(array, counts):
        yield Finding(layer.name, f"{array.size} numbers that are no constant of the graph")


def _same(
    network: ReadNetwork,
    const: Constant,
    layers: list[ReadLayer],
    values: npt.NDArray[Any] | Int4Matrix,
    target: Target,
) -> Iterator[Finding]:
    parts = set[str]()
    for layer in layers:
        dtype = network.tensors[layer.output].dtype
        parts.add("scales" if ".scales" in layer.output else dtype)
        problem = _type_problem(const, dtype, target)
        if problem:
            yield Finding(f"@{const.name}", problem)
            continue
        wanted = _expected(values, dtype)
        assert layer.array is not None
        if layer.array.shape[-wanted.ndim :] != wanted.shape:
            shape = list(layer.array.shape)
            yield Finding(f"@{const.name}", f"it has shape {shape}, not {list(wanted.shape)}")
        elif (found := digest(layer.array)) != (right := digest(wanted)):
            yield Finding(
                f"@{const.name}", f"its bytes have SHA-256 {found[:16]}, not {right[:16]}"
            )
    if const.format == INT4_FORMAT and parts != {"int4", "scales"}:
        yield Finding(f"@{const.name}", f"it is stored as {', '.join(sorted(parts))}")


def _type_problem(const: Constant, dtype: str, target: Target) -> str:
    """Why a constant may not be stored in this type."""
    half = target.dtype.value
    if const.format == INT4_FORMAT:
        return "" if dtype in ("int4", "f32", half) else f"its scales are stored in {dtype}"
    if const.format in ("f16", "bf16"):
        return "" if dtype == half else f"it is stored in {dtype}, not {half}"
    if const.format == "f32" and dtype in ("f16", "bf16"):
        return f"it is stored in {dtype}, which does not hold it"
    return ""


def _expected(values: npt.NDArray[Any] | Int4Matrix, dtype: str) -> npt.NDArray[Any]:
    if not isinstance(values, Int4Matrix):
        return rounded(values, dtype)
    if dtype == "int4":
        return np.ascontiguousarray(values.packed)
    return values.stored_scales(dtype)
