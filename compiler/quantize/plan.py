"""The storage plan of a model: every tensor's format, why, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from ...kernels import Format, packed_bytes
from .names import Quantization
from .policy import BLOCK, SHORT, Case, ModelFacts, choose, fitting, short_block
from .roles import VALUE_LIKE, Role


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be stored.

    Args:
        name: of the constant.
        role: what it is for.
        shape: ``[N, K]``, ``[E, N, K]`` for stacked experts, or one dimension.
        layer: index of the decoder layer, None outside of the layers.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    layer: int | None = None


@dataclass(frozen=True)
class Given:
    """A format that is settled before the rules are asked: `why` says by what.

    ``q4_k_short`` and its like (policy.SHORT) are the format with a short last block if K needs it;
    so is the bare format, for rows that need one.
    """

    format: str
    why: str


@dataclass(frozen=True)
class Choice:
    """What one tensor is stored as: `why` names the rule, `fallback` is empty or says what did not
    fit. `bytes` is its size in rank0.weights without padding to a page."""

    name: str
    role: Role
    shape: tuple[int, ...]
    format: str
    why: str
    fallback: str
    bytes: int


@dataclass(frozen=True)
class StoragePlan:
    """Every tensor's choice, in the order given to `plan`."""

    quantization: Quantization
    choices: tuple[Choice, ...]

    @property
    def formats(self) -> dict[str, str]:
        """Tensor name to storage format."""
        return {c.name: c.format for c in self.choices}

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(c.bytes for c in self.choices)

    @property
    def has_blocks(self) -> bool:
        """Whether any tensor is stored in blocks, not as floats."""
        return any(BLOCK[c.format] > 1 for c in self.choices)

    @property
    def elements(self) -> int:
        """Number of weights."""
        return sum(prod(c.shape) for c in self.choices)

    @property
    def bits_per_weight(self) -> float:
        """Average bits of one weight, scales included."""
        return 8 * self.bytes / self.elements if self.elements else 0.0

    @property
    def fallbacks(self) -> tuple[Choice, ...]:
        """Tensors that did not get the format their rule names."""
        return tuple(c for c in self.choices if c.fallback)

    def table(self) -> list[dict[str, object]]:
        """One row per role and format, largest first, for the report."""
        groups: dict[tuple[str, str, str, str], list[Choice]] = {}
        for choice in self.choices:
            key = (choice.role.value, choice.format, choice.why, choice.fallback)
            groups.setdefault(key, []).append(choice)
        rows = [
            {
                "role": role,
                "format": format,
                "tensors": len(members),
                "megabytes": round(sum(c.bytes for c in members) / 1e6, 3),
                "why": why,
                "instead of": fallback,
            }
            for (role, format, why, fallback), members in groups.items()
        ]
        return sorted(rows, key=lambda row: (-float(str(row["megabytes"])), str(row["role"])))


def plan(
    quantization: Quantization,
    tensors: Sequence[TensorSpec],
    model: ModelFacts,
    given: Mapping[str, Given] | None = None,
) -> StoragePlan:
    """Choose every tensor's format: as `given` for its name, else by role and shape."""
    positions = _positions(tensors, model)
    choices = []
    for tensor, (index, count) in zip(tensors, positions, strict=True):
        case = Case(tensor.role, tensor.shape[-1], index, count, model)
        if given and tensor.name in given:
            settled = given[tensor.name]
            format, fallback = _as_given(settled, tensor.shape[-1])
            rest = short_block(format, tensor.shape[-1])
            why = f"{settled.why}, last block of {rest}" if rest else settled.why
        else:
            format, why, fallback = choose(quantization, case, len(tensor.shape))
        size = stored_bytes(format, tensor.shape)
        choices.append(Choice(tensor.name, tensor.role, tensor.shape, format, why, fallback, size))
    return StoragePlan(quantization, tuple(choices))


def _as_given(settled: Given, k: int) -> tuple[str, str]:
    """The format of rows of k elements, and what did not fit."""
    return fitting(settled.format, k) if settled.format in SHORT else (settled.format, "")


def stored_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in rank0.weights: plain f32 for one dimension, else packed matrices."""
    if len(shape) < 2:
        return 4 * prod(shape)
    *stack, n, k = shape
    return prod(stack) * packed_bytes(cast(Format, format), n, k)


def _positions(tensors: Iterable[TensorSpec], model: ModelFacts) -> list[tuple[int, int]]:
    """(index, count) of every tensor in its group, as llama.cpp counts.

    Values are counted among the tensors that carry values (a hybrid model has fewer than layers);
    `ffn_down` among the layers: in order of appearance, or, with experts, by the layer itself, as
    one layer may have several; where it isn't known, stacked and plain ones count apart.
    """
    specs = list(tensors)
    values = sum(s.role in VALUE_LIKE and len(s.shape) > 1 for s in specs)
    seen: Counter[tuple[str, bool]] = Counter()
    result: dict[int, tuple[int, int]] = {}
    order = sorted(range(len(specs)), key=lambda i: (specs[i].layer is None, specs[i].layer or 0))
    for i in order:
        spec = specs[i]
        group = "value" if spec.role in VALUE_LIKE else spec.role.value
        count = values if group == "value" else model.layers
        by_layer = spec.role == Role.FFN_DOWN and model.experts > 1 and spec.layer is not None
        kind = (group, spec.role == Role.FFN_DOWN and len(spec.shape) == 3)
        index = spec.layer if by_layer and spec.layer is not None else seen[kind]
        seen[kind] += len(spec.shape) > 1
        result[i] = (index, count)
    return [result[i] for i in range(len(specs))]
