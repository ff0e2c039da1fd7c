"""AWQ as AutoAWQ stores it for its GEMM kernels.

A linear layer of K inputs and N outputs, 4 bits, groups of `group_size` inputs:

    qweight  i32 [K, N / 8]   nibble i of a word holds output 8w + ORDER[i]
    qzeros   i32 [G, N / 8]   zero points, in the same order
    scales   f16 [G, N]

    weight[n, k] = scales[g, n] * (code - zero),  g = k // group_size

Source: `WQLinear_GEMM` and `dequantize_gemm` of AutoAWQ 0.2.9, which round each product to fp16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..safetensors_file import StoredTensor
from .integers import Integers, unpack_words
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

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4


@dataclass(frozen=True)
class AwqMatrix(Packed):
    """One AWQ layer."""

    def integers(self, read: ReadTensor) -> Integers:
        """Outputs first."""
        zeros = _outputs_first(read(self.parts["qzeros"].name)).to(torch.int16)
        scales = read(self.parts["scales"].name).t()

        def codes() -> torch.Tensor:
            return _outputs_first(read(self.parts["qweight"].name))

        return Integers(BITS, self.shape[1], scales, zeros, codes)

    def precision(self, read: ReadTensor) -> Precision:
        """By scales and zero points."""
        return self.integers(read).precision()

    def load(self, read: ReadTensor) -> torch.Tensor:
        """scale * (code - zero point), exact in float32."""
        return self.integers(read).values()


class Awq(Scheme):
    """All AWQ layers of a checkpoint. Raises SPK140 for bad settings."""

    def __init__(self, settings: Settings) -> None:
        settings.one_of(settings.integer("bits", "w_bit", default=BITS), (BITS,), "bits")
        self.group_size = settings.group_size("group_size", "q_group_size", default=128)
        size = "whole rows" if self.group_size == -1 else f"groups of {self.group_size}"
        self.label = f"AWQ, {BITS} bits, {size}"

    def part(self, entry: StoredTensor) -> tuple[str, str] | None:
        """By name alone."""
        return split_leaf(entry.name, PARTS)

    def packed(self, name: str, parts: Parts, read: ReadTensor) -> AwqMatrix:
        """Checks every shape against the codes'."""
        require_parts(name, parts, PARTS, self.label)
        codes = parts["qweight"]
        require_matrix(codes, ("I32",), "codes in 32-bit words")
        columns, words = codes.shape
        outputs = words * 8
        size = columns if self.group_size == -1 else self.group_size
        why = f"{columns} inputs in groups of {size}, {outputs} outputs"
        if columns % size:  # the format has no short last group
            require_form(codes, ("I32",), [], why)
        groups = columns // size
        require_form(parts["scales"], SCALES, [(groups, outputs)], why)
        require_form(parts["qzeros"], ("I32",), [(groups, words)], why)
        return AwqMatrix(name, parts, (outputs, columns))


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """uint8 [8w, rows] of int32 [rows, w]: nibbles in output order."""
    count = words.shape[1] * 8
    nibbles = unpack_words(words, BITS, count).unflatten(1, (-1, 8))
    ordered = torch.empty_like(nibbles)
    ordered[..., list(ORDER)] = nibbles
    return ordered.flatten(1).t().contiguous()
