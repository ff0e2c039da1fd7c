"""What translation validation feeds a graph: random and adversarial steps, for every interface.

Functional and ragged graphs are driven through their own interface, so a pass that changes the
interface is compared too. Adversaries: an empty cache and one longer than any window, prompts in
chunks and token by token, several ragged sequences with interleaved blocks, large positions,
embeddings with outliers, and tiny matrices (where a norm's eps decides, in every layer). A ragged
graph's pools are filled with NaN first, so a read of a row that was never written shows; its logits
are asked for backwards and one of them twice, so that rows cannot be taken for tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..compiler.ir import Constant, Graph, Interpreter, Node, PagedState, State, symbol

BLOCK = 4
LONGEST_PAST = 4099
"""Rows of the long cache: beyond the windows that models use (up to 4096)."""
OUTLIER, TINY = 40.0, 0.03
TOKENS, ROWS = symbol("T"), symbol("R")
Tensor = Any
Parameters = Callable[[str], Tensor]
States = dict[str, Tensor | PagedState]


@dataclass(frozen=True)
class Feed:
    """One sequence.

    Args:
        chunks: how many tokens each step brings (0: it waits).
        first_position: of the first row, cached or new.
        past: rows of random content in the cache before the first step.
    """

    chunks: tuple[int, ...]
    first_position: int = 0
    past: int = 0


@dataclass(frozen=True)
class Scenario:
    """Sequences that run together.

    Args:
        weights: ``plain``, ``outliers`` (one channel of each embedding is OUTLIER times as large)
            or ``tiny`` (every matrix is scaled by TINY).
    """

    feeds: tuple[Feed, ...]
    weights: str = "plain"


def scenarios(longest: int) -> dict[str, Scenario]:
    """Scenarios by name; positions stay below `longest`."""
    far = max(0, min(3001, longest - 8))
    found = {
        "prefill": Scenario((Feed((11,)),)),
        "chunks and decode": Scenario((Feed((7, 1, 5, 1, 1)),)),
        "ragged": Scenario((Feed((9, 1, 1)), Feed((0, 6, 1)), Feed((1, 1, 1)))),
        "large positions": Scenario((Feed((5, 2), first_position=far),)),
        "outliers": Scenario((Feed((6, 1)),), "outliers"),
        "tiny weights": Scenario((Feed((6, 1)),), "tiny"),
    }
    past = min(LONGEST_PAST, longest - 8)
    if past > 0:
        found["long cache"] = Scenario((Feed((2, 1), past=past), Feed((1, 1), past=past // 2)))
    return found


@dataclass
class Record:
    """One step as it was run; `values` by name, inputs included.

    Args:
        rows: which rows of the flat token axis belong to which sequence.
        states: content before the step.
        failed: what the interpreter raised, and the node it raised it at.
    """

    step: int
    rows: dict[int, tuple[int, int]]
    inputs: dict[str, Tensor]
    states: States
    values: dict[str, Tensor] = field(default_factory=dict)
    failed: tuple[Node, str] | None = None


def embedding_tables(graph: Graph) -> frozenset[str]:
    """The parameters that embeddings read: the adversarial ones."""
    tables = [n.operands[0] for n in graph.nodes if n.op == "embedding"]
    return frozenset(t.parameter for t in tables if isinstance(t, Constant) and t.parameter)


def poisoned(parameters: Parameters, tables: frozenset[str], kind: str) -> Parameters:
    """The parameters with the weights of a scenario; `tables` are the embeddings."""

    def load(name: str) -> Tensor:
        tensor = parameters(name)
        if kind == "tiny" and tensor.dim() > 1:
            return tensor.float() * TINY
        if kind == "outliers" and name in tables:
            scale = torch.ones(tensor.shape[-1])
            scale[len(scale) // 3] = OUTLIER
            return tensor.float() * scale
        return tensor

    return load


def run(
    graph: Graph,
    parameters: Parameters,
    scenario: Scenario,
    seed: int,
    records: list[Record] | None = None,
) -> list[Tensor]:
    """Logits [tokens, V] of every sequence; every value of every step goes to `records`.

    With `records`, an error of the interpreter is recorded and ends the run.
    """
    width = graph.outputs[0].shape[-1]
    assert isinstance(width, int)
    generator = torch.Generator().manual_seed(seed)
    tokens = [
        torch.randint(0, 1 << 30, (sum(s.chunks),), generator=generator) % width
        for s in scenario.feeds
    ]
    drive = _Drive(graph, parameters, scenario.feeds, tokens, seed, records)
    rows = drive.ragged() if graph.is_ragged else drive.functional()
    return [torch.cat(r) if r else torch.empty(0, width) for r in rows]


@dataclass
class _Drive:
    graph: Graph
    parameters: Parameters
    feeds: Sequence[Feed]
    tokens: Sequence[Tensor]
    seed: int
    records: list[Record] | None

    def functional(self) -> list[list[Tensor]]:
        """One sequence after the other, batch 1."""
        logits: list[list[Tensor]] = [[] for _ in self.feeds]
        for index, feed in enumerate(self.feeds):
            runner = Interpreter(
                self.graph,
                self.parameters,
                {s.name: self._functional_state(s, index) for s in self.graph.states.values()},
            )
            single = [(t, t + 1) for t in range(sum(feed.chunks))]
            spans = single if self.graph.is_stepwise else _spans(feed)
            for step, (start, end) in enumerate(spans):
                if start == end:
                    continue
                positions = torch.arange(start, end) + feed.past + feed.first_position
                given = {"tokens": self.tokens[index][start:end], "positions": positions}
                given = {k: v.unsqueeze(0) for k, v in given.items()}
                result = self._step(runner, step, {index: (0, end - start)}, given)
                if result is None:
                    return logits
                logits[index].append(result[0])
        return logits

    def ragged(self) -> list[list[Tensor]]:
        """All sequences of a step in one run."""
        logits: list[list[Tensor]] = [[] for _ in self.feeds]
        runner = Interpreter(self.graph, self.parameters, self._pools())
        for step in range(max(len(f.chunks) for f in self.feeds)):
            spans = {
                i: _spans(f)[step]
                for i, f in enumerate(self.feeds)
                if step < len(f.chunks) and f.chunks[step]
            }
            ends = torch.tensor([0] + [b - a for a, b in spans.values()]).cumsum(0).tolist()
            rows = dict(zip(spans, pairwise(ends), strict=True))
            result = self._step(runner, step, rows, self._step_inputs(spans))
            if result is None:
                return logits
            if self.graph.outputs[0].shape[0] == ROWS:
                result = in_token_order(result)
            for index, (start, end) in rows.items():
                logits[index].append(result[start:end])
        return logits

    def _step(
        self,
        runner: Interpreter,
        step: int,
        rows: dict[int, tuple[int, int]],
        given: dict[str, Tensor],
    ) -> Tensor | None:
        if self.records is None:
            return runner.run(given)[0]
        record = Record(step, rows, given, copied(runner.states), dict(given))
        self.records.append(record)
        done = 0
        for state in self.graph.states.values():
            if state.input is not None:
                record.values[state.input.name] = record.states[state.name]

        def observe(node: Node, results: list[Tensor]) -> None:
            nonlocal done
            done += 1
            record.values.update({v.name: r for v, r in zip(node.results, results, strict=True)})

        runner.observe = observe
        try:
            return runner.run(given)[0]
        except Exception as error:  # whatever a broken graph raises is what is looked for
            at = self.graph.nodes[min(done, len(self.graph.nodes) - 1)]
            record.failed = (at, f"{type(error).__name__}: {error}")
            return None

    def _content(self, state: State, index: int, rest: list[int]) -> Tensor:
        """The same random rows [past, ...] for every interface."""
        key = zlib.crc32(f"{state.name}/{index}/{self.seed}".encode())
        generator = torch.Generator().manual_seed(key)
        return torch.randn(self.feeds[index].past, *rest, generator=generator)

    def _digits(self, index: int, rest: list[int]) -> Tensor:
        """The first tokens of the vocabulary [past, ...], as a recomputing step keeps them."""
        width = self.graph.outputs[0].shape[-1]
        assert isinstance(width, int)
        digits = torch.zeros(self.feeds[index].past, *rest)
        digits[..., 0] = torch.arange(len(digits)).reshape(-1, 1) % min(width, 256)
        return digits

    def _functional_state(self, state: State, index: int) -> Tensor:
        shape = [d if isinstance(d, int) else 1 for d in state.type.shape]
        if state.kind != "kv":
            return torch.zeros(shape)
        rest = [d for i, d in enumerate(shape) if i not in (0, state.axis)]
        if state.name.endswith(".tokens"):
            return self._digits(index, rest).movedim(0, state.axis - 1).unsqueeze(0)
        return self._content(state, index, rest).movedim(0, state.axis - 1).unsqueeze(0)

    def _blocks(self, index: int) -> Tensor:
        """Blocks of one sequence, interleaved with the others' and backwards."""
        longest = max(-(-(sum(f.chunks) + f.past) // BLOCK) for f in self.feeds)
        return torch.arange(longest).flip(0) * len(self.feeds) + index

    def _slots(self, index: int, rows: Tensor) -> Tensor:
        return self._blocks(index)[rows // BLOCK] * BLOCK + rows % BLOCK

    def _pools(self) -> States:
        pools: States = {}
        size = len(self.feeds) * len(self._blocks(0)) * BLOCK
        for state in self.graph.states.values():
            rest = [int(str(d)) for d in state.type.shape[1:]]
            rows = torch.full((size, *rest), float("nan"))
            for index, feed in enumerate(self.feeds):
                rows[self._slots(index, torch.arange(feed.past))] = self._content(
                    state, index, rest
                )
            pools[state.name] = PagedState(rows, BLOCK)
        return pools

    def _step_inputs(self, spans: Mapping[int, tuple[int, int]]) -> dict[str, Tensor]:
        index = {i: torch.arange(a, b) + self.feeds[i].past for i, (a, b) in spans.items()}
        lengths = torch.tensor([b - a for a, b in spans.values()])
        given = {
            "tokens": torch.cat([self.tokens[i][a:b] for i, (a, b) in spans.items()]),
            "positions": torch.cat([r + self.feeds[i].first_position for i, r in index.items()]),
            "slots": torch.cat([self._slots(i, r) for i, r in index.items()]),
            "seq_starts": torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
            "kv_lens": torch.tensor([self.feeds[i].past + b for i, (_, b) in spans.items()]),
            "block_tables": torch.stack([self._blocks(i) for i in spans]),
            "logit_rows": torch.cat((torch.arange(int(lengths.sum())).flip(0), torch.zeros(1))),
        }
        return {v.name: given[v.name] for v in self.graph.inputs}


def in_token_order(rows: Tensor) -> Tensor:
    """Rows as `logit_rows` asks for them (backwards, the first once more) put back in order."""
    return rows[:-1].flip(0)


def copied(states: Mapping[str, Tensor | PagedState]) -> States:
    """States that the next step does not change."""
    return {
        name: PagedState(s.rows.clone(), s.tokens_per_block) if isinstance(s, PagedState) else s
        for name, s in states.items()
    }


def _spans(feed: Feed) -> list[tuple[int, int]]:
    return list(pairwise([sum(feed.chunks[:i]) for i in range(len(feed.chunks) + 1)]))
