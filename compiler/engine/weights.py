"""rank0.weights: page-aligned tensors in kernel layout, appended one after the other.

Nothing but the caller's current chunk is held in memory. Each tensor starts on a page of 4096
bytes, so that it can be mapped on its own, and the file ends on a page. Gaps are zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from .config import PAGE, WeightSpec
from .durable import Buffer, HashingFile
from .manifest import FileEntry


class WeightsWriter:
    """Writes the file; `EngineWriter.weights` makes one and closes it."""

    def __init__(self, path: Path) -> None:
        self._file = HashingFile(path)
        self._specs: list[WeightSpec] = []
        self._hashes: dict[str, str] = {}

    @property
    def specs(self) -> tuple[WeightSpec, ...]:
        """Every tensor written so far, in file order: `SpikeConfig.weights`."""
        return tuple(self._specs)

    @property
    def hashes(self) -> dict[str, str]:
        """Tensor name to sha256 of its bytes."""
        return dict(self._hashes)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def append(
        self,
        name: str,
        *,
        format: str,
        shape: tuple[int, ...],
        role: str,
        parameters: tuple[str, ...],
        chunks: Iterable[Buffer],
    ) -> WeightSpec:
        """Write one tensor's packed bytes, chunk by chunk, and say where they lie.

        Raises:
            ValueError: the name was written before, or there are no bytes (a mistake of ours).
            SpikeError: SPK503, SPK514 from the file system.
        """
        if name in self._hashes:
            raise ValueError(f"weight {name} is written twice")
        self._pad()
        offset, digest = self._file.size, hashlib.sha256()
        for chunk in chunks:
            digest.update(memoryview(chunk).cast("B"))
            self._file.write(chunk)
        if self._file.size == offset:
            raise ValueError(f"weight {name} has no bytes")
        self._hashes[name] = digest.hexdigest()
        size = self._file.size - offset
        self._specs.append(WeightSpec(name, format, shape, offset, size, role, parameters))
        return self._specs[-1]

    def finish(self) -> FileEntry:
        """Pad to a page, bring the file to disk, close it."""
        self._pad()
        return FileEntry(self._file.size, self._file.finish())

    def abandon(self) -> None:
        """Close the file as it stands."""
        self._file.abandon()

    def _pad(self) -> None:
        gap = -self._file.size % PAGE
        if gap:
            self._file.write(bytes(gap))
