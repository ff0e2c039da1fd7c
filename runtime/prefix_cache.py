"""Which full KV blocks hold which tokens: found again by a chain of hashes, forgotten oldest first.

A block's key is a hash of its own tokens and of the key before it, so it stands for everything from
the sequence's first token on, and so does what the block holds: K and V of a token depend on
nothing but the tokens up to it. The first key is a hash of the caller's salt: callers with
different salts never share, and can't learn from the speed of an answer what others asked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 32  # a collision would show one caller another's text: no shorter hash than SHA-256's


def root_key(salt: str = "") -> bytes:
    """Key of the empty prefix for callers with this salt."""
    # `person`: no salt can be made to look like a block's key.
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"salt").digest()


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full block with these tokens, behind the block (or root) with the key `before`."""
    content = np.array(tokens, np.int32).tobytes()
    return hashlib.blake2b(before + content, digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Keys of full blocks, and the order in which unreferenced ones are given up.

    Knows nothing of reference counts: `BlockPool` says when a block's last owner has gone (`rest`)
    and when a new one came (`wake`).
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._resting: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def resting(self) -> int:
        """Blocks that nobody owns: they may be given up."""
        return len(self._resting)

    def find(self, key: bytes) -> int | None:
        """The block with this key, if there is one."""
        return self._blocks.get(key)

    def add(self, key: bytes, block: int) -> int:
        """Remember a full block; returns the one that had the key already, or else this one."""
        known = self._blocks.setdefault(key, block)
        if known == block:
            self._keys[block] = key
        return known

    def rest(self, block: int) -> None:
        """Its last owner has gone: it may be given up, after all that rest already."""
        self._resting[block] = None

    def wake(self, block: int) -> None:
        """It has an owner (again)."""
        self._resting.pop(block, None)

    def oldest(self) -> tuple[int, bytes]:
        """The block to give up first, and its key; there is one."""
        block = next(iter(self._resting))
        return block, self._keys[block]

    def forget(self, block: int) -> None:
        """Drop a block: its content is about to change."""
        self._resting.pop(block, None)
        del self._blocks[self._keys.pop(block)]

    def clear(self) -> list[int]:
        """Drop all blocks; returns those that nobody owns."""
        resting = list(self._resting)
        for record in (self._blocks, self._keys, self._resting):
            record.clear()
        return resting
