"""One build per output directory, and the remains of dead builds removed.

Beside the output directory `NAME` live, hidden: `.NAME.spike-lock` (held with flock, names the
process), `.NAME.spike-build.TOKEN` (an engine being written) and, only where two directories can't
be swapped in one step, `.NAME.spike-old.TOKEN` (the engine being replaced). The kernel drops the
lock when the process dies, however it dies; what lies there without a lock is dead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...errors import SpikeError
from .durable import write_errors

_LOCK = ".spike-lock"
_BUILD = ".spike-build."
_OLD = ".spike-old."


class OutputLock:
    """The right to write one output directory, until `release`.

    Raises:
        SpikeError: SPK505 when another build holds it.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self._path = output.parent / f".{output.name}{_LOCK}"
        self._fd = _acquire(self._path)
        if self._fd is None:
            raise _busy(output, self._path)

    def new_staging(self) -> Path:
        """An empty hidden directory beside the output, on the same file system."""
        path = _hidden(self.output, _BUILD, os.urandom(4).hex())
        with write_errors(path):
            path.mkdir()
        return path

    def aside(self) -> Path:
        """Where the old engine waits while it is being replaced step by step."""
        return _hidden(self.output, _OLD, os.urandom(4).hex())

    def sweep(self) -> None:
        """Remove what dead builds left in this parent directory, for any output name.

        An engine set aside by a build that died between its two renames is put back first.
        """
        _remove_remains(self.output)
        for output in _outputs_with_locks(self.output.parent):
            path = self.output.parent / f".{output.name}{_LOCK}"
            if path == self._path:
                continue
            with suppress(OSError, SpikeError):
                fd = _acquire(path)
                if fd is not None:
                    _remove_remains(output)
                    _release(path, fd)

    def release(self) -> None:
        """Give the lock up; harmless when given up."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            _release(self._path, fd)


def _acquire(path: Path) -> int | None:
    """An open, locked descriptor of the lock file, or None if another process holds it."""
    while True:
        with write_errors(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o666)
        try:
            with write_errors(path):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except SpikeError as error:
            os.close(fd)
            if isinstance(error.__cause__, BlockingIOError):
                return None
            raise
        # The holder before us may have removed the file between our open and our lock: then we
        # hold a lock that nobody else can see.
        if _is_open_file(path, fd):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        os.close(fd)


def _is_open_file(path: Path, fd: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False


def _release(path: Path, fd: int) -> None:
    """Remove the lock file while it is still locked, then unlock it."""
    with suppress(OSError):
        os.unlink(path)
    os.close(fd)


def _busy(output: Path, lock: Path) -> SpikeError:
    holder = ""
    with suppress(OSError):
        holder = lock.read_text().strip()
    return SpikeError(
        "SPK505",
        "engine",
        f"another build (process {holder or 'unknown'}) is writing {output}.",
        "Wait for it to end, stop it, or choose another --output-dir.",
    )


def _hidden(output: Path, kind: str, token: str) -> Path:
    return output.parent / f".{output.name}{kind}{token}"


def _outputs_with_locks(parent: Path) -> list[Path]:
    names = sorted(entry.name for entry in os.scandir(parent))
    return [parent / n[1 : -len(_LOCK)] for n in names if n.startswith(".") and n.endswith(_LOCK)]


def _remains(output: Path, kind: str) -> Iterator[Path]:
    start = f".{output.name}{kind}"
    for entry in os.scandir(output.parent):
        if entry.name.startswith(start) and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _remove_remains(output: Path) -> None:
    for old in _remains(output, _OLD):
        if os.path.lexists(output):
            shutil.rmtree(old, ignore_errors=True)
        else:
            with write_errors(output):
                old.rename(output)
    for staged in _remains(output, _BUILD):
        shutil.rmtree(staged, ignore_errors=True)
