"""Translation validation: run the graph before and after each pass and compare (`--verify-passes`).

The reference interpreter runs both on random and adversarial inputs: a long prompt in chunks and
then token by token, several ragged sequences, an empty cache, large positions. Functional and
ragged graphs are driven through their own interface, so a pass that changes the interface is
compared too. A ragged graph's pools are filled with NaN first: a read of a row that was never
written shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..compiler.ir import Graph, Interpreter, PagedState, Value, parse_graph, print_graph
from ..errors import ExitCode, SpikeError
from .base import Pass, PassReport
from .manager import Observer

ROUNDING = 2e-5
"""Relative to the largest logit: what another order of sums may change in a deep model."""
BLOCK = 4
Tensor = Any
Parameters = Callable[[str], Tensor]


@dataclass(frozen=True)
class Feed:
    """One sequence: how many tokens each step brings (0: it waits), and its first position."""

    chunks: tuple[int, ...]
    first_position: int = 0


def scenarios(longest: int) -> dict[str, tuple[Feed, ...]]:
    """Feeds by name; positions stay below `longest`."""
    return {
        "prefill": (Feed((11,)),),
        "chunks and decode": (Feed((7, 1, 5, 1, 1)),),
        "ragged": (Feed((9, 1, 1)), Feed((0, 6, 1)), Feed((1, 1, 1))),
        "large positions": (Feed((5, 2), first_position=max(0, min(3001, longest - 8))),),
    }


class ValidatePasses(Observer):
    """Compares the outputs around every pass.

    Args:
        parameters: values of a traced parameter by name.
        longest: tokens of one sequence that the model allows.
        seed: of the token ids.
    """

    def __init__(self, parameters: Parameters, longest: int, seed: int = 0) -> None:
        self.parameters, self.seed, self.scenarios = parameters, seed, scenarios(longest)
        self._before: dict[str, list[Tensor]] = {}
        self._text = ""

    def before_pass(self, step: Pass, graph: Graph) -> None:
        """Runs the first graph; later ones were run after the pass before."""
        if not self._before:
            self._before = self._outputs(graph)
        self._text = print_graph(graph)

    def after_pass(self, step: Pass, graph: Graph, report: PassReport) -> None:
        """Raises SpikeError SPK307 (exit 70) if the pass changed the meaning of the graph."""
        if not report.modified:
            return
        after = self._outputs(graph)
        limit = max(step.tolerance, ROUNDING)
        worst = max(
            (difference(b, a), name)
            for name in after
            for b, a in zip(self._before[name], after[name], strict=True)
        )
        report.facts["validated"] = {"largest relative difference": worst[0], "limit": limit}
        self._before = after
        if not worst[0] <= limit:
            raise SpikeError(
                "SPK307",
                "passes",
                f"{step.name} changes the result: relative difference {worst[0]:.3g} in scenario "
                f"{worst[1]!r}, allowed {limit:.3g}.",
                f"This is a bug in SpikeInfer: leave out {step.name} in the recipe and report it "
                "with the files of --dump-ir.",
                ExitCode.INTERNAL,
            )

    def _outputs(self, graph: Graph) -> dict[str, list[Tensor]]:
        return outputs(graph, self.parameters, self.scenarios, self.seed)


def difference(before: Tensor, after: Tensor) -> float:
    """Largest absolute difference over the largest magnitude before; inf for NaN or shape."""
    if before.shape != after.shape:
        return float("inf")
    scale = before.abs().max().clamp_min(1e-30)
    worst = ((before - after).abs().max() / scale).item()
    return worst if worst == worst else float("inf")


def outputs(
    graph: Graph, parameters: Parameters, feeds: Mapping[str, tuple[Feed, ...]], seed: int
) -> dict[str, list[Tensor]]:
    """Logits [tokens, V] of every sequence of every scenario."""
    ragged = any(v.name == "slots" for v in graph.inputs)
    run = _run_ragged if ragged else _run_functional
    results = {}
    for name, sequences in feeds.items():
        generator = torch.Generator().manual_seed(seed)
        tokens = [
            torch.randint(0, 1 << 30, (sum(s.chunks),), generator=generator) % _vocab(graph)
            for s in sequences
        ]
        # A copy: the interpreter binds values by identity and a pass may be half-way rewritten.
        results[name] = run(parse_graph(print_graph(graph)), parameters, sequences, tokens)
    return results


def _vocab(graph: Graph) -> int:
    width = graph.outputs[0].shape[-1]
    assert isinstance(width, int)
    return width


def _starts(sequence: Feed) -> list[int]:
    return [sum(sequence.chunks[:i]) for i in range(len(sequence.chunks) + 1)]


def _run_functional(
    graph: Graph, parameters: Parameters, sequences: Sequence[Feed], tokens: list[Tensor]
) -> list[Tensor]:
    results = []
    for sequence, ids in zip(sequences, tokens, strict=True):
        empty: dict[str, Tensor | PagedState] = {
            s.name: torch.zeros([d if isinstance(d, int) else 1 for d in s.type.shape]).narrow(
                s.axis, 0, 0
            )
            for s in graph.states.values()
        }
        runner = Interpreter(graph, parameters, empty)
        rows = []
        for start, end in _spans(sequence):
            positions = torch.arange(start, end) + sequence.first_position
            step = {"tokens": ids[start:end], "positions": positions}
            rows.append(runner.run({k: v.unsqueeze(0) for k, v in step.items()})[0][0])
        results.append(torch.cat(rows))
    return results


def _spans(sequence: Feed) -> list[tuple[int, int]]:
    starts = _starts(sequence)
    return [(a, b) for a, b in pairwise(starts) if b > a]


def _run_ragged(
    graph: Graph, parameters: Parameters, sequences: Sequence[Feed], tokens: list[Tensor]
) -> list[Tensor]:
    pools = _pools(graph, sequences)
    runner = Interpreter(graph, parameters, pools)
    wanted = [[] for _ in sequences]  # type: list[list[Tensor]]
    for step in range(max(len(s.chunks) for s in sequences)):
        active = [i for i, s in enumerate(sequences) if step < len(s.chunks) and s.chunks[step]]
        spans = [_starts(sequences[i])[step : step + 2] for i in active]
        given = _step_inputs(graph, active, spans, sequences, tokens)
        (logits,) = runner.run(given)
        for i, rows in zip(active, logits.split([b - a for a, b in spans]), strict=True):
            wanted[i].append(rows)
    return [torch.cat(rows) for rows in wanted]


def _blocks_of(index: int, sequences: Sequence[Feed]) -> Tensor:
    """Blocks of one sequence, interleaved with the others' and backwards."""
    longest = max(-(-sum(s.chunks) // BLOCK) for s in sequences)
    return torch.arange(longest).flip(0) * len(sequences) + index


def _pools(graph: Graph, sequences: Sequence[Feed]) -> dict[str, Tensor | PagedState]:
    rows = len(sequences) * len(_blocks_of(0, sequences)) * BLOCK
    return {
        s.name: PagedState(
            torch.full((rows, *(int(str(d)) for d in s.type.shape[1:])), float("nan")), BLOCK
        )
        for s in graph.states.values()
    }


def _step_inputs(
    graph: Graph,
    active: list[int],
    spans: list[list[int]],
    sequences: Sequence[Feed],
    tokens: list[Tensor],
) -> dict[str, Tensor]:
    index = [torch.arange(a, b) for a, b in spans]
    tables = [_blocks_of(i, sequences) for i in active]
    lengths = torch.tensor([b - a for a, b in spans])
    first = [sequences[i].first_position for i in active]
    given = {
        "tokens": torch.cat([tokens[i][a:b] for i, (a, b) in zip(active, spans, strict=True)]),
        "positions": torch.cat([i + f for i, f in zip(index, first, strict=True)]),
        "slots": torch.cat(
            [t[i // BLOCK] * BLOCK + i % BLOCK for t, i in zip(tables, index, strict=True)]
        ),
        "seq_starts": torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        "kv_lens": torch.tensor([b for _, b in spans]),
        "block_tables": torch.stack(tables),
        "logit_rows": torch.arange(int(lengths.sum())),
    }
    return {v.name: given[v.name] for v in graph.inputs if isinstance(v, Value)}
