"""Evicted prefix blocks in a file of the host: read back when that is cheaper than computing them.

A block's bytes are worth the same wherever they lie, if they are the same bytes: each has a
checksum over its key and its content, and one that does not match is forgotten and computed again.
The file has no name (it is gone with the process), so no other user can open it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from numbers import Integral
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .block_bytes import BlockBytes
from .blocks import BlockPool, BlockTable
from .step_cost import StepCost, reads

CHECKSUM_BYTES = 16
SMOOTHING = 0.2
# A read that was refused for its time makes the next one look a little cheaper: one slow moment of
# the disk must not close the tier for ever.
FORGIVENESS = 0.98


@dataclass(frozen=True)
class TierOptions:
    """Where evicted blocks go.

    Attributes:
        directory: of the file; on a file system with room for it.
        size: bytes it may take; at least one block's.
    """

    directory: str | Path
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | Path):
            raise _unusable(self, "it is no path")
        if not isinstance(self.size, Integral) or isinstance(self.size, bool):
            raise _unusable(self, f"{self.size!r} is no number of bytes")


def open_tier(blocks: BlockBytes | None, options: TierOptions) -> KvTier:
    """A tier for these pools. Raises SpikeError SPK618 as `KvTier`, and where there are none."""
    if blocks is None:
        raise _unusable(options, "this engine remembers none: it is a functional one, or its "
                        "prefix cache is off")  # fmt: skip
    return KvTier(blocks, options)


class KvTier:
    """The file and what is where in it; a block that was used longest ago makes room for a new one.

    Args:
        blocks: the pools.
        options: see there.

    Raises:
        SpikeError: SPK618, the file can't be made or holds no block.
    """

    def __init__(self, blocks: BlockBytes, options: TierOptions) -> None:
        self._blocks = blocks
        slots = options.size // blocks.block_bytes
        if slots < 1:
            raise _unusable(options, f"{options.size} bytes hold no block of {blocks.block_bytes}")
        try:
            self._file = tempfile.TemporaryFile(dir=options.directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise _unusable(options, str(error)) from error
        self._free = list(range(slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._byte_seconds: float | None = None  # of reading, the checksum included
        self.stored = self.restored = self.damaged = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def store(self, block: int, key: bytes) -> None:
        """Keep a block that is about to be given up; a full disk keeps nothing and harms nobody."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        started = time.perf_counter()
        content = self._blocks.read(block)
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1][0]
        try:
            written = os.pwrite(self._file.fileno(), content.data, slot * content.size)
        except OSError:
            written = 0
        if written < content.size:
            self._free.append(slot)
            return
        self._slots[key] = slot, _checksum(key, content)
        self.stored += 1
        if self._byte_seconds is None:  # until something was read: no faster than writing
            self._byte_seconds = (time.perf_counter() - started) / content.size

    def restore(
        self, pool: BlockPool, table: BlockTable, tokens: Sequence[int], cost: StepCost | None
    ) -> None:
        """Continue a table with blocks of the file, as far as it has them and if that pays.

        Args:
            pool: has blocks available for all of `tokens`.
            table: everything written so far is committed.
            tokens: the sequence from its beginning.
            cost: of computing; None (nothing measured yet): nothing is read.
        """
        keys = list(takewhile(self.__contains__, table.coming_keys(tokens)))
        if not keys or cost is None or not self._pays(pool, table.committed, len(keys), cost):
            return
        for key in keys:
            block = pool.cache.find(key)
            if block is not None:
                pool.share(block)
            else:
                block = pool.take()
                if not self.load(key, block):
                    pool.give_back(block)
                    return
                pool.cache.add(key, block)
            table.put_next(key, block)

    def load(self, key: bytes, block: int) -> bool:
        """Read what is kept under a key into a block; False if it is not there (any more) whole."""
        if key not in self._slots:
            return False
        started = time.perf_counter()
        slot, checksum = self._slots[key]
        content = self._read(slot)
        if content is None or _checksum(key, content) != checksum:
            del self._slots[key]
            self._free.append(slot)
            self.damaged += 1
            return False
        self._blocks.write(block, content)
        self._slots.move_to_end(key)
        self.restored += 1
        self._learn((time.perf_counter() - started) / content.size)
        return True

    def clear(self) -> None:
        """Forget all blocks."""
        self._free.extend(slot for slot, _ in self._slots.values())
        self._slots.clear()

    def close(self) -> None:
        """Let go of the file."""
        self._slots.clear()
        self._file.close()

    def _read(self, slot: int) -> NDArray[np.uint8] | None:
        size = self._blocks.block_bytes
        try:
            content = os.pread(self._file.fileno(), size, slot * size)
        except OSError:
            return None
        return np.frombuffer(content, np.uint8) if len(content) == size else None

    def _pays(self, pool: BlockPool, start: int, blocks: int, cost: StepCost) -> bool:
        assert self._byte_seconds is not None  # something was stored
        tokens = blocks * pool.block_size
        computing = cost.token * tokens + cost.chunk_read * reads(tokens, start)
        if self._byte_seconds * self._blocks.block_bytes * blocks < computing:
            return True
        self._byte_seconds *= FORGIVENESS
        return False

    def _learn(self, byte_seconds: float) -> None:
        before = self._byte_seconds or byte_seconds
        self._byte_seconds = before + SMOOTHING * (byte_seconds - before)


def _checksum(key: bytes, content: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(content.data, digest_size=CHECKSUM_BYTES, key=key).digest()


def _unusable(options: TierOptions, cause: str) -> SpikeError:
    return SpikeError(
        "SPK618",
        "kv_tier",
        f"{options.directory} can't hold evicted blocks: {cause}.",
        "Give a directory that can be written to, and room for many blocks.",
    )
