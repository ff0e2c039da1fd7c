"""compressed-tensors (llm-compressor): integers packed or plain, and float8.

Which settings a module has is found by its name in `config_groups`; what is stored decides whether
it is quantised at all, so the `ignore` list isn't needed. For N outputs and K inputs:

    pack-quantized   weight_packed i32 [N, K * bits / 32] dense bit stream of code + 2**(bits - 1)
                     weight_shape [N, K], weight_scale [N, G], and if asymmetric
                     weight_zero_point i32 [N * bits / 32, G] packed down the rows, or int8 [N, G];
                     weight_g_idx i32 [K] with act-order (older versions)
    int-quantized    weight i8 [N, K], weight_scale, weight_zero_point i8 of the scale's shape
    float-quantized  weight f8 [N, K], weight_scale

    weight[n, k] = weight_scale[n, g] * (code - zero point)

Scales are one, one per row, or one per group of inputs (or block of float8). Source: `dequantize`
of compressed-tensors 0.20, which rounds each product to the dtype of the scale; we don't.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from ....errors import SpikeError
from ..safetensors_file import StoredTensor
from .fp8 import FLOAT8, WHOLE, float8
from .integers import Integers, runs, unpack_words, words_for
from .packed import (
    SCALES,
    Packed,
    Parts,
    ReadTensor,
    Scheme,
    require_form,
    require_matrix,
    require_parts,
    split_leaf,
)
from .precision import Precision
from .settings import Settings

PARTS = (
    *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "weight",
)
BITS = (2, 4, 8)
"""Whose packing is the same in all versions of the package."""


@dataclass(frozen=True)
class Group:
    """Settings of the modules that `targets` name.

    Args:
        targets: names, `re:` patterns or class names.
        bits: of a code.
        symmetric: without zero points.
        group_size: inputs that share a scale; 0 for one scale per row or tensor.
        block: rows and columns that share a scale, if they are blocks.
    """

    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    group_size: int
    block: tuple[int, int] | None

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """One entry of `config_groups`. Raises SPK140."""
        targets = settings.get("targets") or []
        weights = settings.get("weights")
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise settings.wrong("weights", "an object, with a list of `targets` beside it")
        weights = settings.part("weights", weights)
        block = weights.get("block_structure")
        if isinstance(block, str):
            block = [int(size) if size.isdigit() else 0 for size in block.split("x")]
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(_is_size(size) for size in block)
        ):
            raise weights.wrong("block_structure", "two positive numbers")
        size = weights.group_size("group_size", default=-1)
        return cls(
            tuple(target for target in targets if isinstance(target, str)),
            weights.integer("num_bits", default=8),
            weights.flag("symmetric", default=True),
            max(size, 0),
            (block[0], block[1]) if block else None,
        )

    def rank(self, module: str) -> int | None:
        """How closely this group names a module: 0 by name, 1 by pattern, 2 by class."""
        if module in self.targets:
            return 0
        patterns = (t.removeprefix("re:") for t in self.targets if t.startswith("re:"))
        if any(re.match(pattern, module) for pattern in patterns):
            return 1
        return 2 if "Linear" in self.targets else None


@dataclass(frozen=True)
class IntegerMatrix(Packed):
    """One integer layer, packed (`weight_packed`) or plain (`weight`)."""

    bits: int
    symmetric: bool
    group_size: int

    def check_values(self, read: ReadTensor) -> str | None:
        """Group indices in range."""
        if (entry := self.parts.get("weight_g_idx")) is None:
            return None
        indices, groups = read(entry.name), self.parts["weight_scale"].shape[-1]
        # -1 everywhere is how an unused index is initialised
        if bool(((indices < 0) | (indices >= groups)).any()) and not bool((indices == -1).all()):
            at = int(((indices < 0) | (indices >= groups)).nonzero()[0])
            raise SpikeError(
                "SPK143",
                "checkpoint",
                f"{entry.name}[{at}] is {int(indices[at])}, but the layer has {groups} groups.",
                "Download the checkpoint again.",
            )
        return None

    def integers(self, read: ReadTensor) -> Integers:
        """Codes and zero points moved up to 0 .. 2**bits - 1."""
        rows, columns = self.shape
        scales = read(self.parts["weight_scale"].name)
        scales = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1)
        scales = scales.expand(rows, -1)
        middle = 1 << (self.bits - 1)

        def codes() -> torch.Tensor:
            if "weight_packed" in self.parts:
                return unpack_words(read(self.parts["weight_packed"].name), self.bits, columns)
            return (read(self.parts["weight"].name).view(torch.uint8) + 128) & 0xFF

        if self.symmetric:
            zeros = torch.full(scales.shape, middle, dtype=torch.int16)
        else:
            zeros = self._zeros(read(self.parts["weight_zero_point"].name), scales.shape)
        return Integers(self.bits, columns, scales, zeros, codes, self._groups(read))

    def _zeros(self, stored: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """int16 [N, G], of packed words or of signed integers."""
        if stored.dtype == torch.int32 and "weight_packed" in self.parts:
            return unpack_words(stored, self.bits, shape[0], dim=0).to(torch.int16)
        signed = stored.to(torch.int16) + (1 << (self.bits - 1))
        return signed.reshape(-1, shape[1]).expand(shape)

    def _groups(self, read: ReadTensor) -> torch.Tensor | None:
        columns = self.shape[1]
        if (entry := self.parts.get("weight_g_idx")) is not None:
            indices = read(entry.name).long()
            size = self.group_size or columns
            if bool((indices >= 0).all()) and not torch.equal(
                indices, torch.arange(columns) // size
            ):
                return indices
        return runs(columns, self.group_size or columns)

    def precision(self, read: ReadTensor) -> Precision:
        """By scales and zero points."""
        return self.integers(read).precision()

    def load(self, read: ReadTensor) -> torch.Tensor:
        """scale * (code - zero point), exact in float32 for fp16 and bf16 scales."""
        return self.integers(read).values()


class CompressedTensors(Scheme):
    """All modules of a compressed-tensors checkpoint. Raises SPK140 for bad settings."""

    dropped = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
               ".k_scale", ".v_scale", ".q_scale", ".input_global_scale")  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        entries = settings.get("config_groups")
        if not isinstance(entries, dict) or not entries:
            raise settings.wrong("config_groups", "an object with the settings of the modules")
        self.settings = settings
        self.groups = tuple(
            Group.read(settings.part(name, entry))
            for name, entry in entries.items()
            if isinstance(entry, dict) and entry.get("weights")
        )
        form = settings.word("format", default="dense")
        bits = sorted({group.bits for group in self.groups})
        self.compressed = form != "dense"
        self.label = f"compressed-tensors {form}, {' and '.join(map(str, bits))} bits"
        if _quantises_activations(entries) or settings.get("kv_cache_scheme"):
            self.remarks = (
                "the source quantises activations or the KV cache as well; that is left out",
            )

    def part(self, entry: StoredTensor) -> tuple[str, str] | None:
        """By name; a plain `weight` counts only if it is stored in 8 bits."""
        if entry.name.endswith(".weight") and entry.dtype not in (*FLOAT8, "I8"):
            return None
        return split_leaf(entry.name, PARTS)

    def packed(self, name: str, parts: Parts, read: ReadTensor) -> Packed:
        """Checks every shape against the module's settings."""
        group = self._group(name)
        if not {"weight", "weight_packed", "weight_shape"} & parts.keys() and not self.compressed:
            raise self.settings.wrong(
                "format", f"that of compressed weights, as {name}_scale is stored; a checkpoint "
                "whose weights are still to be rounded isn't taken"
            )  # fmt: skip
        require_parts(name, parts, ("weight_scale",), self.label)
        if "weight_packed" not in parts:
            codes = "weight_packed" if "weight_shape" in parts else "weight"
            require_parts(name, parts, (codes,), self.label)
            if parts["weight"].dtype in FLOAT8:
                return self._float8(name, parts, group)
        if not group.symmetric:
            require_parts(name, parts, ("weight_zero_point",), self.label)
        rows, columns = self._shape(name, parts, group, read)
        size = group.group_size or columns
        why = f"{rows} x {columns}, {group.bits} bits, {_grain(group)}"
        grid = (rows, columns // size)
        if columns % size:  # the format has no short last group
            require_form(parts["weight_scale"], SCALES, [], why)
        shapes = [grid] if group.group_size else [grid, (rows,), (1,), (1, 1), ()]
        require_form(parts["weight_scale"], SCALES, shapes, why)
        if not group.symmetric:
            packed = (words_for(rows, group.bits), grid[1])
            signed = parts["weight_scale"].shape
            require_form(parts["weight_zero_point"], ("I32", "I8"), [packed, signed], why)
        if "weight_g_idx" in parts:
            require_form(parts["weight_g_idx"], ("I32", "I64"), [(columns,)], why)
        return IntegerMatrix(
            name, parts, (rows, columns), group.bits, group.symmetric, group.group_size
        )

    def _float8(self, name: str, parts: Parts, group: Group) -> Packed:
        blocks = [group.block] if group.block else [WHOLE]
        if group.group_size:
            blocks = [(1, group.group_size)]
        roles = {"weight": parts["weight"], "scale": parts["weight_scale"]}
        return float8(name, roles, blocks)

    def _shape(self, name: str, parts: Parts, group: Group, read: ReadTensor) -> tuple[int, int]:
        """(N, K) of the module: as `weight_shape` holds it, which the codes must agree with."""
        if "weight_packed" not in parts:
            require_matrix(parts["weight"], ("I8",), "8-bit codes")
            self.settings.one_of(group.bits, (8,), "num_bits")
            rows, columns = parts["weight"].shape
            return rows, columns
        self.settings.one_of(group.bits, BITS, "num_bits")
        require_parts(name, parts, ("weight_shape",), self.label)
        require_form(parts["weight_shape"], ("I64", "I32"), [(2,)], "rows and columns")
        rows, columns = (int(size) for size in read(parts["weight_shape"].name))
        require_matrix(parts["weight_packed"], ("I32",), "codes in 32-bit words")
        width = words_for(columns, group.bits)
        why = f"{rows} x {columns} codes of {group.bits} bits, as {name}_shape says"
        require_form(parts["weight_packed"], ("I32",), [(rows, width)], why)
        return rows, columns

    def _group(self, name: str) -> Group:
        module = name.removesuffix(".weight")
        ranked = [(rank, g) for g in self.groups if (rank := g.rank(module)) is not None]
        if ranked:
            return min(ranked, key=lambda pair: pair[0])[1]
        if len(self.groups) == 1:
            return self.groups[0]
        raise SpikeError(
            "SPK140",
            "checkpoint",
            f"{module} is stored quantised, but no target in {self.settings.origin} of "
            f"{self.settings.directory} names it.",
            "Correct `targets`, or download config.json again.",
        )


def _grain(group: Group) -> str:
    return f"groups of {group.group_size}" if group.group_size else "one scale per row or tensor"


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _quantises_activations(groups: Mapping[str, Any]) -> bool:
    return any(isinstance(g, dict) and g.get("input_activations") for g in groups.values())
