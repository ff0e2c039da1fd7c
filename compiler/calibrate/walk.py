"""Runs a model over all calibration windows breadth first: every weight is loaded once.

A visitor sees each matrix when its inputs from all windows are known and nothing behind it has been
computed; what it returns takes the matrix's place from there on. Quantisers with error feedback
work that way (GPTQ, Frantar et al. 2022): each matrix is fitted to the inputs that the quantised
matrices before it give.

Memory: what later stages read of all windows (of a llama, the residual stream and a normed copy,
f32), the weights of one stage as f32, and one chunk's intermediate results per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import ExitCode, SpikeError
from ..ir import Constant, Graph, Interpreter, Node, Parameters, evaluate_dim
from .inputs import direct, hidden
from .moments import Moment, Rows, Workers, moment, workers
from .stage_graph import Weights, stage_graph
from .stages import PLACES, Stage, needs, plan

CHUNK_TOKENS = 512
"""Tokens that one worker computes at a time, but at least one window."""

Visit: TypeAlias = Callable[[Constant, Moment], Tensor | None]
Tick: TypeAlias = Callable[[int, int], None]


def walk(
    graph: Graph,
    parameters: Parameters,
    windows: Tensor,
    visit: Visit,
    *,
    full: bool | Callable[[Constant], bool] = False,
    logits: bool = False,
    threads: int = 0,
    tick: Tick | None = None,
) -> Tensor | None:
    """Visits every stored matrix of a functional graph, in order.

    Args:
        graph: fused and functional; its states start out empty.
        parameters: a checkpoint's tensors by name.
        windows: token ids i64 [B, T]; every window is a sequence of its own.
        visit: called with a matrix (constant [N, K], or [E, N, K] for stacked experts) and the
            moment of its input; matrices that share an input get the same Moment object. A tensor
            that it returns, shaped as the constant, replaces the matrix in what follows. A tied
            embedding is visited at its use as the head, a matrix that several nodes multiply by
            at the first of them.
        full: of which matrices X^T X is wanted, not only its diagonal.
        logits: also compute the graph's first output.
        threads: workers, 0 for one per CPU; results don't depend on it.
        tick: told (matrices visited, matrices) after each.

    Returns:
        The first output for all windows, such as logits f32 [B, T, V], if `logits`; else None.

    Raises:
        SpikeError: SPK410 for a graph whose windows can't be run at once, SPK411 if the input of a
            matrix is not finite.
    """
    _require_functional(graph)
    stages = plan(graph, logits)
    with workers(threads) as team:
        run = _Walk(Weights(parameters), team, visit, full, tick, _chunks(graph, windows))
        run.total = sum(len(new) for stage in stages for _, new in stage.visits)
        for stage in stages:
            run.stage(stage)
    return torch.cat([c.env[id(graph.outputs[0])] for c in run.chunks]) if logits else None


def _require_functional(graph: Graph) -> None:
    if graph.is_ragged:
        raise ValueError("only a functional graph can be walked")
    if graph.is_stepwise:
        raise SpikeError(
            "SPK410",
            "calibration",
            f"the code of {graph.name} computes one token at a time, so that its layers can't be "
            "run one after the other over whole texts.",
            "Quantise without importances.",
            ExitCode.UNSUPPORTED,
        )


@dataclass
class _Chunk:
    """A few windows: the sizes of the graph's symbols, and the values that are alive, by id."""

    sizes: Tensor
    env: dict[int, Tensor]


def _chunks(graph: Graph, windows: Tensor) -> list[_Chunk]:
    length = windows.shape[1]
    chunks = []
    for tokens in windows.split(max(1, CHUNK_TOKENS // length)):
        batch = len(tokens)
        given = {"tokens": tokens, "positions": torch.arange(length).expand(batch, length)}
        for state in graph.states.values():
            if state.input is not None:  # no past rows; zeros for a state of fixed size
                shape = [evaluate_dim(d, {"B": batch, "P": 0}) for d in state.type.shape]
                given[state.input.name] = torch.zeros(shape)
        env = {id(v): given[v.name] for v in graph.inputs}
        chunks.append(_Chunk(torch.empty((batch, length, 0), device="meta"), env))
    return chunks


@dataclass
class _Walk:
    weights: Weights
    team: Workers
    visit: Visit
    full: bool | Callable[[Constant], bool]
    tick: Tick | None
    chunks: list[_Chunk]
    total: int = 0
    done: int = 0
    known: dict[tuple[int, ...], Moment] = field(default_factory=dict)

    def stage(self, stage: Stage) -> None:
        """Visits the stage's matrices, then computes its nodes for every chunk."""
        for node, new in stage.visits:
            inner = [c for c in new if any(node.operands[i] is c for i in PLACES[node.op].inner)]
            if inner:
                self._offer(inner, self._input(node, inner[0], stage))
            if outer := [c for c in new if c not in inner]:
                rows = partial(hidden, node, weight=self.weights.of)
                self._offer(outer, self._moment(rows, outer[0], outer))
        self.known.clear()
        graph = stage_graph(stage, self.weights)
        self.team.map(partial(self._advance, graph, stage), self.chunks)
        self.weights.keep(stage.rereads)

    def _offer(self, constants: Sequence[Constant], seen: Moment) -> None:
        for const in constants:
            _require_finite(const, seen)
            with self.team.paused():
                replacement = self.visit(const, seen)
            if replacement is not None:
                self.weights.replace(const, replacement)
            self.done += 1
            if self.tick is not None:
                self.tick(self.done, self.total)

    def _input(self, node: Node, const: Constant, stage: Stage) -> Moment:
        """The moment of a node's input, shared by the stage's nodes that have the same one."""
        key = tuple(map(id, needs(node)))
        if key not in self.known:
            sharers = [c for n, new in stage.visits for c in new if needs(n) == needs(node)]
            self.known[key] = self._moment(partial(direct, node), const, sharers)
        return self.known[key]

    def _moment(
        self, rows: Callable[[dict[int, Tensor]], Rows], const: Constant, wanted: list[Constant]
    ) -> Moment:
        shape = tuple(d for d in const.shape if isinstance(d, int))
        full = any(map(self.full, wanted)) if callable(self.full) else self.full
        return moment(self.team, self.chunks, lambda chunk: rows(chunk.env), shape, full)

    def _advance(self, graph: Graph, stage: Stage, chunk: _Chunk) -> None:
        """Takes a chunk behind the stage, with no other values than later stages need."""
        given = {v.name: chunk.env[id(v)] for v in stage.reads}
        chunk.env = {key: t for key, t in chunk.env.items() if key in stage.keeps}
        if graph.nodes:
            run = Interpreter(graph, self.weights.__getitem__)
            made = run.run({"sizes": chunk.sizes, **given})
            chunk.env |= {id(v): _own(t) for v, t in zip(stage.gives, made, strict=True)}


def _own(tensor: Tensor) -> Tensor:
    """A copy of a part of a larger tensor, which would stay alive with it."""
    larger = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if larger else tensor


def _require_finite(const: Constant, seen: Moment) -> None:
    if not bool(torch.isfinite(seen.diagonal).all()):
        raise SpikeError(
            "SPK411",
            "calibration",
            f"on the calibration text, the input of {const.parameter} has values that are no "
            "finite numbers.",
            "The checkpoint is damaged or its training diverged: `spike inspect overflow "
            "CHECKPOINT` names the first such value.",
        )
