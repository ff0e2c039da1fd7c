"""One safetensors file, mapped lazily: the header is read and checked, the data never copied.

Layout (https://github.com/huggingface/safetensors, "Format"):

    8 bytes   little-endian u64 N
    N bytes   UTF-8 JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}; may also hold
              "__metadata__", which is ignored
    the rest  tensor data; offsets count from here, cover it without holes and without overlap

Every number is checked against the file's real size before anything is mapped, so a damaged or
hostile header can't make us read outside the file.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ...errors import SpikeError

# Bits per element of every dtype in the format, also of those that we don't load: an unused tensor
# of such a dtype (a boolean mask, for example) must not stop a build.
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Python 3.11's mmap module doesn't name it; the value is the one of Linux on x86-64 and arm64.
MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
GET_AGAIN = "Download the file again."


@dataclass(frozen=True)
class StoredTensor:
    """A header entry: `dtype` as the format spells it, `[begin, end)` in bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A checked, lazily mapped safetensors file; read-only for its users.

    Raises (from the constructor): SPK106 truncated, SPK107 git-LFS pointer, SPK119 corrupt header,
    SPK126 unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        header, data_start, self._size = _read_header(path)
        self.tensors = _checked_entries(path, header, data_start, self._size)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype and shape, over the mapped pages (no copy).

        The mapping is private: writing to the tensor never reaches the file.
        """
        entry = self.tensors[name]
        dtype = TORCH_DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:  # legal in the format, but not for aligned loads
            raw = bytearray(self.raw_bytes(name))
            return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape)
        flat = torch.frombuffer(self._mapped(), dtype=dtype, count=count, offset=entry.begin)
        return flat.reshape(entry.shape)

    def raw_bytes(self, name: str) -> memoryview:
        """The tensor's stored bytes, over the mapped pages (no copy)."""
        entry = self.tensors[name]
        return memoryview(self._mapped())[entry.begin : entry.end]

    def release(self) -> None:
        """Let go of the pages that were read; they are read again when a tensor needs them."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            # Private and writable, because torch has no read-only tensors; NORESERVE keeps a file
            # larger than memory mappable, as its pages stay clean.
            flags = mmap.MAP_PRIVATE | MAP_NORESERVE
            with self.path.open("rb") as file:
                self._map = mmap.mmap(
                    file.fileno(), self._size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        return self._map


def is_lfs_pointer(path: Path) -> bool:
    """Whether `path` holds a git-LFS pointer instead of the content it stands for."""
    with path.open("rb") as file:
        return file.read(len(LFS_PREFIX)) == LFS_PREFIX


def lfs_pointer_error(path: Path) -> SpikeError:
    """SPK107 for a file that was cloned without its content."""
    return SpikeError(
        "SPK107",
        "checkpoint",
        f"{path.name} in {path.parent} is a git-LFS pointer of {path.stat().st_size} bytes, "
        "not the file itself.",
        "Run `git lfs pull` in that directory, or download the checkpoint with `hf download`.",
    )


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed JSON header, the offset of the data and the file's size, both in bytes."""
    try:
        size = path.stat().st_size
        if is_lfs_pointer(path):
            raise lfs_pointer_error(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise _truncated(path, size, "8 bytes that give the header's length")
            if length > MAX_HEADER_BYTES:
                raise _corrupt(path, f"it claims a header of {length:,} bytes")
            if size < 8 + length:
                raise _truncated(path, size, f"a header of {length:,} bytes")
            return _parse_header(path, file.read(length)), 8 + length, size
    except OSError as error:
        raise unreadable(path, error) from error


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header isn't valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header isn't a JSON object")
    header.pop("__metadata__", None)
    return header


def _checked_entries(
    path: Path, header: Mapping[str, Any], data_start: int, size: int
) -> dict[str, StoredTensor]:
    """Header entries with absolute offsets: in the file, no overlap, no hole, length = shape."""
    tensors = {
        name: _checked_entry(path, name, entry, data_start) for name, entry in header.items()
    }
    position, previous = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            kind = "overlaps" if tensor.begin < position else "leaves a hole after"
            raise _corrupt(path, f"the data of tensor {tensor.name} {kind} that of {previous}")
        position, previous = tensor.end, tensor.name
    if position > size:
        raise _truncated(path, size, f"{position:,} (tensor {previous} ends there)")
    if position < size:
        raise _corrupt(path, f"{size - position:,} bytes follow the last tensor")
    return tensors


def _checked_entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _corrupt(path, f"the entry of tensor {name} isn't a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _corrupt(path, f"tensor {name} has the unknown dtype {dtype!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(path, f"tensor {name} has a bad shape or bad offsets")
    begin, end = offsets
    needed_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if (end - begin) * 8 != needed_bits:
        raise _corrupt(
            path, f"tensor {name} {dtype} {list(shape)} can't fill the bytes {begin} to {end}"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    """A JSON list of integers >= 0 (a boolean is no integer here)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _truncated(path: Path, size: int, needs: str) -> SpikeError:
    return SpikeError(
        "SPK106",
        "checkpoint",
        f"{path.name} in {path.parent} is truncated: it has {size:,} bytes but needs {needs}.",
        GET_AGAIN,
    )


def _corrupt(path: Path, what: str) -> SpikeError:
    return SpikeError(
        "SPK119",
        "checkpoint",
        f"{path.name} in {path.parent} isn't a valid safetensors file: {what}.",
        GET_AGAIN,
    )


def unreadable(path: Path | str, error: OSError) -> SpikeError:
    """SPK126 for a file that the system won't let us read."""
    return SpikeError(
        "SPK126",
        "checkpoint",
        f"{path} can't be read: {error.strerror or error}.",
        "Check that the file exists and that you may read it.",
    )
