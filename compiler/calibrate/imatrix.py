"""Files of importances as llama.cpp's tools read and write them (imatrix).

GGUF: `general.type` "imatrix", `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`, and
of every matrix `NAME.in_sum2` f32 [E, K] (sums of squares) and `NAME.counts` f32 [E, 1] (tokens);
of plain matrices [K] and [1]. Sources: llama.cpp's tools/imatrix/imatrix.cpp and
common/imatrix-loader.cpp.

The format before it (.dat), only read, little-endian i32 and f32:

    entries; each: length, name, calls, values, f32 mean square * calls [values]
    chunks, length, dataset; may be missing

A matrix of ours that llama.cpp has no name for is stored under its parameter's name. What the head
sees is stored too, of a tied one as `token_embd.weight`; llama-imatrix leaves it out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import SpikeError
from ..gguf.reader import MAGIC, GgufFile, Value, unreadable
from ..gguf.tensor_types import OF_FORMAT
from ..gguf.writer import TensorOut, write_gguf
from .importance import Entry, Importance

SUMS, COUNTS = ".in_sum2", ".counts"
LARGEST_DAT = 1 << 31
"""Bytes of an old file that are read: ten times the largest in use."""


def write_imatrix(path: Path, importance: Importance) -> None:
    """Writes a GGUF file: whole or not at all; the same importances give the same bytes.

    Raises SPK594 if the disk refuses.
    """
    metadata: dict[str, Value] = {
        "general.type": "imatrix",
        "imatrix.datasets": list(importance.datasets),
        "imatrix.chunk_count": importance.chunks,
        "imatrix.chunk_size": importance.chunk_tokens,
    }
    tensors = []
    for name in sorted(importance.entries):
        entry = importance.entries[name]
        counts = entry.counts.reshape((-1, 1) if entry.sums.ndim > 1 else (1,))
        tensors += [_tensor(name + SUMS, entry.sums), _tensor(name + COUNTS, counts)]
    write_gguf(path, metadata, tensors)


def _tensor(name: str, values: npt.NDArray[np.generic]) -> TensorOut:
    data = np.ascontiguousarray(values, "<f4")
    return TensorOut(name, OF_FORMAT["f32"], data.shape, lambda: [data.data.cast("B")])


def read_imatrix(path: Path) -> Importance:
    """Reads either format.

    Raises:
        SpikeError: SPK126 for a file that can't be read, SPK412 for one that holds no valid
            importances.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                size = path.stat().st_size
                if not path.is_file() or size > LARGEST_DAT:
                    raise _invalid(path, f"it has {size:,} bytes")
                file.seek(0)
                return _read_dat(path, file.read())
    except OSError as error:
        raise unreadable(path, error, "importances") from error
    try:
        return _read_gguf(GgufFile(path))
    except SpikeError as error:
        if error.where != "gguf":
            raise
        remedy = "Copy it again, or make a new one with spike calibrate or llama-imatrix."
        raise SpikeError("SPK412", "importances", error.what, remedy) from error


def _read_gguf(file: GgufFile) -> Importance:
    kind = file.metadata.get("general.type", "model")
    if kind != "imatrix":
        raise _invalid(file.path, f"its general.type is {str(kind)!r:.40}")
    entries = {}
    for name in file.tensors:
        if name.endswith(SUMS):
            stem = name.removesuffix(SUMS)
            sums, counts = _floats(file, name), _floats(file, stem + COUNTS)
            entries[stem] = _entry(file.path, stem, sums, counts.reshape(-1))
    datasets = file.metadata.get("imatrix.datasets")
    chunks, size = (_number(file.metadata, f"imatrix.chunk_{n}") for n in ("count", "size"))
    names = tuple(datasets) if isinstance(datasets, list) else ()
    return _checked(file.path, Importance(entries, names, chunks, size, str(file.path)))


def _floats(file: GgufFile, name: str) -> npt.NDArray[np.float64]:
    entry = file.tensors.get(name)
    if entry is None or entry.type.format != "f32":
        what = "isn't there" if entry is None else f"is {entry.type.name}, not F32"
        raise _invalid(file.path, f"{name} {what}")
    return file.raw(name).view("<f4").reshape(entry.shape).astype(np.float64)


def _number(metadata: Mapping[str, object], key: str) -> int:
    value = metadata.get(key, 0)
    return value if isinstance(value, int) and value > 0 else 0


def _entry(
    path: Path, name: str, sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]
) -> Entry:
    """Raises SPK412 for sums and counts that nothing could have given."""
    if sums.size % counts.size or counts.size > sums.size:
        raise _invalid(path, f"{name} has {sums.size} sums and {counts.size} counts")
    for what, values in (("sum of squares", sums), ("count", counts)):
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if bad.size:
            raise _invalid(path, f"{name} has the {what} {values.reshape(-1)[bad[0]]}")
    if counts.max() >= 2**53 or (counts != np.rint(counts)).any():
        raise _invalid(path, f"{name} has the count {counts.max()}")
    stacked = sums.ndim == 2 and (counts.size > 1 or len(sums) > 1)
    return Entry(sums if stacked else sums.reshape(-1), counts.astype(np.int64))


def _checked(path: Path, importance: Importance) -> Importance:
    if not importance.entries:
        raise _invalid(path, "it holds no sums of squares")
    return importance


def _read_dat(path: Path, data: bytes) -> Importance:
    cursor = _Cursor(path, data)
    entries = {}
    for _ in range(cursor.number("the number of entries")):
        name = cursor.text("a tensor's name")
        calls = cursor.number(f"the calls of {name}")
        count = cursor.number(f"the values of {name}")
        means = np.frombuffer(cursor.take(4 * count, name), "<f4").astype(np.float64)
        entries[name] = _entry(path, name, means, np.array([float(max(calls, 1))]))
    chunks = cursor.number("the number of chunks") if cursor.left else 0
    datasets = [cursor.text("the dataset's name")] if cursor.left else []
    if cursor.left:
        raise _invalid(path, f"{cursor.left} bytes follow its end")
    return _checked(path, Importance(entries, datasets, chunks, 0, str(path)))


class _Cursor:
    """Reads forward through an old file; every length is held against what is left."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._at = path, data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int, what: str) -> bytes:
        """That many bytes. SPK412 if there are fewer."""
        if not 0 <= count <= self.left:
            raise _invalid(self._path, f"{what} needs {count} bytes and {self.left} are left")
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def number(self, what: str) -> int:
        """An i32 that counts something."""
        (value,) = struct.unpack("<i", self.take(4, what))
        if value < 0:
            raise _invalid(self._path, f"{what} is {value}")
        return int(value)

    def text(self, what: str) -> str:
        """A string behind its length."""
        raw = self.take(self.number(f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _invalid(self._path, f"{what} isn't UTF-8") from None


def _invalid(path: Path, what: str) -> SpikeError:
    return SpikeError(
        "SPK412",
        "importances",
        f"{path} is no file of importances, or damaged: {what}.",
        "Give a file that spike calibrate or llama.cpp's llama-imatrix wrote.",
    )
