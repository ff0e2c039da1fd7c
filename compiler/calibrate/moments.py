"""Second moments of matrix inputs, summed up over tokens.

Chunks of tokens are summed in their order, each sum by one thread: neither the number of threads
nor the order in which they finish changes a bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

COLUMNS = 1024
"""Columns of X^T X that one task sums up."""

AS_F64 = 128
"""Rows squared at a time: as f64, all of a chunk's would be its largest intermediate result."""

Rows: TypeAlias = Mapping[int, Tensor]
"""Inputs [n, K] of each expert in one chunk; of a plain matrix, those of number 0."""

Chunk = TypeVar("Chunk")
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Moment:
    """Of the input of one matrix, over all calibration tokens.

    Args:
        sum: sums of squares f64 [K], or X^T X f32 [K, K]; [E, K] or [E, K, K] for stacked experts.
        count: tokens seen; i64 [E] for stacked experts.
    """

    sum: Tensor
    count: Tensor | int

    @property
    def diagonal(self) -> Tensor:
        """Sums of squares f64, [K] or [E, K], whichever way they were summed."""
        full = self.sum.dtype is not torch.float64
        return self.sum.diagonal(dim1=-2, dim2=-1).double() if full else self.sum


class Workers:
    """Threads, each of which runs torch on itself alone; made by `workers`."""

    def __init__(self, pool: ThreadPoolExecutor, count: int, outside: int) -> None:
        self._pool, self.count, self._outside = pool, count, outside

    def map(self, function: Callable[[Given], Made], items: Sequence[Given]) -> list[Made]:
        """Results in the order of the items; the first error is raised."""
        return list(self._pool.map(torch.no_grad()(function), items))

    def waves(self, items: Sequence[Given]) -> Iterator[Sequence[Given]]:
        """As many items as there are threads, so that intermediate results stay few."""
        for first in range(0, len(items), self.count):
            yield items[first : first + self.count]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The caller's thread has torch's own number of threads back."""
        torch.set_num_threads(self._outside)
        try:
            yield
        finally:
            torch.set_num_threads(1)


@contextmanager
def workers(threads: int) -> Iterator[Workers]:
    """`threads` workers, or one per CPU for 0. Torch itself runs on one thread inside."""
    count, outside = threads or len(os.sched_getaffinity(0)), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, "walk", torch.set_num_threads, (1,)) as pool:
            yield Workers(pool, count, outside)
    finally:
        torch.set_num_threads(outside)


def moment(
    team: Workers,
    chunks: Sequence[Chunk],
    rows: Callable[[Chunk], Rows],
    shape: Sequence[int],
    full: bool,
) -> Moment:
    """Of the rows of all chunks.

    Args:
        rows: a chunk's inputs, computed by a worker.
        shape: of the matrix: [N, K], or [E, N, K] for stacked experts.
        full: sum X^T X, not only its diagonal.
    """
    experts, k = (shape[0] if len(shape) == 3 else 1), shape[-1]
    size = (experts, k, k) if full else (experts, k)
    sums = torch.zeros(size, dtype=torch.float32 if full else torch.float64)
    counts = torch.zeros(experts, dtype=torch.int64)
    for wave in team.waves(chunks):
        (_add_products if full else _add_squares)(team, wave, rows, sums, counts)
    if full:
        _mirror(sums)
    return Moment(sums, counts) if len(shape) == 3 else Moment(sums[0], int(counts))


def _add_squares(
    team: Workers,
    wave: Sequence[Chunk],
    rows: Callable[[Chunk], Rows],
    sums: Tensor,
    counts: Tensor,
) -> None:
    def squares(chunk: Chunk) -> dict[int, tuple[Tensor, int]]:
        return {e: (_squares(x), len(x)) for e, x in rows(chunk).items()}

    for part in team.map(squares, wave):
        for expert, (total, count) in part.items():
            sums[expert] += total
            counts[expert] += count


def _squares(x: Tensor) -> Tensor:
    """Sums of squares f64 [K] of rows [n, K]."""
    total = torch.zeros(x.shape[-1], dtype=torch.float64)
    for part in x.split(AS_F64):
        total += part.double().square().sum(0)
    return total


def _add_products(
    team: Workers,
    wave: Sequence[Chunk],
    rows: Callable[[Chunk], Rows],
    sums: Tensor,
    counts: Tensor,
) -> None:
    found = team.map(rows, wave)

    def strip(task: tuple[int, int]) -> None:
        expert, first = task
        for part in found:
            if expert in part:
                x, columns = part[expert], slice(first, first + COLUMNS)
                sums[expert, first:, columns].addmm_(x[:, first:].mT, x[:, columns])

    starts = range(0, sums.shape[-1], COLUMNS)
    team.map(strip, [(e, first) for e in range(len(sums)) for first in starts])
    for part in found:
        for expert, x in part.items():
            counts[expert] += len(x)


def _mirror(sums: Tensor) -> None:
    """X^T X [E, K, K] is symmetric: what was summed below the diagonal, above it."""
    for first in range(0, sums.shape[-1], COLUMNS):
        last = first + COLUMNS
        sums[:, first:last, last:] = sums[:, last:, first:last].mT
        block = sums[:, first:last, first:last].tril()
        sums[:, first:last, first:last] = block + block.tril(-1).mT
