"""From a plan (which sequences, how many tokens of each) to the arrays of one ragged step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import BlockTable
from .session import StepInputs


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence.

    Attributes:
        tokens: their ids, at least one.
        start: index of the first in its sequence = tokens already in the cache.
        table: the sequence's blocks; it has grown to `stop`.
        rows: which of the chunk's tokens need logits, as offsets into `tokens`.
    """

    tokens: Sequence[int]
    start: int
    table: BlockTable
    rows: Sequence[int]

    @property
    def stop(self) -> int:
        """Tokens in the cache after the step."""
        return self.start + len(self.tokens)


def step_inputs(chunks: Sequence[Chunk]) -> StepInputs:
    """Lay the chunks one after the other."""
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + len(chunk.tokens))
    width = max(chunk.table.ids.size for chunk in chunks)
    rows = [start + row for start, c in zip(starts, chunks, strict=False) for row in c.rows]
    # One list and one array: a step's numbers are few, and each array made costs as much as they.
    numbers = [token for chunk in chunks for token in chunk.tokens]
    numbers += [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
    numbers += [slot for c in chunks for slot in c.table.slots(c.start, c.stop).tolist()]
    numbers += starts
    numbers += [chunk.stop for chunk in chunks]
    for chunk in chunks:
        ids = chunk.table.ids.tolist()
        numbers += ids + [0] * (width - len(ids))  # places that are never read
    numbers += rows
    packed = np.array(numbers, np.int32)
    return StepInputs(packed, starts[-1], len(chunks), width, len(rows))
