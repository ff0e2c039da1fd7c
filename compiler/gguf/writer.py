"""Writes a GGUF file (version 3, little-endian): the same content gives the same bytes.

Layout as in `reader.py`. Keys and tensors keep the order in which they are given.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...errors import SpikeError
from .reader import ALIGNMENT, ARRAY, BOOL, MAGIC, SCALARS, STRING, Value
from .tensor_types import TensorType

VERSION = 3
U32, I32, F32, U64, I64 = 4, 5, 6, 10, 11
Buffer: TypeAlias = bytes | bytearray | memoryview
_KINDS = {np.dtype(name): kind for kind, name in SCALARS.items()}


@dataclass(frozen=True)
class TensorOut:
    """A tensor to be written: `data` gives its bytes, rows of `shape[-1]` values, when asked.

    `data` is asked once, in order, and a chunk at a time.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: Callable[[], Iterable[Buffer]]

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) // self.type.elements * self.type.bytes


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[TensorOut]) -> None:
    """Writes the file: whole, or not at all (it appears by one rename), and directories above it.

    A whole number becomes u32 if it fits, else i32, u64 or i64; a float f32; an array keeps its
    dtype. Raises SPK594 if the disk refuses.
    """
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with work.open("wb") as file:
            for chunk in gguf_chunks(metadata, tensors):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    except OSError as error:
        raise SpikeError(
            "SPK594",
            "gguf",
            f"{path} can't be written: {error.strerror or error}.",
            "Check the directory, its permissions and the free space.",
        ) from error
    finally:
        with suppress(OSError):
            work.unlink()


def gguf_chunks(metadata: Mapping[str, Value], tensors: Sequence[TensorOut]) -> Iterator[Buffer]:
    """The file's bytes in order.

    Raises:
        ValueError: a tensor's chunks have another size than its shape, or a value has no type in
            GGUF (a mistake of ours).
    """
    head = b"".join(_head(metadata, tensors))
    yield head
    yield _padding(len(head))
    for tensor in tensors:
        written = 0
        for chunk in tensor.data():
            written += memoryview(chunk).nbytes
            yield chunk
        if written != tensor.bytes:
            raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.bytes}")
        yield _padding(written)


def _head(metadata: Mapping[str, Value], tensors: Sequence[TensorOut]) -> Iterator[bytes]:
    yield MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    for key, value in metadata.items():
        yield _string(key) + _typed(key, value)
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        yield _string(tensor.name) + sizes + struct.pack("<IQ", tensor.type.number, offset)
        offset += tensor.bytes + len(_padding(tensor.bytes))


def _typed(key: str, value: Value) -> bytes:
    """Type number and bytes of a value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list):
        items = b"".join(map(_string, value))
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + items
    if isinstance(value, np.ndarray):
        kind = _KINDS.get(value.dtype)
        if kind is None or value.ndim != 1:
            raise ValueError(f"{key} is {value.dtype} {value.shape}, which GGUF doesn't have")
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
    kind = BOOL if isinstance(value, bool) else _number_kind(value)
    return struct.pack("<I", kind) + np.array(value, SCALARS[kind]).tobytes()


def _number_kind(value: int | float) -> int:
    if isinstance(value, float):
        return F32
    for kind in (U32, I32, U64):
        limits = np.iinfo(SCALARS[kind])
        if limits.min <= value <= limits.max:
            return kind
    return I64


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)
