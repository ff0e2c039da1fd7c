"""EngineDirectory: an engine that passed its load-time checks.

Opening reads config.json and manifest.json and looks at the size and kind of every other file;
contents are hashed on request.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...errors import SpikeError
from . import manifest as names
from .checks import REBUILD, as_user_error, open_directory, read_engine
from .config import EngineConfig
from .manifest import Manifest
from .verify import FileCheck, damaged_tensors, verify_files

_ATTEMPTS = 3

Identity = tuple[int, int, int]


@dataclass(frozen=True)
class EngineDirectory:
    """An engine that passed its load-time checks. Make one with `EngineDirectory.open`."""

    path: Path
    config: EngineConfig
    manifest: Manifest
    identity: Identity

    @classmethod
    def open(cls, path: Path | str, verify: bool = False) -> Self:
        """Check and read the engine at `path`; with `verify`, hash every byte of it too.

        Raises:
            SpikeError: SPK501 not an engine, SPK502 other format version, SPK506 file missing,
                SPK507 wrong size, SPK508 wrong contents, SPK509 CPU features, SPK510 a link or not
                a regular file, SPK511 a file that does not belong, SPK512 unreadable config or
                manifest, SPK513 a file name that leaves the directory, SPK515 replaced meanwhile.
        """
        path = Path(path)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return cls._open_once(path, verify)
            except _Replaced:
                if attempt == _ATTEMPTS:
                    break
        raise SpikeError(
            "SPK515",
            "engine",
            f"{path} was replaced {_ATTEMPTS} times while it was being opened.",
            "Wait until the build that writes it is done, then try again.",
        )

    @classmethod
    def _open_once(cls, path: Path, verify: bool) -> Self:
        fd = open_directory(path)
        try:
            identity = _identity(os.fstat(fd))
            try:
                engine = cls(path, *read_engine(path, fd), identity)
                if verify:
                    _require_contents(engine, fd)
            except (SpikeError, OSError) as error:
                if not _leads_to(path, identity):
                    raise _Replaced from None
                raise as_user_error(path, error) from None
            return engine
        finally:
            os.close(fd)

    @property
    def model_path(self) -> Path:
        """What the backend executes: rank0.engine."""
        return self.path / names.MODEL

    @property
    def weights_path(self) -> Path:
        """Packed weights to be mapped: rank0.weights."""
        return self.path / names.WEIGHTS

    def file(self, name: str) -> Path | None:
        """Path of an optional file such as ``tokenizer.json``; None if the engine has none."""
        return self.path / name if name in self.manifest.files else None

    def is_current(self) -> bool:
        """Whether `path` still leads to the directory that was checked (not to a newer engine)."""
        return _leads_to(self.path, self.identity)

    def verify(self) -> tuple[FileCheck, ...]:
        """Hash every file, in parallel: one result per file, good and bad."""
        fd = open_directory(self.path)
        try:
            return verify_files(fd, self.manifest.files)
        finally:
            os.close(fd)


class _Replaced(Exception):
    """The path leads to another directory than the one being checked."""


def _identity(status: os.stat_result) -> Identity:
    """Device, inode and change time: an inode number alone is used again."""
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _leads_to(path: Path, identity: Identity) -> bool:
    try:
        return _identity(os.stat(path)) == identity
    except OSError:
        return False


def _require_contents(engine: EngineDirectory, fd: int) -> None:
    bad = [check for check in verify_files(fd, engine.manifest.files) if not check.ok]
    if not bad:
        return
    what = f"{len(bad)} of {len(engine.manifest.files)} files differ from the manifest: "
    what += ", ".join(check.name for check in bad)
    if any(check.name == names.WEIGHTS for check in bad):
        tensors = damaged_tensors(fd, engine.config.spike.weights, engine.manifest.tensors)
        what += f"; damaged tensors: {', '.join(tensors[:5]) or 'none (only padding)'}"
        what += f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    raise SpikeError("SPK508", "engine", f"{engine.path}: {what}.", REBUILD)
