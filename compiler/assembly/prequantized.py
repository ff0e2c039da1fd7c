"""Weights of a quantised source, kept bit for bit: as blocks of ours, or as lossless floats.

With ``--quantization none`` (or ``auto``) nothing is rounded. Integers on a grid of fp16 scales are
blocks already, if each block of 32 has one scale and code - zero point fits:

    -8 .. 7       q4_0, d * (q - 8)        symmetric 4 bits, and 2 or 3 bits
    -16 .. 15     q5_0, d * (q - 16)       4 bits with any zero point
    -128 .. 127   q8_0, d * q              symmetric 8 bits

Everything else (act-order, float8, other scales) becomes the narrowest float that is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ..frontend.checkpoint import Checkpoint
from ..ir import Constant
from ..quantize import Blocks, Given, stored_bytes
from ..quantize.roles import UNQUANTIZED, Role

BLOCK_SIZE = 32
ROWS = 1024
"""Rows packed at a time."""
BLOCKS = (("q4_0", -8, 7), ("q5_0", -16, 15), ("q8_0", -128, 127))
"""Formats `d * n`, with the range of the integer n, smallest first."""
BYTES = {"q4_0": 18, "q5_0": 22, "q8_0": 34}
FLOATS = ("f32", "f16", "bf16")


@dataclass
class Kept:
    """What was found for the matrices of one build.

    Args:
        checkpoint: the source.
        formats: format of each packed matrix so far, by the constant's name.
        bytes: what each takes in rank0.weights.
    """

    checkpoint: Checkpoint
    formats: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def given(self, const: Constant) -> Given | None:
        """The format that holds a packed matrix exactly; None for a plain one.

        Reads scales and zero points, no codes.
        """
        if const.parameter is None or len(const.shape) < 2 or Role(const.role) in UNQUANTIZED:
            return None
        precision = self.checkpoint.precision(const.parameter)
        if precision is None:
            return None
        format = "f32" if const.plus else precision.smallest_float()
        why = "the source's values, exact"
        if (block := self._block_format(const)) is not None:
            format, why = block, "the source's codes and scales"
        self.formats[const.name] = format
        shape = tuple(d for d in const.shape if isinstance(d, int))
        self.bytes[const.name] = stored_bytes(format, shape)
        return Given(format, why)

    def ready(self, const: Constant) -> Blocks | None:
        """The blocks of a matrix that `given` gave a block format."""
        if not self.keeps(const) or const.parameter is None:
            return None
        format = const.format
        integers = self.checkpoint.integers(const.parameter)
        assert integers is not None
        grid = integers.per_block(BLOCK_SIZE)
        assert grid is not None
        rows = slice(*const.rows) if const.rows else slice(None)  # outputs come first already
        codes, scales, zeros = (part[..., rows, :] for part in (integers.codes(), *grid))
        return Blocks(format, blocks(format, codes, scales, zeros), integers.columns)

    def keeps(self, const: Constant) -> bool:
        """Whether `ready` has blocks of a matrix; unpacks nothing."""
        return const.format not in FLOATS and const.format == self.formats.get(const.name)

    def _block_format(self, const: Constant) -> str | None:
        if const.plus or const.parameter is None:
            return None
        integers = self.checkpoint.integers(const.parameter)
        grid = integers and integers.per_block(BLOCK_SIZE)
        if integers is None or grid is None:
            return None
        if integers.inputs_first != const.transposed:
            return None
        # a rule that moves columns leaves scales whose rows aren't the parameter's
        *stack, n, k = self.checkpoint.parameters[const.parameter].shape
        if integers.scales.shape[:-1] != (*stack, k if const.transposed else n):
            return None
        scales = integers.scales.float()
        if not bool(scales.isfinite().all()) or not torch.equal(scales.half().float(), scales):
            return None
        low, high = integers.range
        return next((f for f, least, most in BLOCKS if least <= low and high <= most), None)

    def notes(self) -> Sequence[str]:
        """What a user may want to know about the formats; empty if nothing is packed."""
        if not self.formats:
            return []
        counts = Counter(self.formats.values())
        held = ", ".join(f"{counts[f]} as {f}" for f in sorted(counts))
        total = sum(self.bytes.values())
        lines = [f"quantised weights are kept bit for bit: {held}; {total / 1e6:.1f} MB in all"]
        wide = [name for name, format in self.formats.items() if format in FLOATS]
        if wide:
            size = sum(self.bytes[name] for name in wide)
            lines.append(
                f"{len(wide)} of them fit no block format of ours (act-order, float8 or scales "
                f"beyond fp16), first: {wide[0]}; as floats they take {size / 1e6:.1f} MB: "
                "--quantization q8_0 or another makes them smaller, at a loss"
            )
        return lines


def blocks(
    format: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> npt.NDArray[np.uint8]:
    """Logical rows (docs/storage-formats.md), uint8 ``[..., N, row bytes]``.

    Args:
        format: one of `BLOCKS`.
        codes: uint8 ``[..., N, K]``.
        scales: fp16 values, ``[..., N, K / 32]``.
        zeros: integers, ``[..., N, K / 32]``.
    """
    n, k = codes.shape[-2:]
    rows = np.empty((*codes.shape[:-1], k // BLOCK_SIZE * BYTES[format]), dtype=np.uint8)
    for first in range(0, n, ROWS):
        part = slice(first, first + ROWS)
        parts = (codes[..., part, :], scales[..., part, :], zeros[..., part, :])
        rows[..., part, :] = _rows(format, *parts)
    return rows


def _rows(
    format: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> npt.NDArray[np.uint8]:
    shift = {"q4_0": 8, "q5_0": 16, "q8_0": 0}[format]
    made = codes.unflatten(-1, (-1, BLOCK_SIZE)).to(torch.int16) + (shift - zeros.unsqueeze(-1))
    units = made.to(torch.int8).numpy().view(np.uint8)
    head = scales.half().unsqueeze(-1).contiguous().numpy().view(np.uint8)
    if format == "q8_0":
        parts = [head, units]
    else:
        nibbles = (units[..., :16] & 15) | (units[..., 16:] << 4)
        fifth = np.packbits(units >> 4, axis=-1, bitorder="little")
        parts = [head, fifth, nibbles] if format == "q5_0" else [head, nibbles]
    return np.concatenate(parts, axis=-1).reshape(*codes.shape[:-1], -1)
