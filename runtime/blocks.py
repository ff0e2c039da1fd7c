"""The KV cache as blocks of tokens: who owns which, and that nobody gets more than there is.

Admission is by promise: a request is let in only when the blocks it may ever need can be promised
to it, and takes them one by one as it grows. So a running request never finds the pool empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """Free list of the KV pool's blocks; the last one freed is given first (its pages are warm).

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        recent_blocks: blocks that every sequence owns from its first token on, for its last tokens
            in another form; they lead its table.
    """

    def __init__(self, num_blocks: int, block_size: int, recent_blocks: int = 0) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.recent_blocks = recent_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned: set[int] = set()
        self._promised = 0

    @property
    def unpromised(self) -> int:
        """Blocks that are neither owned nor promised to anybody."""
        return len(self._free) - self._promised

    @property
    def owned(self) -> int:
        """Blocks in use."""
        return len(self._owned)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens owns."""
        return self.recent_blocks + -(-tokens // self.block_size)

    def promise(self, tokens: int) -> BlockTable | None:
        """A table that can grow to `tokens` tokens, or None while the pool can't promise it."""
        wanted = self.blocks_for(tokens)
        if wanted > self.unpromised:
            return None
        self._promised += wanted
        return BlockTable(self, wanted)

    def take(self) -> int:
        """Hand out one promised block."""
        block = self._free.pop()
        self._owned.add(block)
        self._promised -= 1
        return block

    def give_back(self, blocks: list[int], promised: int) -> None:
        """Take back owned blocks, and a promise of which `promised` blocks were not used.

        Raises:
            ValueError: a block nobody owns (given back twice).
        """
        if not self._owned.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {blocks} are not all owned")
        self._owned.difference_update(blocks)
        self._free.extend(reversed(blocks))
        self._promised -= promised


class BlockTable:
    """The blocks of one sequence, in order. Made by `BlockPool.promise`."""

    def __init__(self, pool: BlockPool, promised: int) -> None:
        self._pool = pool
        self._promised = promised
        self._ids = np.zeros(promised, np.int32)
        self._used = 0

    @property
    def capacity(self) -> int:
        """Tokens this table may grow to."""
        blocks = self._used + self._promised - self._pool.recent_blocks
        return blocks * self._pool.block_size

    @property
    def ids(self) -> NDArray[np.int32]:
        """Blocks taken so far, int32 ``[used]``."""
        return self._ids[: self._used]

    def grow(self, tokens: int) -> None:
        """Take blocks so that `tokens` tokens have a place.

        Raises:
            ValueError: more than was promised.
        """
        wanted = self._pool.blocks_for(tokens)
        if wanted > self._used + self._promised:
            raise ValueError(f"{tokens} tokens do not fit in the promised {self.capacity}")
        while self._used < wanted:
            self._ids[self._used] = self._pool.take()
            self._used += 1
            self._promised -= 1

    def slots(self, start: int, stop: int) -> NDArray[np.int32]:
        """Places in the pool of the tokens start <= i < stop, int32 ``[stop - start]``."""
        size = self._pool.block_size
        ids = self._ids[self._pool.recent_blocks :]
        if stop - start == 1:  # decoding: no arrays for one number
            slot = int(ids[start // size]) * size + start % size
            return np.array([slot], np.int32)
        index = np.arange(start, stop, dtype=np.int32)
        return ids[index // size] * np.int32(size) + index % np.int32(size)

    def release(self) -> None:
        """Give everything back; doing it again changes nothing."""
        self._pool.give_back(self.ids.tolist(), self._promised)
        self._used = self._promised = 0
