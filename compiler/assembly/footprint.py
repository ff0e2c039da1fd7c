"""Memory that a build takes, told before it starts.

Weights stream through: what is resident is the compiler itself (Python, torch, the graph), one
chunk of one tensor, and a parameter that has to be stacked or split before it can be stored. Error
feedback comes before that: values of all calibration tokens, the weights of one stage, and the
second moment of one input with its factor.
"""

from __future__ import annotations

import resource
from math import prod
from pathlib import Path

from ..frontend.checkpoint import Checkpoint
from ..ir import Graph
from ..quantize import CHUNK_ELEMENTS, Role
from .feedback import MOST_MOMENT_BYTES, TOKENS, block_formats
from .request import BuildRequest
from .source import Source
from .weights import parameters, shape

CHUNK_VALUE_BYTES = 32
"""Of one element in a chunk: twice as f32 (one is read while the last is held), its block before
and after packing, and about as much again that the allocator keeps."""
TOKEN_VALUE_BYTES = 32
"""Of one value of the residual stream: it and a normed copy as f32, times four, as measured on an
8B model (docs/calibration.md)."""
STAGE_MATRICES = 3
"""Of the largest shape that are held as f32 at a time: gate, up, down."""
FACTOR_BYTES = 28
"""Of one element of a second moment: itself, its reverse, both factors in f64, the result."""
ENDS = (Role.TOKEN_EMBD, Role.OUTPUT)
"""Matrices whose rows are as wide as the residual stream."""
STATUS = Path("/proc/self/status")


def peak_memory(request: BuildRequest, graph: Graph, source: Source) -> int:
    """Expected peak resident bytes of the build that this process has compiled the graph of.

    The process has its own peak behind it; error feedback, if the request asks for it, and then
    writing the weights add to what is resident now.
    """
    checkpoint = source.checkpoint
    work = [_writing(c.parameter, shape(c), checkpoint) for c in parameters(graph)]
    if request.resolved_quantizer == "feedback":
        work.append(_feedback(graph, source))
    return max(_status("VmHWM"), _status("VmRSS") + max(work, default=0))


def _feedback(graph: Graph, source: Source) -> int:
    """Of the walk over the calibration text, which reads at most TOKENS tokens."""
    if not block_formats(graph, source.has_blocks):
        return 0
    matrices = [c for c in parameters(graph) if len(c.shape) > 1]
    stream = max((shape(c)[-1] for c in matrices if c.role in ENDS), default=0)
    layers = [shape(c) for c in matrices if c.role not in ENDS]
    stage = 4 * STAGE_MATRICES * max(map(prod, layers), default=0)
    moments = [4 * prod(size[:-2]) * size[-1] ** 2 for size in layers]
    moment = max((m for m in moments if m <= MOST_MOMENT_BYTES), default=0)
    return TOKENS * stream * TOKEN_VALUE_BYTES + stage + moment * FACTOR_BYTES // 4


def _writing(name: str | None, sizes: tuple[int, ...], checkpoint: Checkpoint) -> int:
    assert name is not None
    chunk = min(prod(sizes), CHUNK_ELEMENTS) * CHUNK_VALUE_BYTES
    return chunk + checkpoint.loading_bytes(name)


def _status(field: str) -> int:
    """A line of the process's status in bytes; its peak so far where there is no such file."""
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
