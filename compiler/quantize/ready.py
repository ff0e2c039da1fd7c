"""Weights that are in a storage format already: stored as they are, never quantised again.

A GGUF file as source, a symmetric 4-bit checkpoint, or a quantiser that works on the whole model
(error feedback) gives them; whatever gives none is quantised on the way to the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from ...kernels import Format, pack
from .store import ROW_GROUP

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Blocks:
    """A matrix in logical rows, byte for byte as GGUF stores them.

    Args:
        format: storage format.
        rows: uint8 ``[N, row_bytes]``, ``[E, N, row_bytes]`` for stacked experts; may be mapped.
        k: elements of one row.
    """

    format: str
    rows: npt.NDArray[np.uint8]
    k: int


def store_blocks(blocks: Blocks) -> Iterator[memoryview]:
    """The bytes in rank0.weights, in order, a chunk at a time."""
    if blocks.rows.ndim == 3:
        for expert in blocks.rows:
            yield from store_blocks(Blocks(blocks.format, expert, blocks.k))
        return
    step = max(1, CHUNK_BYTES // blocks.rows.shape[1] // ROW_GROUP) * ROW_GROUP
    for first in range(0, len(blocks.rows), step):
        rows = np.ascontiguousarray(blocks.rows[first : first + step])
        yield pack(rows, cast(Format, blocks.format), len(rows), blocks.k).data
