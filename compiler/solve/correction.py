"""What coarse formats really cost: their errors are not as independent as predictions take them.

A few bits per weight shrink a matrix and its neighbours alike, so that errors add up along one
direction. Per role and coarse format, all matrices of the role are quantised at once and the
reference graph runs again: the real KL over the predicted sum is a factor for that format there.
Then all matrices of the layers together give the format another factor.

Cost: one forward run of `WINDOWS` windows per role and coarse format, and one more per format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ...kernels import Format, dequantize
from ..analysis import prefill
from ..ir import Constant, Graph, Parameters
from ..quantize import Role
from .candidates import CHUNK, Curve, Quantizer, importance, weighted
from .segments import segments
from .sensitivity import ROWS, Curvature, forward, one_thread, whole_inputs

COARSE = ("q2_k", "q3_k", "q4_0")
WINDOWS = 2
TABLES = (Role.TOKEN_EMBD, Role.OUTPUT)
"""Outside of the layers; with few bits these alone would drown the others."""
LEAST_KL = 1e-9
"""Nats; what moves less is not corrected: rounding of the logits would decide."""


def corrected(
    graph: Graph,
    parameters: Parameters,
    matrices: Sequence[Constant],
    curvatures: Mapping[str, Curvature],
    curves: Sequence[Curve],
    windows: Sequence[Sequence[int]],
    progress: Callable[[int], None] | None = None,
    quantizer: Quantizer = weighted,
    formats: Sequence[str] = COARSE,
) -> list[Curve]:
    """Curves whose coarse options cost what their role's matrices cost together, if that is more.

    Args:
        graph: as for `measure`.
        parameters: the checkpoint's tensors by name.
        matrices: constants with a curvature, roles set.
        curvatures: by constant name.
        curves: of the matrices, and perhaps of others, which stay as they are.
        windows: calibration text, windows of one length.
        progress: called with 1 after each run.
        quantizer: as for `curve`.
        formats: the coarse ones.
    """
    if graph.is_stepwise:  # its windows would be run token by token
        return list(curves)
    lab = _Laboratory(graph, parameters, matrices, curvatures, windows[:WINDOWS], quantizer)
    found = {c.name: c for c in curves}
    roles = sorted({c.role for c in matrices})
    for format in formats:
        groups = [[c.name for c in matrices if c.role == role] for role in roles]
        layers = [c.name for c in matrices if c.role not in TABLES]
        for names in [*groups, layers]:
            kl = {n: o.kl for n in names for o in found[n].options if o.format == format}
            if (predicted := sum(kl.values())) > LEAST_KL:
                real = lab.divergence(dict.fromkeys(kl, format))
                factor = max(1.0, float(f"{real / predicted:.3g}"))
                found |= {name: _scaled(found[name], format, factor) for name in kl}
            if progress is not None:
                progress(1)
    return list(found.values())


def _scaled(curve: Curve, format: str, factor: float) -> Curve:
    """A curve whose option of one format costs more."""
    options = [replace(o, kl=o.kl * factor) if o.format == format else o for o in curve.options]
    return Curve.of(curve.name, options)


class _Laboratory:
    """Runs the graph with some matrices quantised."""

    def __init__(
        self,
        graph: Graph,
        parameters: Parameters,
        matrices: Sequence[Constant],
        curvatures: Mapping[str, Curvature],
        windows: Sequence[Sequence[int]],
        quantizer: Quantizer,
    ) -> None:
        self.parameters, self.curvatures, self.quantizer = parameters, curvatures, quantizer
        self.sources = {c.name: c for c in matrices}
        # Every matrix under its own name, so that it can be replaced alone.
        own = {id(c): replace(c, parameter=c.name, transposed=False, rows=None) for c in matrices}
        nodes = [replace(n, operands=[own.get(id(o), o) for o in n.operands]) for n in graph.nodes]
        self.graph = replace(graph, nodes=nodes)
        self.windows = windows
        self.formats: Mapping[str, str] = {}
        self.base = self._log_probabilities()

    def divergence(self, formats: Mapping[str, str]) -> float:
        """Mean KL in nats with these matrices in these formats."""
        self.formats = formats
        other = self._log_probabilities()
        total = 0.0
        for first in range(0, len(other), ROWS):
            p = self.base[first : first + ROWS].double()
            q = other[first : first + ROWS].double()
            total += float((p.exp() * (p - q)).sum())
        return total / len(other)

    def _log_probabilities(self) -> Tensor:
        length = len(self.windows[0])
        steps, states = prefill(self.graph, self.windows, length)
        rows = length * len(self.windows)
        with one_thread(), torch.no_grad():
            inputs = whole_inputs(self.graph, steps[0], states, rows)
            logits = forward(segments(self.graph), self._load, inputs, states)
        return torch.log_softmax(logits.reshape(rows, -1), -1)

    def _load(self, name: str) -> Tensor:
        const = self.sources.get(name)
        if const is None:
            return self.parameters(name)
        assert const.parameter is not None
        values = const.part_of(self.parameters(const.parameter))
        format = self.formats.get(name)
        return values if format is None else self._quantised(const, values, format)

    def _quantised(self, const: Constant, values: Tensor, format: str) -> Tensor:
        counts = importance(self.curvatures[const.name].columns)
        stacked = values if values.ndim == 3 else values[None]
        found = torch.empty(stacked.shape)
        size = max(1, CHUNK // int(values.shape[-1]))
        for index, matrix in enumerate(stacked):
            weigh = counts[index] if values.ndim == 3 else counts
            for first in range(0, len(matrix), size):
                rows = np.ascontiguousarray(matrix[first : first + size].float().numpy())
                blocks = self.quantizer(rows, format, weigh)
                made = dequantize(blocks, cast(Format, format), rows.shape[1])
                found[index, first : first + size] = torch.from_numpy(made)
        return found.reshape(values.shape)
