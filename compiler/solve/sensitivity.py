"""How much the output distribution moves when a matrix does: its curvature, on calibration text.

For a small change D of the weights, KL(p || p') = 1/2 D' F D, where F is the Fisher information of
the output distribution (Amari, "Natural gradient works efficiently in learning", 1998). Errors of
quantisation are close to independent from weight to weight, so the diagonal of F counts:

    KL(format) = 1/2 sum_ij F_ij D_ij(format)^2

One forward run per window gives the logits' distribution p; a random direction of covariance
diag(p) - p p' at every position, sent backwards, is a gradient whose square has the mean F_ij
summed over positions. Of each matrix only the margins of that square are kept (rows and columns, as
Adafactor does).

Cost per window: one forward run, another one with gradients, and `DRAWS` backward runs. Memory: the
f32 parameters of one segment (at most 2 GiB, or one op's), a gradient, one window's activations
there, and of a tied embedding a gradient per direction. Directions are fixed bits and torch
computes on one thread: a machine gives the same figures on every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import SpikeError
from ..analysis import States, Steps, prefill
from ..ir import Constant, Graph, Interpreter, PagedState, Parameters
from .segments import WEIGHT_BYTES, Segment, segments

DRAWS = 2
"""Directions per window."""
ROWS = 32
"""Positions at a time where logits are taken as float64: of 262,144 tokens they are 67 MB."""
SQUARED = 1 << 22
"""Elements of a gradient that are squared at a time, in float64."""

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curvature:
    """Diagonal of the Fisher information of a matrix, per position: an outer product.

    Args:
        rows: float64 ``[..., N]``, sums of F over columns.
        columns: float64 ``[..., K]``, sums of F over rows.
    """

    rows: Float64
    columns: Float64

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Curvature:
        """Of a matrix that nothing depends on."""
        return cls(np.zeros(shape[:-1]), np.zeros((*shape[:-2], shape[-1])))

    @property
    def total(self) -> Float64:
        """Float64 ``[...]``, the sum of F."""
        return np.asarray(self.rows.sum(-1))


class _Margins:
    """Of the squared gradients of one constant, added up over runs."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """One more gradient ``[..., N, K]``, squared some rows at a time."""
        *stack, n, k = gradient.shape
        rows, columns = (
            gradient.new_zeros(*stack, n).double(),
            gradient.new_zeros(*stack, k).double(),
        )
        size = max(1, SQUARED // (k * prod(stack)))
        for first in range(0, n, size):
            squares = gradient[..., first : first + size, :].double().square()
            rows[..., first : first + size] = squares.sum(-1)
            columns += squares.sum(-2)
        self.rows = rows if self.rows is None else self.rows + rows
        self.columns = columns if self.columns is None else self.columns + columns


def measure(
    graph: Graph,
    parameters: Parameters,
    matrices: Sequence[Constant],
    windows: Sequence[Sequence[int]],
    draws: int = DRAWS,
    progress: Callable[[int], None] | None = None,
    weight_bytes: int = WEIGHT_BYTES,
) -> dict[str, Curvature]:
    """Curvature of every matrix of a placed graph, by constant name.

    Args:
        graph: fused or placed, functional or streaming; its own formats play no part.
        parameters: the checkpoint's tensors by name.
        matrices: constants of the graph whose curvature is wanted.
        windows: token ids of the calibration text, all of one length.
        draws: directions per window.
        progress: called after each window with 1.
        weight_bytes: of the parameters that are alive at a time, as f32.

    Raises:
        SpikeError: SPK423 if the model's gradients are not finite.
    """
    leaves = _Leaves(parameters, matrices)
    with one_thread():
        for index, window in enumerate(windows):
            steps, states = prefill(graph, [window], len(window))
            seeds = range(index * draws, (index + 1) * draws)
            if len(steps) == 1:
                pieces = segments(graph, weight_bytes)
                leaves.expect(pieces)
                inputs = whole_inputs(graph, steps[0], states, len(window))
                _backwards(pieces, leaves, inputs, states, seeds)
            else:
                leaves.expect([])
                _stepwise(graph, leaves, steps, states, seeds)
            if progress is not None:
                progress(1)
    positions = draws * sum(map(len, windows))
    return {c.name: _curvature(c, leaves.margins[c.name], positions) for c in matrices}


class _Leaves:
    """Parameters as f32 leaves; their gradients are squared and dropped as they come.

    A parameter that several segments read (a tied embedding) has the sum of their gradients, which
    is squared when the first segment, the last on the way back, is done.
    """

    def __init__(self, parameters: Parameters, matrices: Sequence[Constant]) -> None:
        self.parameters = parameters
        self.margins = {c.name: _Margins() for c in matrices}
        self.readers: dict[str, list[Constant]] = {}
        for const in matrices:
            assert const.parameter is not None
            self.readers.setdefault(const.parameter, []).append(const)
        self.draw = 0
        self._leaves: dict[str, Tensor] = {}
        self._shared: set[str] = set()
        self._sums: dict[tuple[str, int], Tensor] = {}

    def expect(self, pieces: Sequence[Segment]) -> None:
        """Before a window: which parameters several segments read."""
        counts = Counter(name for piece in pieces for name in piece.parameters)
        self._shared = {name for name, count in counts.items() if count > 1}

    def __call__(self, name: str) -> Tensor:
        """The parameter: a leaf if a gradient is wanted, as it is stored otherwise."""
        if name not in self.readers or not torch.is_grad_enabled():
            return self.parameters(name)
        if name not in self._leaves:
            leaf = self.parameters(name).detach().float().clone().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(self._take, name))
            self._leaves[name] = leaf
        return self._leaves[name]

    def drop(self) -> None:
        """After a segment: its weights go."""
        self._leaves.clear()

    def finish(self) -> None:
        """After a window: the sums over segments are complete."""
        for (name, _), gradient in sorted(self._sums.items(), key=lambda item: item[0]):
            self._square(name, gradient)
        self._sums.clear()
        self.drop()

    def _take(self, name: str, leaf: Tensor) -> None:
        assert leaf.grad is not None
        if name not in self._shared:
            self._square(name, leaf.grad)
        elif (name, self.draw) in self._sums:
            self._sums[name, self.draw] += leaf.grad
        else:
            self._sums[name, self.draw] = leaf.grad.clone()
        leaf.grad = None

    def _square(self, name: str, gradient: Tensor) -> None:
        for const in self.readers[name]:
            self.margins[const.name].add(const.part_of(gradient))


Values = dict[int, Tensor]
"""By id of the graph's value."""


def _backwards(
    pieces: Sequence[Segment],
    leaves: _Leaves,
    inputs: Mapping[str, Tensor],
    states: States,
    seeds: Sequence[int],
) -> None:
    """Forward without gradients, keeping what crosses segments; then each again, last one first."""
    env: Values = {}
    with torch.no_grad():
        for piece in pieces[:-1]:
            env.update(_run(piece, leaves, inputs, states, env))
    waiting: list[Values] = [{} for _ in seeds]
    for piece in reversed(pieces):
        with torch.enable_grad():
            reads = {id(v): _watched(env[id(v)]) for v in piece.reads}
            given = _run(piece, leaves, inputs, states, reads)
        if piece is pieces[-1]:
            ((key, logits),) = given.items()
            waiting = [{key: _direction(logits.detach(), seed)} for seed in seeds]
        for draw, gradients in enumerate(waiting):
            leaves.draw = draw
            _back(given, reads, gradients, keep=draw + 1 < len(waiting))
        leaves.drop()
    leaves.finish()


def forward(
    pieces: Sequence[Segment],
    parameters: Parameters,
    inputs: Mapping[str, Tensor],
    states: States,
) -> Tensor:
    """The first output of a graph in pieces."""
    env: Values = {}
    for piece in pieces:
        env = {**env, **_run(piece, parameters, inputs, states, env)}
    return env[id(pieces[-1].gives[-1])]


def _run(
    piece: Segment,
    leaves: Parameters,
    inputs: Mapping[str, Tensor],
    states: States,
    reads: Values,
) -> Values:
    """What a segment gives; buffers that it writes are fresh ones."""
    pools = {n: _copy(states[n]) for n in piece.graph.states}
    named = {v.name: reads[id(v)] for v in piece.reads}
    outputs = Interpreter(piece.graph, leaves, pools).run({**inputs, **named})
    return {id(v): out for v, out in zip(piece.gives, outputs, strict=True)}


def _copy(state: Tensor | PagedState) -> Tensor | PagedState:
    if isinstance(state, Tensor):
        return state
    return PagedState(state.rows.clone(), state.tokens_per_block)


def _watched(value: Tensor) -> Tensor:
    """A value of an earlier segment as the leaf of a later one."""
    return value.detach().requires_grad_(value.is_floating_point())


def _back(given: Values, reads: Values, gradients: Values, keep: bool) -> None:
    """One direction through a segment; `gradients` lose those of `given`, gain those of `reads`."""
    pairs = [(given[key], gradients.pop(key)) for key in given if key in gradients]
    pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
    if not pairs:
        return
    values, sent = zip(*pairs, strict=True)
    torch.autograd.backward(values, sent, retain_graph=keep)
    for key, leaf in reads.items():
        if leaf.grad is not None:
            gradients[key] = gradients[key] + leaf.grad if key in gradients else leaf.grad
            leaf.grad = None


def _stepwise(
    graph: Graph, leaves: _Leaves, steps: Steps, states: States, seeds: Sequence[int]
) -> None:
    """A graph whose step is one token: all steps at once, with all weights."""
    with torch.enable_grad():
        runner = Interpreter(graph, leaves, states)
        logits = torch.cat([runner.run(inputs)[0] for inputs in steps], 1)
    for draw, seed in enumerate(seeds):
        logits.backward(_direction(logits.detach(), seed), retain_graph=draw + 1 < len(seeds))
    leaves.finish()


def whole_inputs(
    graph: Graph, step: Mapping[str, Tensor], states: States, length: int
) -> dict[str, Tensor]:
    """Every input of the graph, pasts included; asks for the logits of every position."""
    inputs = dict(step)
    if "logit_rows" in inputs:
        inputs["logit_rows"] = torch.arange(length)
    for state in graph.states.values():
        past = states[state.name]
        if state.input is not None and isinstance(past, Tensor):
            inputs[state.input.name] = past
    return inputs


def _direction(logits: Tensor, seed: int) -> Tensor:
    """A random ``[..., T, V]`` of covariance diag(p) - p p' in every row, p its softmax."""
    bits = torch.Generator().manual_seed(seed)
    rows = logits.reshape(-1, logits.shape[-1])
    found = torch.empty_like(rows)
    for first in range(0, len(rows), ROWS):
        part = rows[first : first + ROWS]
        root = torch.softmax(part.double(), -1).sqrt()
        signs = torch.randint(0, 2, part.shape, generator=bits, dtype=torch.int8)
        noise = root * (2 * signs - 1)
        found[first : first + ROWS] = noise - root.square() * noise.sum(-1, keepdim=True)
    return found.reshape(logits.shape)


def _curvature(const: Constant, margins: _Margins, positions: int) -> Curvature:
    """Per position; rounded, so that the last bits of a sum decide nothing later."""
    if margins.rows is None or margins.columns is None:  # nothing that is read depends on it
        return Curvature.none(tuple(d for d in const.shape if isinstance(d, int)))
    found = Curvature(_rounded(margins.rows / positions), _rounded(margins.columns / positions))
    if not (np.isfinite(found.rows).all() and np.isfinite(found.columns).all()):
        raise SpikeError(
            "SPK423",
            "quantization",
            f"the sensitivity of {const.name} is not a finite number on the calibration text.",
            "The checkpoint is damaged, or its values overflow: see `spike inspect overflow`.",
        )
    return found


def _rounded(margin: Tensor) -> Float64:
    mantissa, exponent = np.frexp(margin.numpy())
    return np.asarray(np.ldexp(np.round(mantissa * 2**20) / 2**20, exponent))


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
