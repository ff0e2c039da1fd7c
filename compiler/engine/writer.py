"""Writes an engine directory so that a reader sees a whole engine or none.

Everything is staged in a hidden directory beside the output, brought to disk, and moved into place
by one rename. A build that fails, or is killed, leaves the output as it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ...errors import SpikeError
from . import manifest as names
from .checks import FAILED_NOTE, require_replaceable
from .config import EngineConfig
from .durable import (
    Buffer,
    exchange,
    hash_file,
    is_plain_directory,
    no_space_error,
    sync,
    write_errors,
    write_file,
)
from .evidence import Evidence
from .lock import OutputLock
from .manifest import FileEntry, Manifest, Provenance, seal_manifest
from .pareto import Pareto
from .report import render_report
from .schema import encode
from .weights import WeightsWriter


class EngineWriter:
    """One engine being written. Use as a context manager; nothing is published without `publish`.

    ```
    with EngineWriter(output, version=__version__) as writer:
        with writer.weights() as weights:
            weights.append("layers.0.q", format="q4_k", ..., chunks=chunks)
        writer.write("rank0.engine", onnx_bytes)
        writer.stage(config, provenance)      # writer.path now opens as an engine
        evidence = golden_gate(writer.path)
        writer.publish(evidence)
    ```

    Args:
        output: the engine directory to make or to replace.
        version: of SpikeInfer.
        keep_failed: on an error, keep what was written as ``OUTPUT.failed``.

    Raises:
        SpikeError: SPK504 if `output` holds something that is not an engine, SPK505 if another
            build is writing it, SPK503/SPK514 if the disk refuses.
    """

    def __init__(self, output: Path | str, *, version: str, keep_failed: bool = False) -> None:
        # A link as last component keeps pointing at the same place: we replace its target.
        self.output = Path(os.path.realpath(output))
        self._version = version
        self._keep_failed = keep_failed
        require_replaceable(self.output)
        self._new_parents = _missing_parents(self.output)
        with write_errors(self.output):
            self.output.parent.mkdir(parents=True, exist_ok=True)
        self._lock = OutputLock(self.output)
        self._entries: dict[str, FileEntry] = {}
        self._weights: WeightsWriter | None = None
        self._staged: tuple[EngineConfig, Provenance] | None = None
        self._manifest: Manifest | None = None
        self._published = False
        try:
            self._lock.sweep()
            self.path = self._lock.new_staging()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._weights is not None:
                self._weights.abandon()
            if not self._published:
                self._discard(error)
        finally:
            self._lock.release()
            if not self._published:
                self._remove_new_parents()
        if isinstance(error, OSError) and (full := no_space_error(self.path / "a file", error)):
            raise full from error

    def require_space(self, size: int) -> None:
        """Fail at once (SPK516) if the file system has less than `size` bytes free."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise SpikeError(
                "SPK516",
                "engine",
                f"the engine needs {size / 1e9:.2f} GB and {self.output.parent} has "
                f"{free / 1e9:.2f} GB free.",
                "Free space there, or choose another --output-dir.",
            )

    def write(self, name: str, data: Buffer | Iterable[Buffer]) -> None:
        """Write one file of the engine; a name may be written once."""
        chunks = [data] if isinstance(data, bytes | bytearray | memoryview) else data
        self._entries[name] = FileEntry(*write_file(self.path / name, chunks))

    def copy(self, source: Path, name: str = "") -> None:
        """Copy a file's contents (never a link to it) under its own or another name."""

        def blocks() -> Iterator[bytes]:
            with source.open("rb") as file:
                while block := file.read(1 << 20):
                    yield block

        self.write(name or source.name, blocks())

    @contextmanager
    def weights(self) -> Iterator[WeightsWriter]:
        """The writer of rank0.weights, closed and on disk at the end of the block."""
        if self._weights is not None:
            raise ValueError("rank0.weights is written once")
        self._weights = WeightsWriter(self.path / names.WEIGHTS)
        yield self._weights
        self._entries[names.WEIGHTS] = self._weights.finish()

    def stage(self, config: EngineConfig, provenance: Provenance) -> Manifest:
        """Complete the staged directory: `path` opens as an engine now, for the golden gate."""
        self._staged = (config, provenance)
        self.write(names.CONFIG, encode(config))
        return self._write_manifest()

    def record(self, evidence: Evidence, pareto: Pareto | None = None) -> Manifest:
        """Add the evidence and its report to the staged engine (also to one that failed)."""
        if self._staged is None:
            raise ValueError("stage the engine before recording evidence about it")
        self.write(names.EVIDENCE, encode(evidence))
        if pareto is not None:
            self.write(names.PARETO, encode(pareto))
        draft = self._seal()
        page = render_report(self._staged[0], draft, evidence, pareto)
        self.write(names.REPORT, page.encode())
        return self._write_manifest()

    def publish(self, evidence: Evidence | None = None) -> Manifest:
        """Move the engine to `output` in one step, with `evidence` unless recorded already."""
        if evidence is not None:
            self.record(evidence)
        if names.REPORT not in self._entries or self._manifest is None:
            raise ValueError("an engine is published with its evidence")
        sync(self.path)
        require_replaceable(self.output)
        self._move_into_place()
        return self._manifest

    def _write_manifest(self) -> Manifest:
        self._take_unhashed()
        self._manifest = self._seal()
        with write_errors(self.path):
            (self.path / names.MANIFEST).unlink(missing_ok=True)
        write_file(self.path / names.MANIFEST, [encode(self._manifest)])
        return self._manifest

    def _take_unhashed(self) -> None:
        """Hash and sync files that somebody wrote into the staging directory directly."""
        for path in sorted(self.path.iterdir()):
            if path.name not in self._entries and path.name != names.MANIFEST:
                sync(path)
                self._entries[path.name] = FileEntry(*hash_file(path))

    def _seal(self) -> Manifest:
        assert self._staged is not None
        tensors = self._weights.hashes if self._weights else {}
        return seal_manifest(self._entries, tensors, self._staged[1], self._version)

    def _move_into_place(self) -> None:
        with write_errors(self.output):
            if not os.path.lexists(self.output):
                self.path.rename(self.output)
                old = None
            else:
                old = self._swap()
        self._published = True
        sync(self.output.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _swap(self) -> Path:
        """Put the new engine where the old one is; where the old one is now."""
        if exchange(self.path, self.output):
            return self.path
        old = self._lock.aside()
        self.output.rename(old)
        self.path.rename(self.output)
        return old

    def _discard(self, error: BaseException | None) -> None:
        if not self._keep_failed or error is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with suppress(OSError, SpikeError):
            write_file(self.path / FAILED_NOTE, [f"{type(error).__name__}: {error}\n".encode()])
        with write_errors(self.output):
            self.path.rename(self._failed_name())

    def _remove_new_parents(self) -> None:
        """Remove the directories made for the output, as far as they are empty again."""
        with suppress(OSError):
            for parent in self._new_parents:
                parent.rmdir()

    def _failed_name(self) -> Path:
        """``OUTPUT.failed``; an older one of ours gives way, anything else is left alone."""
        base = self.output.with_name(f"{self.output.name}.failed")
        if is_plain_directory(base) and (base / FAILED_NOTE).is_file():
            shutil.rmtree(base)
        path, count = base, 1
        while os.path.lexists(path):
            count += 1
            path = base.with_name(f"{base.name}.{count}")
        return path


def _missing_parents(path: Path) -> list[Path]:
    """Directories above `path` that don't exist, innermost first."""
    return [parent for parent in path.parents if not parent.exists()]
