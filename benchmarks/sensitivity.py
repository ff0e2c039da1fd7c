"""Predicted against real KL of quantising one matrix alone, on the same calibration text.

    python benchmarks/sensitivity.py .cache/models/SmolLM2-135M-Instruct --matrices 13

The prediction is the quality solver's (compiler/solve): a few backward runs for all matrices. The
real one replaces the matrix and runs the reference graph again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from spikeinfer.compiler.analysis import prefill
from spikeinfer.compiler.assembly.calibration import WINDOW, WINDOWS
from spikeinfer.compiler.assembly.calibration_text import text_of
from spikeinfer.compiler.assembly.weights import ARRAY, parameters
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.golden import text_windows
from spikeinfer.compiler.ir import Constant, Graph, Interpreter
from spikeinfer.compiler.solve.candidates import divergences, importance, weighted
from spikeinfer.compiler.solve.sensitivity import Curvature, measure
from spikeinfer.driver import BuildRequest, Progress, _place, _trace
from spikeinfer.kernels import block_elements, dequantize

FORMATS = ("q5_0", "q4_k")
Parameters = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A placed graph, its checkpoint, and windows of calibration text."""

    graph: Graph
    checkpoint: Checkpoint
    windows: list[list[int]]

    @classmethod
    def open(cls, path: Path) -> Model:
        """Traced and placed without streaming: its logits are those of every position."""
        request = BuildRequest(path, Path("engine"), quantization="f32", golden="off")
        traced = _trace(request, Progress())
        graph = _place(request, traced, traced.graph, Progress()).graph
        vocab = graph.outputs[0].shape[-1]
        assert isinstance(vocab, int)
        text = text_of(None)
        windows = text_windows(path, vocab, WINDOW * WINDOWS, WINDOW, text, "calibration")
        return cls(graph, traced.source.checkpoint, windows)

    def log_probabilities(self, load: Parameters) -> torch.Tensor:
        """Float64 ``[tokens, V]`` of all windows."""
        steps, states = prefill(self.graph, self.windows, len(self.windows[0]))
        with torch.inference_mode():
            logits = [Interpreter(self.graph, load, states).run(step)[0] for step in steps]
        return torch.log_softmax(torch.cat(logits, 1).flatten(0, 1).double(), -1)


def real_kl(
    model: Model, base: torch.Tensor, const: Constant, curvature: Curvature, format: str
) -> float:
    """Mean KL in nats with one matrix quantised."""
    weights = const.part_of(model.checkpoint.load(const.parameter or "")).float()
    rows = np.ascontiguousarray(weights.numpy())
    made = weighted(rows, format, importance(curvature.columns))
    stored = dequantize(made, format, rows.shape[1])  # type: ignore[arg-type]
    changed = replace(const, parameter=const.name, transposed=False, rows=None)
    graph = replace(model.graph, nodes=[
        replace(n, operands=[changed if o is const else o for o in n.operands])
        for n in model.graph.nodes
    ])  # fmt: skip

    def load(name: str) -> torch.Tensor:
        whole = torch.from_numpy(stored).reshape(weights.shape)
        return whole if name == const.name else model.checkpoint.load(name)

    other = replace(model, graph=graph).log_probabilities(load)
    return float((base.exp() * (base - other)).sum(-1).mean())


def main() -> None:
    """Prints a line per matrix and format, then the range of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--matrices", type=int, help="so many, picked at random; default: all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = Model.open(given.model)
    matrices = [c for c in parameters(model.graph) if c.format != ARRAY]
    begun = time.monotonic()
    curvatures = measure(model.graph, model.checkpoint.load, matrices, model.windows)
    print(f"{len(matrices)} curvatures: {time.monotonic() - begun:.1f} s")
    base = model.log_probabilities(model.checkpoint.load)
    order = np.random.default_rng(0).permutation(len(matrices))[: given.matrices]
    ratios: dict[str, list[float]] = {}
    begun = time.monotonic()
    for const in (matrices[i] for i in order):
        values = const.part_of(model.checkpoint.load(const.parameter or ""))
        fitting = [f for f in FORMATS if values.shape[-1] % block_elements(f) == 0]  # type: ignore[arg-type]
        predicted = divergences(values, curvatures[const.name], fitting)
        for format, kl in predicted.items():
            real = real_kl(model, base, const, curvatures[const.name], format)
            if real > 1e-9:  # exact formats have no ratio
                ratios.setdefault(format, []).append(kl / real)
            print(f"{const.name} {format}: predicted {kl:.3e}, real {real:.3e}", flush=True)
    print(f"real KL of {len(order)} matrices: {time.monotonic() - begun:.1f} s")
    for format, found in ratios.items():
        middle = float(np.median(found))
        print(f"{format}: predicted / real {min(found):.2f} to {max(found):.2f}, "
              f"median {middle:.2f}, {len(found)} matrices")  # fmt: skip


if __name__ == "__main__":
    main()
