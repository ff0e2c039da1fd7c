"""Hashes the contents of an engine's files in parallel (hashlib releases the interpreter lock)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .config import WeightSpec
from .manifest import WEIGHTS, FileEntry

_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileCheck:
    """One file against the manifest: sha256 expected and found (empty if unreadable)."""

    name: str
    size: int
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        """Whether the contents are those that were built."""
        return self.expected == self.found


def hash_bytes(data: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def verify_files(directory: int, files: Mapping[str, FileEntry]) -> tuple[FileCheck, ...]:
    """Check every listed file in the open directory, largest first for an even load."""
    order = sorted(files, key=lambda name: (-files[name].size, name))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(order, pool.map(lambda n: _hash_range(directory, n), order), strict=True))
    return tuple(
        FileCheck(name, files[name].size, files[name].sha256, found[name]) for name in sorted(files)
    )


def damaged_tensors(
    directory: int, weights: Sequence[WeightSpec], hashes: Mapping[str, str]
) -> tuple[str, ...]:
    """Names of the tensors in rank0.weights whose bytes differ from their hash."""

    def differs(weight: WeightSpec) -> bool:
        found = _hash_range(directory, WEIGHTS, weight.offset, weight.bytes)
        return found != hashes[weight.name]

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        flags = pool.map(differs, weights)
    return tuple(weight.name for weight, bad in zip(weights, flags, strict=True) if bad)


def _hash_range(directory: int, name: str, offset: int = 0, size: int | None = None) -> str:
    """sha256 of `size` bytes from `offset` (to the end for None); empty if it can't be read."""
    digest = hashlib.sha256()
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return ""
    try:
        while size is None or size > 0:
            block = os.pread(fd, _BLOCK if size is None else min(_BLOCK, size), offset)
            if not block:
                break
            digest.update(block)
            offset += len(block)
            size = None if size is None else size - len(block)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return digest.hexdigest()
