"""One GGUF file, mapped: every count, length and offset is checked before anything is done with it.

Layout (ggml's docs/gguf.md, versions 2 and 3, little-endian; `string` = u64 length, UTF-8 bytes):

    "GGUF", u32 version, u64 number of tensors, u64 number of keys
    key:      string name, u32 type, value; an array is u32 type, u64 count, values
    tensor:   string name, u32 dimensions, u64 each (the contiguous one first), u32 type, u64 offset
    padding to `general.alignment` (32), from where offsets count; data, each tensor aligned

A count can never make us loop or allocate: what follows it takes at least a known number of bytes,
and the file is known to have them. Reading takes time and memory linear in the size of the header.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ExitCode, SpikeError
from .tensor_types import READABLE, REFUSED, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
LONGEST_HEADER = 1 << 27
"""Bytes of keys and names: ten times the longest that are in use, and quick to read."""
MOST_DIMENSIONS = 4
LONGEST_NAME = 65535
GET_AGAIN = "Download the file again."

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Value types of fixed size, as numpy spells them."""
BOOL, STRING, ARRAY = 7, 8, 9
SMALLEST = {STRING: 8, **{t: np.dtype(name).itemsize for t, name in SCALARS.items()}}
"""Fewest bytes that one element of an array takes, by type; arrays don't nest."""

Array: TypeAlias = npt.NDArray[Any]
Value: TypeAlias = int | float | bool | str | Array | list[str]
"""A metadata value; arrays of numbers are numpy arrays over the mapped file."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: numpy's order of dimensions (rows of `shape[-1]`), bytes [begin, end).

    One of a single number has the shape (1,).
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """A checked GGUF file; read-only.

    Attributes:
        path: the file.
        version: 2 or 3.
        metadata: key -> value.
        tensors: name -> entry, in the file's order.

    Raises (from the constructor): SPK126 unreadable, SPK130 not GGUF or not this version, SPK131
    truncated or a count beyond the file, SPK132 contradictions, SPK133 a tensor type we don't read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        cursor = _Cursor(path, self._map)
        self.version, tensor_count = _read_head(cursor)
        self.metadata: Mapping[str, Value] = _read_metadata(cursor)
        self.tensors: Mapping[str, TensorEntry] = _read_tensors(
            cursor, tensor_count, _alignment(cursor, self.metadata)
        )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, uint8 [n], read-only over the mapped pages."""
        entry = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, entry.end - entry.begin, entry.begin)

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """Its logical rows, uint8 [..., row_bytes], read-only over the mapped pages."""
        entry = self.tensors[name]
        size = entry.shape[-1] // entry.type.elements * entry.type.bytes
        return self.raw(name).reshape(*entry.shape[:-1], size)

    def release(self) -> None:
        """Let go of the pages that were read; they are read again when a tensor needs them."""
        self._map.madvise(mmap.MADV_DONTNEED)


class _Cursor:
    """Reads forward through the header: never beyond the end of the file, nor LONGEST_HEADER."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0
        self.end = min(len(data), LONGEST_HEADER)

    def need(self, count: int, what: str) -> None:
        """SPK131 if fewer than `count` bytes are left."""
        left = self.end - self.position
        if count > left:
            _truncated(
                self.path, f"{what} needs {count:,} bytes and {left:,} are left", self.position
            )

    def take(self, count: int, what: str) -> int:
        """Steps over `count` bytes; where they begin. SPK131 if there are fewer."""
        self.need(count, what)
        start, self.position = self.position, self.position + count
        return start

    def integer(self, form: str, what: str) -> int:
        """One little-endian integer, `form` as struct spells it."""
        (value,) = struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))
        return int(value)

    def count(self, smallest: int, what: str) -> int:
        """A u64 that says how many things of at least `smallest` bytes follow."""
        count = self.integer("<Q", what)
        self.need(count * smallest, f"{what}, {count:,},")
        return count

    def text(self, what: str, longest: int | None = None) -> str:
        """A string. SPK132 if it isn't UTF-8 or longer than `longest` bytes."""
        length = self.count(1, f"the length of {what}")
        if longest is not None and length > longest:
            self.fail(f"{what} has {length:,} bytes, more than {longest:,}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} (at byte {start:,}) isn't UTF-8")

    def fail(self, what: str) -> NoReturn:
        """SPK132 with this reason."""
        raise SpikeError("SPK132", "gguf", f"{self.path} is damaged: {what}.", GET_AGAIN)


def _truncated(path: Path, what: str, position: int) -> NoReturn:
    """SPK131 for a file that is shorter than it says."""
    raise SpikeError(
        "SPK131",
        "gguf",
        f"{path} is truncated or damaged: at byte {position:,} {what}.",
        GET_AGAIN,
    )


def _mapped(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            raise _not_gguf(path, "isn't a file", "Give the path of a .gguf file.")
        with path.open("rb") as file:
            start = file.read(24)
            if not start.startswith(MAGIC):
                raise _wrong_start(path, start)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError, where: str = "checkpoint") -> SpikeError:
    """SPK126 for a file that the system does not let us read."""
    return SpikeError(
        "SPK126",
        where,
        f"{path} can't be read: {error.strerror or error}.",
        "Check that the file exists and that you may read it.",
    )


def _wrong_start(path: Path, start: bytes) -> SpikeError:
    if start.startswith(b"version https://git-lfs"):
        remedy = "Run `git lfs pull` in that directory, or download the file with `hf download`."
        return _not_gguf(path, "is a git-LFS pointer, not the file itself", remedy)
    if not start:
        return _not_gguf(path, "is empty", GET_AGAIN)
    return _not_gguf(path, f"isn't a GGUF file: it starts with {start[:4]!r}", GET_AGAIN)


def _not_gguf(path: Path, what: str, remedy: str) -> SpikeError:
    return SpikeError("SPK130", "gguf", f"{path} {what}.", remedy)


def _read_head(cursor: _Cursor) -> tuple[int, int]:
    """Version and number of tensors."""
    cursor.take(len(MAGIC), "the magic")
    version = cursor.integer("<I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            what, remedy = "is big-endian", "Get the little-endian file of the model."
        else:
            what = f"is GGUF version {version}; versions 2 and 3 are read"
            remedy = "Convert it with llama.cpp's tools, or get a newer file of the model."
        raise _not_gguf(cursor.path, what, remedy)
    # name, dimensions, one size, type, offset
    tensors = cursor.count(8 + 4 + 8 + 4 + 8, "the number of tensors")
    return version, tensors


def _read_metadata(cursor: _Cursor) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(cursor.count(8 + 4 + 1, "the number of keys")):
        key = cursor.text("a key", LONGEST_NAME)
        if key in metadata:
            cursor.fail(f"the key {key} occurs twice")
        metadata[key] = _read_value(cursor, cursor.integer("<I", f"the type of {key}"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Value:
    if kind == STRING:
        return cursor.text(f"the value of {key}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind not in SCALARS:
        cursor.fail(f"{key} has the unknown type {kind}")
    value: int | float | bool = _read_numbers(cursor, kind, 1, key)[0].item()
    return value


def _read_array(cursor: _Cursor, key: str) -> Value:
    kind = cursor.integer("<I", f"the type of {key}")
    if kind not in SMALLEST:
        named = (
            "of arrays, which llama.cpp doesn't read either" if kind == ARRAY else f"of type {kind}"
        )
        cursor.fail(f"{key} is an array {named}")
    count = cursor.count(SMALLEST[kind], f"the array {key}")
    if kind == STRING:
        what = f"a string of {key}"
        return [cursor.text(what) for _ in range(count)]
    return _read_numbers(cursor, kind, count, key)


def _read_numbers(cursor: _Cursor, kind: int, count: int, key: str) -> Array:
    dtype = np.dtype(SCALARS[kind])
    start = cursor.take(count * dtype.itemsize, f"the value of {key}")
    if kind == BOOL:
        raw = np.frombuffer(cursor.data, np.uint8, count, start)
        if raw.size and raw.max() > 1:
            cursor.fail(f"{key} holds {raw.max()} as a truth value")
    return np.frombuffer(cursor.data, dtype, count, start)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        cursor.fail(f"{ALIGNMENT_KEY} is {value!r}, not a power of two")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    relative = [_read_tensor(cursor) for _ in range(count)]
    start = -(-cursor.position // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for entry in relative:
        if entry.name in entries:
            cursor.fail(f"the tensor {entry.name} occurs twice")
        if entry.begin % alignment:
            cursor.fail(f"the tensor {entry.name} isn't aligned to {alignment} bytes")
        entries[entry.name] = _placed(cursor, entry, start)
    end, before = start, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin < end:
            cursor.fail(f"the data of {entry.name} overlap those of {before}")
        end, before = entry.end, entry.name
    return entries


def _placed(cursor: _Cursor, entry: TensorEntry, start: int) -> TensorEntry:
    """The entry with offsets from the beginning of the file. SPK131 if its data end outside."""
    begin, end = start + entry.begin, start + entry.end
    if end > len(cursor.data):
        what = f"the data of {entry.name} end at byte {end:,}"
        _truncated(cursor.path, f"{what} of {len(cursor.data):,}", begin)
    return TensorEntry(entry.name, entry.type, entry.shape, begin, end)


def _read_tensor(cursor: _Cursor) -> TensorEntry:
    """One entry, offsets as in the file: from the beginning of the data."""
    name = cursor.text("a tensor's name", LONGEST_NAME)
    dimensions = cursor.integer("<I", f"the dimensions of {name}")
    if dimensions > MOST_DIMENSIONS:
        cursor.fail(f"the tensor {name} has {dimensions} dimensions")
    sizes = [cursor.integer("<Q", f"the shape of {name}") for _ in range(dimensions)]
    shape = tuple(reversed(sizes)) or (1,)
    type = _tensor_type(cursor.path, name, cursor.integer("<I", f"the type of {name}"))
    begin = cursor.integer("<Q", f"the offset of {name}")
    if 0 in shape or shape[-1] % type.elements:
        cursor.fail(
            f"the tensor {name} {list(shape)} can't be {type.name}: rows are a positive multiple "
            f"of {type.elements}"
        )
    size = math.prod(shape) // type.elements * type.bytes
    return TensorEntry(name, type, shape, begin, begin + size)


def _tensor_type(path: Path, name: str, number: int) -> TensorType:
    if number in READABLE:
        return READABLE[number]
    known = REFUSED.get(number, f"the unknown type {number}")
    raise SpikeError(
        "SPK133",
        "gguf",
        f"the tensor {name} in {path} is stored as {known}, which is not in this version.",
        f"Get the model as one of {', '.join(t.name for t in READABLE.values() if t.format)} "
        "(k-quants such as Q4_K_M), or build from its safetensors checkpoint.",
        ExitCode.UNSUPPORTED,
    )
