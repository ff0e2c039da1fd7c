"""Quantises and packs a tensor chunk by chunk, so that memory does not grow with its size.

A chunk is a whole number of 16-row groups, and the packed layout is its row groups in order: the
chunks laid end to end are the packed matrix, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ...errors import SpikeError
from ...kernels import Format, pack, quantize
from .error import ErrorMeter

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor | npt.NDArray[Any]

ROW_GROUP = 16
"""Rows that the packed layout interleaves."""

CHUNK_ELEMENTS = 1 << 22
"""Elements quantised at a time: 16 MB as f32."""


def store(
    tensors: Tensor | Sequence[Tensor],
    format: str,
    *,
    name: str,
    threads: int = 0,
    importance: npt.NDArray[np.float32] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    meter: ErrorMeter | None = None,
) -> Iterator[memoryview]:
    """The bytes of a tensor in rank0.weights, in order, a chunk at a time.

    Args:
        tensors: ``[N, K]``, ``[E, N, K]`` or one dimension, of any float type and stride; or
            several matrices of equal K, stored as one, one above the other.
        format: storage format; one-dimensional tensors are plain little-endian f32.
        name: for the error message.
        threads: of the quantiser, 0 for one per CPU. The bytes don't depend on it.
        importance: of the input channels, f32 ``[K]``, ``[E, K]`` for stacked experts; None to
            quantise without.
        chunk_elements: bound on the elements held as f32.
        meter: is given every chunk of a matrix with what it became.

    Raises:
        SpikeError: SPK403 naming the first value that is NaN, infinite, or too large for `format`.
        ValueError: shapes that don't fit together (a mistake of ours).
    """
    parts = cast("Sequence[Tensor]", tensors if isinstance(tensors, list | tuple) else [tensors])
    if parts[0].ndim == 1:
        yield from _store_vector(parts, format, name)
    elif parts[0].ndim == 3:
        for part in parts:
            for expert in range(part.shape[0]):
                label = f"{name}[{expert}]"
                own = None if importance is None else importance[expert]
                yield from store(part[expert], format, name=label, threads=threads, importance=own,
                                 chunk_elements=chunk_elements, meter=meter)  # fmt: skip
    else:
        yield from _store_matrix(parts, format, name, threads, importance, chunk_elements, meter)


def _store_vector(parts: Sequence[Tensor], format: str, name: str) -> Iterator[memoryview]:
    if format != "f32":
        raise ValueError(f"{name} has one dimension and is stored as f32, not {format}")
    values = np.concatenate([as_f32(part) for part in parts])
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise _unrepresentable(name, (int(bad[0]),), values[bad[0]], format)
    yield values.astype("<f4", copy=False).data.cast("B")


def _store_matrix(
    parts: Sequence[Tensor],
    format: str,
    name: str,
    threads: int,
    importance: npt.NDArray[np.float32] | None,
    chunk_elements: int,
    meter: ErrorMeter | None,
) -> Iterator[memoryview]:
    k = int(parts[0].shape[1])
    if any(part.ndim != 2 or part.shape[1] != k for part in parts):
        raise ValueError(f"{name}: matrices of different K cannot be stored as one")
    step = max(1, chunk_elements // k // ROW_GROUP) * ROW_GROUP
    for first, rows in _row_chunks(parts, step):
        try:
            blocks = quantize(rows, cast(Format, format), threads, importance)
        except ValueError:
            raise_if_unrepresentable(name, rows, first, format)
            raise
        if meter is not None:
            meter.add(rows, blocks, format)
        yield pack(blocks, cast(Format, format), len(rows), k).data


def _row_chunks(
    parts: Sequence[Tensor], step: int
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """(first row, f32 rows) of the parts laid one above the other, `step` rows at a time."""
    pending: list[npt.NDArray[np.float32]] = []
    first = have = 0
    for part in parts:
        row, n = 0, int(part.shape[0])
        while row < n:
            take = min(step - have, n - row)
            pending.append(as_f32(part[row : row + take]))
            row, have = row + take, have + take
            if have == step:
                yield first, _joined(pending)
                first, have, pending = first + have, 0, []
    if pending:
        yield first, _joined(pending)


def _joined(rows: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def as_f32(tensor: Tensor) -> npt.NDArray[np.float32]:
    """A C-contiguous f32 array; torch tensors (bf16 has no numpy type) are converted by torch."""
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach().float().contiguous().numpy()
    return np.ascontiguousarray(tensor, dtype=np.float32)


def raise_if_unrepresentable(
    name: str, rows: npt.NDArray[np.float32], first: int, format: str
) -> None:
    """Name the value because of which `quantize` refused: the first not finite, or the largest."""
    bad = np.argwhere(~np.isfinite(rows))
    if not len(bad) and np.abs(rows).max(initial=0) < np.finfo(np.float16).max:
        return  # it was refused for another reason
    row, column = bad[0] if len(bad) else np.unravel_index(np.abs(rows).argmax(), rows.shape)
    raise _unrepresentable(name, (first + int(row), int(column)), rows[row, column], format)


def _unrepresentable(
    name: str, index: tuple[int, ...], value: np.float32, format: str
) -> SpikeError:
    finite = bool(np.isfinite(value))
    what = f"too large for {format}" if finite else "not a finite number"
    remedy = (
        "Choose a format with a wider range, such as bf16 or f32."
        if finite
        else "The checkpoint is damaged or its training diverged: download it again."
    )
    place = ", ".join(map(str, index))
    return SpikeError("SPK403", "quantization", f"{name}[{place}] is {value}: {what}.", remedy)
