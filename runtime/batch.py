"""From a plan (which sequences, how many tokens of each) to the arrays of one ragged step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    starts = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)], dtype=np.int32)
    return StepInputs(
        tokens=_int32([token for chunk in chunks for token in chunk.tokens]),
        positions=np.concatenate([np.arange(c.start, c.stop, dtype=np.int32) for c in chunks]),
        slots=np.concatenate([chunk.table.slots(chunk.start, chunk.stop) for chunk in chunks]),
        seq_starts=starts,
        kv_lens=_int32([chunk.stop for chunk in chunks]),
        block_tables=_block_tables(chunks),
        logit_rows=_int32(
            [int(first) + row for first, c in zip(starts, chunks, strict=False) for row in c.rows]
        ),
    )


def _block_tables(chunks: Sequence[Chunk]) -> NDArray[np.int32]:
    """The tables side by side, ``[B, M]``; unused places are 0 and never read."""
    width = max(chunk.table.ids.size for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: chunk.table.ids.size] = chunk.table.ids
    return tables


def _int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)
