"""Constants of a placed graph -> rank0.weights, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from onnx import TensorProto

from ..backends import StoredTensor
from ..engine import WeightsWriter
from ..frontend.checkpoint import Checkpoint
from ..ir import Constant, Graph
from ..quantize import Blocks, store, store_blocks, stored_bytes
from .progress import Progress

ARRAY = "array"

Ready: TypeAlias = Callable[[Constant], Blocks | None]
"""The blocks of a constant that exist already, in the format that its storage plan names; of a
constant that is no matrix (format `array`) its plain float32 as one row of bytes."""


def nothing_ready(_: Constant) -> Blocks | None:
    """Every constant is quantised on the way to the disk."""
    return None


Importance: TypeAlias = Callable[[Constant], npt.NDArray[np.float32] | None]
"""How much each input channel of a constant counts: f32 ``[K]``, ``[E, K]`` for stacked experts."""


def all_alike(_: Constant) -> npt.NDArray[np.float32] | None:
    """Nothing is known of the inputs."""
    return None


def write_weights(
    graph: Graph,
    checkpoint: Checkpoint,
    writer: WeightsWriter,
    threads: int,
    progress: Progress,
    ready: Ready = nothing_ready,
    importance: Importance = all_alike,
) -> dict[str, StoredTensor]:
    """Quantises, packs and writes every parameter of the graph; where each one lies.

    Memory stays bounded by one chunk and, where a parameter is stacked or split, that parameter.

    Raises:
        SpikeError: SPK403 for values that cannot be stored, SPK503/514 from the disk.
    """
    stored: dict[str, StoredTensor] = {}
    for const in parameters(graph):
        assert const.parameter is not None
        spec = writer.append(
            const.name,
            format="f32" if const.format == ARRAY else const.format,
            shape=shape(const),
            role=const.role,
            parameters=(const.parameter,),
            chunks=_chunks(const, checkpoint, threads, ready(const), importance),
        )
        progress.advance(spec.bytes)
        stored[const.name] = _location(const, spec.offset, spec.bytes)
    return stored


def _chunks(
    const: Constant,
    checkpoint: Checkpoint,
    threads: int,
    blocks: Blocks | None,
    importance: Importance,
) -> Iterator[memoryview]:
    if blocks is not None:
        assert blocks.format == const.format, (const.name, blocks.format, const.format)
    for chunk in _ready(blocks) if blocks else _quantised(const, checkpoint, threads, importance):
        yield chunk
        checkpoint.release()  # the source's pages behind the chunk


def _ready(blocks: Blocks) -> Iterator[memoryview]:
    if blocks.format == ARRAY:
        return iter([np.ascontiguousarray(blocks.rows).data])
    return store_blocks(blocks)


def _quantised(
    const: Constant, checkpoint: Checkpoint, threads: int, importance: Importance
) -> Iterator[memoryview]:
    name, weigh = const.parameter or const.name, importance(const)
    values = source_values(const, checkpoint)
    return store(values, _format(const), name=name, threads=threads, importance=weigh)


def parameters(graph: Graph) -> list[Constant]:
    """Constants that come from the checkpoint, in order."""
    return [c for c in graph.constants.values() if c.parameter is not None]


def shape(const: Constant) -> tuple[int, ...]:
    """A constant's shape, which a placed graph has in ints."""
    return tuple(d for d in const.shape if isinstance(d, int))


def total_bytes(graph: Graph) -> int:
    """Bytes of all parameters as stored, without padding to pages."""
    return sum(
        4 * prod(shape(c)) if c.format == ARRAY else stored_bytes(c.format, shape(c))
        for c in parameters(graph)
    )


def _format(const: Constant) -> str:
    return "f32" if const.format == ARRAY else const.format


def source_values(const: Constant, checkpoint: Checkpoint) -> torch.Tensor:
    """What is stored for a constant, before it is quantised; flat for an array."""
    assert const.parameter is not None
    values: torch.Tensor = const.part_of(checkpoint.load(const.parameter))
    if const.plus:
        values = values.float() + const.plus
    return values.reshape(-1) if const.format == ARRAY else values


def _location(const: Constant, offset: int, length: int) -> StoredTensor:
    if const.format == ARRAY:
        return StoredTensor(TensorProto.FLOAT, shape(const), offset, length)
    return StoredTensor(TensorProto.UINT8, (length,), offset, length)
