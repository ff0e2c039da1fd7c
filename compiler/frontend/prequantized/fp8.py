"""Weights in float8 with scales: per block, per group, per row or per tensor.

    weight        f8_e4m3 [.., N, K]
    its scale     f32 or bf16: one, [N], [N, 1], or [.., ceil(N / rows), ceil(K / columns)]

    value = float32(weight) * float32(scale)      rounded once, to float32

Despite its name, `weight_scale_inv` (DeepSeek) multiplies. Blocks are counted from the first row
and column and the last ones may be short; transformers 5.24 derives the block from the shape of the
scales instead, which is wrong for matrices that are no multiple of it. Scales stored as bytes
(`F8_E8M0`, or `U8` of mxfp8) are powers of two: 2**(byte - 127).

Source: `weight_dequant` of DeepSeek-V3's inference code; `dequantize` of compressed-tensors 0.20,
which rounds the product to the dtype of the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..safetensors_file import StoredTensor
from .packed import Packed, Parts, ReadTensor, Scheme, require_form, require_matrix, require_parts
from .precision import Precision
from .settings import Settings

CODES = {"F8_E4M3": (4, -9, 448.0), "F8_E5M2": (3, -16, 57344.0)}
"""Bits of the significand, exponent of the smallest step, largest magnitude."""
FLOAT8 = tuple(CODES)
BYTES = ("U8", "F8_E8M0")
SCALES = ("F32", "BF16", "F16", *BYTES)
ENDINGS = (("_scale_inv", ""), (".weight_scale", ".weight"))
"""Of a scale's name, and what takes its place in the weight's."""
EXPONENT_BIAS = 127
WHOLE = (0, 0)
"""Stands for scales per row or tensor among the blocks."""


@dataclass(frozen=True)
class Float8Matrix(Packed):
    """One float8 weight.

    Args:
        block: rows and columns that share a scale.
    """

    block: tuple[int, int]

    def load(self, read: ReadTensor) -> torch.Tensor:
        """float32 weight times float32 scale."""
        values = read(self.parts["weight"].name).to(torch.float32)
        *stack, rows, columns = values.shape
        height, width = self.block
        grid = (-(-rows // height), -(-columns // width))
        scales = scale_values(read(self.parts["scale"].name)).reshape(*stack, *grid)
        for band in range(grid[0]):
            part = values[..., band * height : (band + 1) * height, :]
            wide = scales[..., band, :].repeat_interleave(width, -1)[..., :columns]
            part.mul_(wide.unsqueeze(-2))
        return values

    def precision(self, read: ReadTensor) -> Precision:
        """By the scales."""
        bits, unit, largest = CODES[self.parts["weight"].dtype]
        return Precision.of(scale_values(read(self.parts["scale"].name)), bits, unit, largest)


class Fp8(Scheme):
    """Checkpoints of `fp8`, `mxfp8` and `fbgemm_fp8`. Raises SPK140 for bad settings."""

    dropped = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")

    def __init__(self, settings: Settings, method: str) -> None:
        usual = {"mxfp8": (1, 32)}.get(method, (128, 128))
        block = settings.values.get("weight_block_size", usual)
        if block is not None and not (
            isinstance(block, list | tuple)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        ):
            raise settings.wrong("weight_block_size", "two positive numbers, or null")
        self.blocks = [(block[0], block[1])] if block else []
        if "weight_block_size" not in settings.values and method != "mxfp8":
            self.blocks.append(WHOLE)  # AutoFP8 and vLLM leave it out where they have no blocks
        self.label = f"{method}, blocks of {block[0]} x {block[1]}" if block else method
        self.remarks = ("the source quantises activations as well; the engine doesn't",)

    def part(self, entry: StoredTensor) -> tuple[str, str] | None:
        """Scales by name, weights by dtype."""
        for ending, of in ENDINGS:
            if entry.name.endswith(ending):
                return entry.name.removesuffix(ending) + of, "scale"
        return (entry.name, "weight") if entry.dtype in FLOAT8 else None

    def packed(self, name: str, parts: Parts, read: ReadTensor) -> Float8Matrix:
        """Checks the scale's shape."""
        require_parts(name, parts, ("weight", "scale"), self.label)
        return float8(name, parts, self.blocks)


def float8(name: str, parts: Parts, blocks: Sequence[tuple[int, int]]) -> Float8Matrix:
    """A float8 weight whose scales are for one of `blocks`; none means per row or tensor.

    Raises: SPK142.
    """
    weight, scale = parts["weight"], parts["scale"]
    require_matrix(weight, FLOAT8, "a float8 matrix", stack=True)
    *stack, rows, columns = weight.shape
    shapes: dict[tuple[int, ...], tuple[int, int]] = {}
    for height, width in (block for block in blocks if block != WHOLE):
        shapes[*stack, -(-rows // height), -(-columns // width)] = (height, width)
    why = f"{rows} x {columns}, {' or '.join(f'blocks of {h} x {w}' for h, w in blocks if h)}"
    if not blocks or WHOLE in blocks:
        whole, row = (rows, columns), (1, columns)
        per_row = {(*stack, rows): row, (*stack, rows, 1): row}
        shapes = per_row | {(*stack, 1): whole, (*stack, 1, 1): whole, tuple(stack): whole} | shapes
        why += " per row or tensor"
    require_form(scale, SCALES, list(shapes), why)
    return Float8Matrix(name, parts, weight.shape, shapes[scale.shape])


def scale_values(stored: torch.Tensor) -> torch.Tensor:
    """float32 scales; bytes are exponents."""
    if stored.dtype == torch.float8_e8m0fnu:
        stored = stored.view(torch.uint8)
    if stored.dtype != torch.uint8:
        return stored.float()
    # ldexp on float64, as 2**-127 is denormal in float32
    powers = torch.ldexp(
        torch.ones(stored.shape, dtype=torch.float64), stored.int() - EXPONENT_BIAS
    )
    return torch.where(stored == 255, torch.nan, powers).float()
