"""Files that are on disk when we say so, and a directory swapped in one step.

Every write is flushed, fsynced and closed explicitly: an unclosed Python file swallows ENOSPC.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import SpikeError

Buffer = bytes | bytearray | memoryview

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class HashingFile:
    """A new file, written once from front to back, hashed on the way.

    Raises:
        SpikeError: SPK503 when the disk is full, SPK514 for any other failure to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with write_errors(path):
            self._fd = os.open(path, flags, 0o666)

    def write(self, data: Buffer) -> None:
        """Append `data`, all of it."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.size += len(view)
        with write_errors(self.path):
            while view:
                view = view[os.write(self._fd, view) :]

    def finish(self) -> str:
        """Bring the file to disk and close it; its sha256 in hex."""
        with write_errors(self.path):
            try:
                os.fsync(self._fd)
            finally:
                self.abandon()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close the file as it stands; harmless when closed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def write_file(path: Path, chunks: Iterable[Buffer]) -> tuple[int, str]:
    """Create `path` with these bytes, on disk when this returns. Returns (size, sha256)."""
    file = HashingFile(path)
    try:
        for chunk in chunks:
            file.write(chunk)
        digest = file.finish()
    finally:
        file.abandon()
    return file.size, digest


def hash_file(path: Path) -> tuple[int, str]:
    """(size, sha256) of a file that exists; a hard or symbolic link is not followed."""
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while block := os.read(fd, 1 << 20):
            digest.update(block)
            size += len(block)
    finally:
        os.close(fd)
    return size, digest.hexdigest()


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    with write_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step; False where the system or file system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def is_plain_directory(path: Path) -> bool:
    """A directory itself, not a link to one."""
    with suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def no_space_error(path: Path, error: OSError) -> SpikeError | None:
    """SPK503 if `error` means that no more can be written there, else None."""
    if error.errno not in _NO_SPACE:
        return None
    return SpikeError(
        "SPK503",
        "engine",
        f"no space left while writing {path} ({error.strerror}); the build was undone.",
        f"Free space (or raise the quota or file-size limit) under {path.parent.parent}, or choose "
        "another --output-dir.",
    )


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into the user's error about `path`."""
    try:
        yield
    except OSError as error:
        full = no_space_error(path, error)
        raise full or SpikeError(
            "SPK514",
            "engine",
            f"cannot write {path}: {error.strerror or error}.",
            "Check that the directory exists and that you may write there.",
        ) from error
