"""Memory that a build takes, told before it starts.

Weights stream through: what is resident is the compiler itself (Python, torch, the graph), one
chunk of one tensor, and a parameter that has to be stacked or split before it can be stored.
"""

from __future__ import annotations

import resource
from math import prod
from pathlib import Path

from ..frontend.checkpoint import Checkpoint
from ..ir import Graph
from ..quantize import CHUNK_ELEMENTS
from .weights import parameters, shape

CHUNK_VALUE_BYTES = 32
"""Of one element in a chunk: twice as f32 (one is read while the last is held), its block before
and after packing, and about as much again that the allocator keeps."""
STATUS = Path("/proc/self/status")


def peak_memory(graph: Graph, checkpoint: Checkpoint) -> int:
    """Expected peak resident bytes of the build that this process has compiled the graph of.

    The process has its own peak behind it; writing the weights adds to what is resident now.
    """
    writing = max(
        (_writing(c.parameter, shape(c), checkpoint) for c in parameters(graph)), default=0
    )
    return max(_status("VmHWM"), _status("VmRSS") + writing)


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
