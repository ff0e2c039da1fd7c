"""Weights that are integers on a grid: value = scale * (code - zero point).

The difference is exact, and so is the product with an fp16 or bf16 scale in float32: 11 bits of
the scale and at most 9 of the difference fit into 24. Kernels that compute in fp16 or bf16 round
that product once more, to half a unit in the last place of their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .precision import Precision

ROWS = 1024
"""Rows that are converted at a time, to bound what is held besides the result."""


@dataclass(frozen=True)
class Integers:
    """A weight ``[N, K]``, or a stack ``[E, N, K]``, before it is multiplied out.

    Args:
        bits: codes are 0 .. 2**bits - 1.
        columns: K.
        scales: float ``[..., N, G]``.
        zeros: int16 ``[..., N, G]``.
        codes: gives uint8 ``[..., N, K]``; called when they are needed.
        groups: int64 ``[K]``, the group of each column; None for runs of equal length.
        inputs_first: the parameter is the transpose, [K, N].
    """

    bits: int
    columns: int
    scales: torch.Tensor
    zeros: torch.Tensor
    codes: Callable[[], torch.Tensor]
    groups: torch.Tensor | None = None
    inputs_first: bool = False

    @property
    def range(self) -> tuple[int, int]:
        """Bounds of code - zero point."""
        return -int(self.zeros.max()), (1 << self.bits) - 1 - int(self.zeros.min())

    def precision(self) -> Precision:
        """What the values need of a float."""
        largest = max(map(abs, self.range))
        return Precision.of(self.scales, largest.bit_length(), 0, largest)

    def per_block(self, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales and zero points ``[..., N, K / size]`` of runs of `size` columns.

        None if a run would need several of them.
        """
        if self.groups is not None:
            if len(self.groups) % size:
                return None
            by_block = self.groups.unflatten(0, (-1, size))
            if not bool((by_block == by_block[:, :1]).all()):
                return None
            return self.scales[..., by_block[:, 0]], self.zeros[..., by_block[:, 0]]
        each, rest = divmod(self.columns, self.scales.shape[-1] * size)
        if rest:
            return None
        return self.scales.repeat_interleave(each, -1), self.zeros.repeat_interleave(each, -1)

    def values(self) -> torch.Tensor:
        """float32 ``[N, K]``: scale * (code - zero point)."""
        codes = self.codes()
        out = torch.empty(codes.shape, dtype=torch.float32)
        for first in range(0, len(codes), ROWS):
            rows = slice(first, first + ROWS)
            scales, zeros = self.scales[rows].float(), self.zeros[rows].float()
            if self.groups is None:
                whole, count = out[rows].unflatten(-1, (scales.shape[-1], -1)), scales.shape[-1]
                whole.copy_(codes[rows].unflatten(-1, (count, -1)))
                whole.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
            else:
                part = out[rows].copy_(codes[rows])
                part.sub_(zeros[:, self.groups]).mul_(scales[:, self.groups])
        return out


def runs(columns: int, group: int) -> torch.Tensor | None:
    """Groups of `group` columns in order: None if they are equally long, else each one's index."""
    return None if columns % group == 0 else torch.arange(columns) // group


def unpack_words(words: torch.Tensor, bits: int, count: int, dim: int = 1) -> torch.Tensor:
    """The first `count` codes of each stream, uint8 of the shape of `words` but for `dim`.

    Args:
        words: int32 matrix; along `dim` runs a dense little-endian bit stream: code i is in bits
            ``[bits * i, bits * (i + 1))``, and may begin in one word and end in the next.
        bits: of one code, 1 to 8.
        count: codes to take.
        dim: 0 or 1.
    """
    shape = (count, words.shape[1]) if dim == 0 else (words.shape[0], count)
    out = torch.empty(shape, dtype=torch.uint8)
    stream, codes = words.transpose(0, dim), out.transpose(0, dim)
    period = 32 // bits if 32 % bits == 0 else 32  # codes until one begins a word again
    step = period * bits // 32
    for position in range(min(period, count)):
        wanted = len(range(position, count, period))
        word, shift = divmod(position * bits, 32)
        here = min(bits, 32 - shift)
        part = stream[word::step][:wanted] >> shift & ((1 << here) - 1)
        if here < bits:
            rest = stream[word + 1 :: step][:wanted] & ((1 << (bits - here)) - 1)
            part |= rest << here
        codes[position::period] = part
    return out


def words_for(count: int, bits: int) -> int:
    """32-bit words that hold `count` codes."""
    return -(-count * bits // 32)
