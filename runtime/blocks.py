"""The KV cache as blocks of tokens: who owns which, who shares which, who may write.

A block is blank, owned (by one table or more), or resting: full, remembered by its tokens, and
owned by nobody. Resting blocks are given up, oldest first, when no blank one is left. Only a block
with one owner that nobody else can find is written to; a table that must write to another one gets
a copy of it first (`BlockTable.grow`).

Blocks are taken as a sequence grows, not promised ahead: who finds too few `available` has to make
room first (the batch loop pre-empts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .prefix_cache import PrefixCache, next_key, root_key

Copies = list[tuple[int, int]]
"""(source block, its copy), for `Session.copy_blocks` before the next step."""


class BlockPool:
    """The blocks of a session's KV pools; the last one freed is given first (its pages are warm).

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        recent_blocks: blocks that every sequence owns from its first token on, for its last tokens
            in another form; they lead its table.
        shares: whether a full block is worth the same in every sequence that begins with the same
            tokens. False: nothing is remembered and nothing forked.
    """

    def __init__(
        self, num_blocks: int, block_size: int, recent_blocks: int = 0, shares: bool = True
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.recent_blocks = recent_blocks
        self.shares = shares
        self.cache = PrefixCache()
        self.evicted = 0
        self.on_evict: Callable[[int, bytes], None] = lambda block, key: None
        """Called with a remembered block and its key while the block still holds its tokens."""
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return len(self._blank) + self.cache.resting

    @property
    def resting(self) -> int:
        """Blocks kept only in case their tokens come again."""
        return self.cache.resting

    @property
    def owned(self) -> int:
        """Blocks in use."""
        return self.num_blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens owns."""
        return self.recent_blocks + -(-tokens // self.block_size)

    def table(self, salt: str = "") -> BlockTable:
        """An empty table; blocks are shared between tables of one salt only."""
        return BlockTable(self, root_key(salt))

    def owners(self, block: int) -> int:
        """Tables that hold this block."""
        return self._owners[block]

    def writable(self, block: int) -> bool:
        """Whether its only owner may write to it."""
        return self._owners[block] == 1 and block not in self.cache

    def take(self) -> int:
        """Hand out a block to a first owner.

        Raises:
            ValueError: none is available.
        """
        if not self._blank:
            self._give_up_oldest()
        block = self._blank.pop()
        self._owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more owner of an owned or resting block."""
        self._owners[block] += 1
        self.cache.wake(block)

    def give_back(self, block: int) -> None:
        """Count one owner less; the last one leaves it resting or blank.

        Raises:
            ValueError: a block nobody owns (given back twice).
        """
        if not self._owners[block]:
            raise ValueError(f"block {block} is not owned")
        self._owners[block] -= 1
        if not self._owners[block]:
            self.cache.rest(block) if block in self.cache else self._blank.append(block)

    def freed_by(self, tables: Sequence[BlockTable]) -> int:
        """Blocks that nobody would own any more if these tables were released."""
        held = Counter(block for table in tables for block in table.ids.tolist())
        return sum(self._owners[block] == count for block, count in held.items())

    def clear_cache(self) -> None:
        """Forget all tokens: nobody finds a block any more; running sequences keep theirs."""
        self._blank.extend(self.cache.clear())

    def reset(self) -> None:
        """Nobody owns anything, nothing is remembered; tables made before must not be used."""
        self.cache.clear()
        self._blank = list(range(self.num_blocks - 1, -1, -1))
        self._owners = [0] * self.num_blocks

    def _give_up_oldest(self) -> None:
        if not self.cache.resting:
            raise ValueError(f"all {self.num_blocks} blocks are owned")
        block, key = self.cache.oldest()
        self.on_evict(block, key)
        self.cache.forget(block)
        self._blank.append(block)
        self.evicted += 1


class BlockTable:
    """The blocks of one sequence, in order. Made by `BlockPool.table`."""

    def __init__(self, pool: BlockPool, key: bytes) -> None:
        self._pool = pool
        self._key = key  # of the last full block that was committed
        self._committed = 0  # blocks
        self._recent = 0  # recent blocks taken: none or all
        self._used = 0  # blocks of tokens
        self._private = 0  # uncommitted tokens before this may be written at once
        self._ids = np.zeros(pool.recent_blocks + 8, np.int32)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Recent blocks, then those of tokens, int32 ``[used]``; whole once `grow` was called."""
        return self._ids[: self._pool.recent_blocks + self._used]

    @property
    def capacity(self) -> int:
        """Tokens that have a place."""
        return self._used * self._pool.block_size

    @property
    def committed(self) -> int:
        """Tokens in full blocks that can be found by others; they are never written again."""
        return self._committed * self._pool.block_size

    def missing(self, start: int, stop: int) -> int:
        """Blocks that `grow` would take."""
        if stop <= self._private:
            return 0
        grown = -(-stop // self._pool.block_size)
        first = self._pool.recent_blocks - self._recent + max(0, grown - self._used)
        return first + len(self._shared(start, stop))

    def grow(self, start: int, stop: int) -> Copies:
        """Make room for writing the tokens start <= i < stop, the ones before being there.

        Returns:
            What has to be copied before they are written: a block that others hold or can find.

        Raises:
            ValueError: the pool has no `missing` blocks left, or a committed token would be
                written again. Nothing was taken then.
        """
        if start < self.committed:
            raise ValueError(f"token {start} is committed")
        if stop <= self._private:  # decoding, mostly
            return []
        if (missing := self.missing(start, stop)) > self._pool.available:
            raise ValueError(f"{missing} blocks are missing, {self._pool.available} available")
        copies: Copies = []
        for place in self._shared(start, stop):
            old, new = int(self._ids[place]), self._pool.take()
            copies.append((old, new))
            self._ids[place] = new
        for old, _ in copies:  # not before: a copy must not be taken from a block just given back
            self._pool.give_back(old)
        while self._recent < self._pool.recent_blocks:
            self._ids[self._recent] = self._pool.take()
            self._recent += 1
        while self.capacity < stop:
            self._append(self._pool.take())
        self._private = self.capacity
        return copies

    def adopt(self, tokens: Sequence[int]) -> int:
        """Continue with remembered blocks, as far as they hold these tokens.

        Everything written so far must be committed. At least one token is left over: its logits
        are wanted.

        Args:
            tokens: the sequence from its beginning.

        Returns:
            Tokens that need not be computed, those written before included.
        """
        for key in self.coming_keys(tokens):
            block = self._pool.cache.find(key)
            if block is None:
                break
            self._pool.share(block)
            self.put_next(key, block)
        return self.committed

    def coming_keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Keys of the full blocks behind the committed ones; at least one token is left over."""
        key, start, size = self._key, self.committed, self._pool.block_size
        while self._pool.shares and start + size < len(tokens):
            key = next_key(key, tokens[start : start + size])
            yield key
            start += size

    def put_next(self, key: bytes, block: int) -> None:
        """Take over ownership of a block as the next committed one, in place of an own one."""
        place = self._pool.recent_blocks + self._committed
        if self._committed < self._used:
            self._pool.give_back(int(self._ids[place]))
            self._ids[place] = block
        else:
            self._append(block)
        self._key = key
        self._committed += 1

    def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Remember the blocks that have become full; an equal one that is known takes their place.

        Args:
            tokens: the sequence from its beginning.
            computed: how many of them are written for good (no draft among them).
        """
        pool = self._pool
        while pool.shares and self.committed + pool.block_size <= computed:
            start = self.committed
            key = next_key(self._key, tokens[start : start + pool.block_size])
            own = int(self._ids[pool.recent_blocks + self._committed])
            known = pool.cache.add(key, own)
            pool.share(known)
            self.put_next(key, known)

    def fork(self) -> BlockTable:
        """A second table with the same blocks; who writes first gets copies.

        Raises:
            ValueError: the pool's blocks can't be shared.
        """
        if not self._pool.shares:
            raise ValueError("blocks of this pool belong to one sequence")
        twin = BlockTable(self._pool, self._key)
        twin._committed, twin._recent, twin._used = self._committed, self._recent, self._used
        twin._ids = self._ids.copy()
        for block in self._held():
            self._pool.share(block)
        self._private = 0
        return twin

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
        """Give everything back, the last block first: a prefix should outlive what followed it."""
        held = self._held()
        self._recent = self._used = self._committed = self._private = 0
        for block in reversed(held):
            self._pool.give_back(block)

    def _held(self) -> list[int]:
        lead = self._pool.recent_blocks
        return [*self._ids[: self._recent].tolist(), *self._ids[lead : lead + self._used].tolist()]

    def _shared(self, start: int, stop: int) -> list[int]:
        """Places of the blocks that must be copied before start <= i < stop are written."""
        size, recent = self._pool.block_size, self._pool.recent_blocks
        last = min(self._used, -(-stop // size))
        places = [*range(self._recent), *range(recent + start // size, recent + last)]
        return [p for p in places if not self._pool.writable(int(self._ids[p]))]

    def _append(self, block: int) -> None:
        place = self._pool.recent_blocks + self._used
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._ids[place] = block
        self._used += 1
