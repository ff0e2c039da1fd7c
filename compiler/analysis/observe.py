"""Ranges observed on calibration text: the reference interpreter runs, every result is measured.

Sequences stand at the first and at the last positions that the engine allows, so that what grows
with the position (angles, linear biases) is seen at its largest. A graph whose step is one token
reads them token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

import torch
from torch import Tensor

from ..ir import Graph, Interpreter, Node, PagedState, Parameters, State, SymDim

BLOCK = 16
States = dict[str, Tensor | PagedState]
Steps = list[dict[str, Tensor]]
"""Inputs of each of several steps that follow each other."""


@dataclass(frozen=True)
class Observed:
    """Smallest, largest and root mean square of the finite elements; whether all were finite."""

    low: float
    high: float
    rms: float
    finite: bool = True

    @property
    def magnitude(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))


def measured(tensor: Tensor) -> Observed | None:
    """Of a floating-point tensor; None if it is none, or holds no finite element."""
    if not tensor.is_floating_point():
        return None
    finite = torch.isfinite(tensor)
    every = bool(finite.all())
    kept = tensor if every else tensor[finite]
    if not kept.numel():
        return None
    rms = torch.linalg.vector_norm(kept, dtype=torch.float64) / kept.numel() ** 0.5
    return Observed(float(kept.min()), float(kept.max()), float(rms), every)


def observe(
    graph: Graph, parameters: Parameters, steps: Steps, states: States | None = None
) -> dict[int, Observed]:
    """Measurements of every floating-point result over all steps, by the value's id."""
    found: dict[int, list[Observed]] = {}

    def watch(node: Node, results: list[Tensor]) -> None:
        for value, tensor in zip(node.results, results, strict=True):
            if (seen := measured(tensor)) is not None:
                found.setdefault(id(value), []).append(seen)

    runner = Interpreter(graph, parameters, dict(states or {}), watch)
    for inputs in steps:
        runner.run(inputs)
    return {key: _joined(seen) for key, seen in found.items()}


def _joined(seen: Sequence[Observed]) -> Observed:
    """Of all steps, which weigh the same."""
    return Observed(
        min(s.low for s in seen),
        max(s.high for s in seen),
        sqrt(fmean(s.rms**2 for s in seen)),
        all(s.finite for s in seen),
    )


def prefill(graph: Graph, sequences: Sequence[Sequence[int]], longest: int) -> tuple[Steps, States]:
    """Inputs and empty states of steps that read all sequences from their beginning.

    One step, but for a functional graph whose step is one token.

    Args:
        graph: with the functional or the streaming interface.
        sequences: token ids; of one length for the functional interface.
        longest: positions that the engine allows; every other sequence ends at the last one.
    """
    starts = [0 if i % 2 == 0 else max(0, longest - len(s)) for i, s in enumerate(sequences)]
    positions = [torch.arange(a, a + len(s)) for a, s in zip(starts, sequences, strict=True)]
    tokens = [torch.tensor(s) for s in sequences]
    if graph.is_ragged:
        step, pools = _ragged(graph, tokens, positions)
        return [step], pools
    whole = {"tokens": torch.stack(tokens), "positions": torch.stack(positions)}
    size = 1 if graph.is_stepwise else len(tokens[0])
    pieces = zip(*(v.split(size, 1) for v in whole.values()), strict=True)
    steps = [dict(zip(whole, piece, strict=True)) for piece in pieces]
    return steps, {s.name: _empty(s, len(tokens)) for s in graph.states.values()}


def _empty(state: State, batch: int) -> Tensor:
    """No rows along a cache's axis; zeros for a state that is replaced."""
    shape = [batch if isinstance(d, SymDim) else d for d in state.type.shape]
    if state.kind == "kv":
        shape[state.axis] = 0
    return torch.zeros(shape)


def _ragged(
    graph: Graph, tokens: list[Tensor], positions: list[Tensor]
) -> tuple[dict[str, Tensor], States]:
    lengths = torch.tensor([len(t) for t in tokens])
    blocks = -(-int(lengths.max()) // BLOCK)
    tables = torch.arange(len(tokens) * blocks).reshape(len(tokens), blocks)
    ends = lengths.cumsum(0)
    given = {
        "tokens": torch.cat(tokens),
        "positions": torch.cat(positions),
        "slots": torch.cat(
            [t[0] * BLOCK + torch.arange(n) for t, n in zip(tables, lengths, strict=True)]
        ),
        "seq_starts": torch.cat((torch.zeros(1, dtype=torch.int64), ends)),
        "kv_lens": lengths,
        "block_tables": tables,
        "logit_rows": ends - 1,
    }
    pools: States = {
        s.name: PagedState(
            torch.zeros(tables.numel() * BLOCK, *(int(str(d)) for d in s.type.shape[1:])), BLOCK
        )
        for s in graph.states.values()
    }
    return {v.name: given[v.name] for v in graph.inputs}, pools
