"""How much the output distribution moves when a matrix does: its curvature, on calibration text.

For a small change D of the weights, KL(p || p') = 1/2 D' F D, where F is the Fisher information of
the output distribution (Amari, "Natural gradient works efficiently in learning", 1998). Errors of
quantisation are close to independent from weight to weight, so the diagonal of F counts:

    KL(format) = 1/2 sum_ij F_ij D_ij(format)^2

One forward run per window gives the logits' distribution p; a random direction of covariance
diag(p) - p p' at every position, sent backwards, is a gradient whose square has the mean F_ij
summed over positions. Of each matrix only the margins of that square are kept (rows and columns, as
Adafactor does), so memory is the float32 model, one gradient, and the activations of one window.

Cost: one forward and `DRAWS` backward runs per window. Directions are fixed bits, torch computes on
one thread: the same figures on every run of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import SpikeError
from ..analysis import prefill
from ..ir import Constant, Graph, Interpreter, Parameters

DRAWS = 2
"""Directions per window."""

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


@dataclass
class _Margins:
    """Of the squared gradients of one constant, added up over runs."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        squares = gradient.double().square()
        rows, columns = squares.sum(-1), squares.sum(-2)
        self.rows = rows if self.rows is None else self.rows + rows
        self.columns = columns if self.columns is None else self.columns + columns


def measure(
    graph: Graph,
    parameters: Parameters,
    matrices: Sequence[Constant],
    windows: Sequence[Sequence[int]],
    draws: int = DRAWS,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Curvature]:
    """Curvature of every matrix of a placed graph, by constant name.

    Args:
        graph: fused or placed, functional or streaming; its own formats play no part.
        parameters: the checkpoint's tensors by name.
        matrices: constants of the graph whose curvature is wanted.
        windows: token ids of the calibration text, all of one length.
        draws: directions per window.
        progress: called after each window with 1.

    Raises:
        SpikeError: SPK423 if the model's gradients are not finite.
    """
    leaves = _Leaves(parameters, matrices)
    with _one_thread(), torch.enable_grad():
        for index, window in enumerate(windows):
            logits = _logits(graph, leaves, window)
            for draw in range(draws):
                direction = _direction(logits.detach(), index * draws + draw)
                logits.backward(direction, retain_graph=draw + 1 < draws)
            if progress is not None:
                progress(1)
    positions = draws * sum(map(len, windows))
    return {c.name: _curvature(c, leaves.margins[c.name], positions) for c in matrices}


class _Leaves:
    """Parameters as float32 leaves; their gradients are squared and dropped as they come."""

    def __init__(self, parameters: Parameters, matrices: Sequence[Constant]) -> None:
        self.parameters = parameters
        self.margins = {c.name: _Margins() for c in matrices}
        self.readers: dict[str, list[Constant]] = {}
        for const in matrices:
            assert const.parameter is not None
            self.readers.setdefault(const.parameter, []).append(const)
        self.leaves: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        """The parameter: a leaf if a matrix is made of it, as it is stored otherwise."""
        if name not in self.readers:
            return self.parameters(name)
        if name not in self.leaves:
            leaf = self.parameters(name).detach().float().clone().requires_grad_()
            leaf.register_post_accumulate_grad_hook(lambda grown: self._take(name, grown))
            self.leaves[name] = leaf
        return self.leaves[name]

    def _take(self, name: str, leaf: Tensor) -> None:
        assert leaf.grad is not None
        for const in self.readers[name]:
            self.margins[const.name].add(const.part_of(leaf.grad))
        leaf.grad = None


def _logits(graph: Graph, parameters: Parameters, window: Sequence[int]) -> Tensor:
    """Logits float32 ``[T, V]`` of every position of a window that begins a sequence."""
    steps, states = prefill(graph, [window], len(window))
    runner = Interpreter(graph, parameters, states)
    outputs = []
    for inputs in steps:
        if "logit_rows" in inputs:
            inputs["logit_rows"] = torch.arange(len(window))
        outputs.append(runner.run(inputs)[0].reshape(-1, _width(graph)))
    return torch.cat(outputs)


def _width(graph: Graph) -> int:
    width = graph.outputs[0].shape[-1]
    assert isinstance(width, int)
    return width


def _direction(logits: Tensor, seed: int) -> Tensor:
    """A random ``[T, V]`` of covariance diag(p) - p p' in every row, p the softmax of `logits`."""
    root = torch.softmax(logits.double(), -1).sqrt()
    bits = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, logits.shape, generator=bits, dtype=torch.int8)
    noise = root * (2 * signs - 1)
    return (noise - root.square() * noise.sum(-1, keepdim=True)).to(logits.dtype)


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
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
