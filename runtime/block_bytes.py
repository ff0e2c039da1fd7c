"""The pools' memory block by block: a block is the same range of every pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockBytes:
    """Copies blocks inside the pools, and in and out of them.

    Args:
        pools: uint8, C-contiguous, each with blocks of one size, one after the other.
        num_blocks: in each of them.
    """

    def __init__(self, pools: Sequence[NDArray[np.uint8]], num_blocks: int) -> None:
        self._pools = [pool.reshape(num_blocks, -1) for pool in pools]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all pools."""
        return sum(pool.shape[1] for pool in self._pools)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) by (source, destination), in this order."""
        for source, destination in copies:
            for pool in self._pools:
                pool[destination] = pool[source]

    def read(self, block: int) -> NDArray[np.uint8]:
        """A copy of a block's bytes, uint8 ``[block_bytes]``."""
        return np.concatenate([pool[block] for pool in self._pools])

    def write(self, block: int, content: NDArray[np.uint8]) -> None:
        """Put back what `read` gave, uint8 ``[block_bytes]``, into this or another block."""
        start = 0
        for pool in self._pools:
            stop = start + pool.shape[1]
            pool[block] = content[start:stop]
            start = stop

    def release(self) -> None:
        """Let go of the pools' memory; there are no blocks any more."""
        self._pools.clear()
