"""Constants of a placed graph -> rank0.weights, one tensor at a time."""

from __future__ import annotations

from math import prod

import torch
from onnx import TensorProto

from ..backends import StoredTensor
from ..engine import WeightsWriter
from ..frontend.checkpoint import Checkpoint
from ..ir import Constant, Graph
from ..quantize import store, stored_bytes
from .progress import Progress

ARRAY = "array"


def write_weights(
    graph: Graph,
    checkpoint: Checkpoint,
    writer: WeightsWriter,
    threads: int,
    progress: Progress,
) -> dict[str, StoredTensor]:
    """Quantises, packs and writes every parameter of the graph; where each one lies.

    Memory stays bounded by the largest tensor's stored pages and one chunk.

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
            chunks=store(
                _values(const, checkpoint), _format(const), name=const.parameter, threads=threads
            ),
        )
        progress.advance(spec.bytes)
        stored[const.name] = _location(const, spec.offset, spec.bytes)
    return stored


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


def _values(const: Constant, checkpoint: Checkpoint) -> torch.Tensor:
    assert const.parameter is not None
    values: torch.Tensor = const.part_of(checkpoint.load(const.parameter))
    if const.plus:
        values = values.float() + const.plus
    return values.reshape(-1) if const.format == ARRAY else values


def _location(const: Constant, offset: int, length: int) -> StoredTensor:
    if const.format == ARRAY:
        return StoredTensor(TensorProto.FLOAT, shape(const), offset, length)
    return StoredTensor(TensorProto.UINT8, (length,), offset, length)
