"""Constants of a placed graph as a TensorRT network holds them: floats, or int4 blocks.

They are quantised once and wait in a file without a name beside the engine that is being written,
mapped: the plan hashes them, the builder reads them in place, the checker and the golden gate read
them again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ...kernels import Format, quantize
from ..backends.tensorrt import Int4Matrix
from ..frontend.checkpoint import Checkpoint
from ..ir import Constant, DType, Graph
from ..ir.primitives import TORCH_DTYPE
from ..quantize import CHUNK_ELEMENTS, ErrorMeter
from ..quantize.int4 import INT4_SYM, signed_nibbles
from ..quantize.store import as_f32, raise_if_unrepresentable
from .weights import (
    ARRAY,
    Importance,
    Ready,
    all_alike,
    nothing_ready,
    parameters,
    shape,
    source_values,
)

Array = npt.NDArray[Any]
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": np.float32, ARRAY: np.float32}
"""How a float format is kept here; numpy has no bf16, so its values are kept as f32."""


@dataclass(frozen=True)
class _Place:
    offset: int
    dtype: npt.DTypeLike
    shape: tuple[int, ...]


class NetworkConstants:
    """Called with a constant's name, gives its values; `fill` has made them.

    Args:
        graph: a placed graph.
        directory: for the file.
    """

    def __init__(self, graph: Graph, directory: Path) -> None:
        self._graph = graph
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115, lives as we do
        self._places: dict[str, tuple[_Place, ...]] = {}
        self.errors: dict[str, float] = {}
        """Each matrix's relative error, as in the engine's report."""

    def fill(
        self,
        checkpoint: Checkpoint,
        ready: Ready = nothing_ready,
        importance: Importance = all_alike,
        threads: int = 0,
        tick: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Quantises and writes every parameter; `tick` is told the bytes of each.

        Raises SpikeError SPK403 for values that cannot be stored.
        """
        for const in parameters(self._graph):
            before = self._file.tell()
            if const.format == INT4_SYM:
                self._places[const.name] = self._int4(const, checkpoint, ready, importance, threads)
            else:
                self._places[const.name] = (self._floats(const, checkpoint),)
            checkpoint.release()
            tick(self._file.tell() - before)
        self._file.flush()

    def __call__(self, name: str) -> Array | Int4Matrix:
        """Floats in the constant's own shape, or int4 blocks."""
        const = self._graph.constants[name]
        if const.data is not None:
            return const.data
        arrays = [
            np.memmap(self._file, np.dtype(p.dtype), "c", p.offset, p.shape)
            for p in self._places[name]
        ]
        return Int4Matrix(arrays[0], arrays[1]) if len(arrays) == 2 else arrays[0]

    def _floats(self, const: Constant, checkpoint: Checkpoint) -> _Place:
        values = source_values(const, checkpoint)
        name, half = const.parameter or const.name, None
        if const.format in ("f16", "bf16"):
            half = TORCH_DTYPE[DType(const.format)]
        place = _Place(self._file.tell(), FLOATS[const.format], shape(const))
        meter = ErrorMeter()
        for first, rows in _rows(values.reshape(-1, values.shape[-1])):
            kept = (rows.to(half) if half else rows).float().numpy()
            if not np.isfinite(kept).all():
                raise_if_unrepresentable(name, as_f32(rows), first, const.format)
            if half:
                meter.compare(as_f32(rows), kept)
            self._file.write(np.ascontiguousarray(kept, place.dtype).data)
        if half:
            self.errors[const.name] = meter.relative
        return place

    def _int4(
        self,
        const: Constant,
        checkpoint: Checkpoint,
        ready: Ready,
        importance: Importance,
        threads: int,
    ) -> tuple[_Place, _Place]:
        n, k = shape(const)
        name, meter, scales = const.parameter or const.name, ErrorMeter(), []
        blocks, weigh = ready(const), importance(const)
        start = self._file.tell()
        for first, chunk in _rows(source_values(const, checkpoint)):
            values = as_f32(chunk)
            if blocks is not None:
                rows = np.ascontiguousarray(blocks.rows[first : first + len(values)])
            else:
                try:
                    rows = quantize(values, cast(Format, INT4_SYM), threads, weigh)
                except ValueError:
                    raise_if_unrepresentable(name, values, first, INT4_SYM)
                    raise
            meter.add(values, rows, INT4_SYM)
            packed, own = signed_nibbles(rows)
            self._file.write(packed.data)
            scales.append(own)
        self.errors[const.name] = meter.relative
        at = self._file.tell()
        self._file.write(np.concatenate(scales).data)
        return _Place(start, np.uint8, (n, k // 2)), _Place(at, np.float16, (n, k // 32))


def _rows(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of a matrix, some at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, values.shape[-1]))
    for first in range(0, len(values), step):
        yield first, values[first : first + step]
