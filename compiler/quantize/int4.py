"""int4_sym as TensorRT reads it: signed nibbles side by side, and a scale per 32 values.

TensorRT's dequantise layer computes value = q * scale with q in -8..7 and every scale above zero.
A logical row of int4_sym is q4_0's (docs/storage-formats.md): per 32 values an fp16 scale, then 16
bytes, byte j with value j in the low nibble and value j + 16 in the high one, each plus 8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

INT4_SYM = "int4_sym"
BLOCK_BYTES = 18


def signed_nibbles(
    rows: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """Logical rows uint8 ``[N, row_bytes]`` -> (uint8 ``[N, K / 2]``, f16 ``[N, K / 32]``).

    Two's complement, the value of lower k in the low nibble. ValueError for a scale that is not
    above zero: rows of q4_0 may have such.
    """
    n = len(rows)
    blocks = rows.reshape(n, -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if not (scales > 0).all():
        raise ValueError("a scale of int4_sym is not above zero")
    nibbles = blocks[..., 2:] ^ 0x88  # q + 8 and q differ in the highest bit
    low, high = nibbles & 15, nibbles >> 4  # values 0..15 and 16..31
    packed = np.concatenate([low[..., ::2] | (low[..., 1::2] << 4),
                             high[..., ::2] | (high[..., 1::2] << 4)], -1)  # fmt: skip
    return packed.reshape(n, -1), scales


def has_positive_scales(rows: npt.NDArray[np.uint8]) -> bool:
    """Whether rows of q4_0, uint8 ``[..., row_bytes]``, are rows of int4_sym as well."""
    blocks = rows.reshape(-1, BLOCK_BYTES)
    return bool((np.ascontiguousarray(blocks[:, :2]).view(np.float16) > 0).all())
