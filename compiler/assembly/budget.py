"""A quality budget of one build: what the solver is given, and what it leaves in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ...kernels import FORMATS
from ..engine import PAGE
from ..engine.config import KL_SHARE
from ..engine.pareto import Pareto
from ..frontend.checkpoint import Checkpoint
from ..golden import text_windows
from ..ir import Constant, Graph
from ..quantize import Given, Role
from ..quantize.int4 import INT4_SYM
from ..quantize.roles import UNQUANTIZED
from ..solve.candidates import Curve, Float32, curve, importance
from ..solve.correction import COARSE, corrected
from ..solve.pareto import pareto
from ..solve.rounds import Budget, Rounds
from ..solve.search import Selection
from ..solve.sensitivity import Curvature, measure
from .calibration import WINDOW, WINDOWS
from .calibration_text import text_of
from .overrides import Overrides
from .progress import Progress
from .request import BuildRequest
from .weights import ARRAY, parameters, shape, source_values

WHY = "quality budget"


@dataclass
class Solver:
    """The rounds of one build, and what is known about the rest of its bytes.

    Args:
        rounds: which selection to build next.
        selection: the one being built.
        fixed_bytes: of rank0.weights besides the matrices.
        elements: weights in all matrices.
        curvatures: sensitivity of the matrices that are quantised, by name.
        calibration: the text that sensitivities were measured on, for pareto.json.
    """

    rounds: Rounds
    selection: Selection
    fixed_bytes: int
    elements: int
    curvatures: Mapping[str, Curvature]
    calibration: Mapping[str, object]

    def given(self, matrix: Constant) -> Given | None:
        """The format that the selection has for a matrix."""
        found = self.selection.formats.get(matrix.name)
        return None if found is None else Given(found, WHY)

    def importance(self, matrix: Constant) -> Float32 | None:
        """What the scale search of a matrix weighs its columns by, as the solver did."""
        curvature = self.curvatures.get(matrix.name)
        return None if curvature is None else importance(curvature.columns)

    def pareto(self) -> Pareto:
        """All points, after the last round."""
        return pareto(self.rounds, self.fixed_bytes, self.elements, self.calibration)

    def figures(self) -> dict[str, object]:
        """For the engine's report."""
        return {KL_SHARE: self.selection.shares}


def open_solver(
    request: BuildRequest,
    graph: Graph,
    checkpoint: Checkpoint,
    overrides: Overrides,
    longest: int,
    progress: Progress,
) -> Solver:
    """Measures the sensitivities of a placed graph and what every format would cost it.

    The graph loses its values' precisions: small gradients vanish in half precision.

    Raises SPK816 for calibration text, SPK420 for a budget that can't be kept, SPK423 for
    gradients that are not finite.
    """
    constants = parameters(graph)
    matrices = [c for c in constants if c.format != ARRAY]
    tensorrt = request.backend == "tensorrt"
    page = 1 if request.max_bpw is not None or tensorrt else PAGE
    coarse = (INT4_SYM,) if tensorrt else COARSE
    windows = _windows(request, graph, checkpoint, longest)
    progress.phase("sensitivity", len(windows), "windows")
    for value in graph.values():
        value.precision = None
    sensitive = [c for c in matrices if c.role not in UNQUANTIZED]
    curvatures = measure(graph, checkpoint.load, sensitive, windows, progress=progress.advance)
    progress.phase("formats", len(matrices), "matrices")
    curves = []
    for const in matrices:
        formats = _candidates(const, overrides, tensorrt)
        curves.append(_curve(const, checkpoint, curvatures.get(const.name), formats, page))
        checkpoint.release()
        progress.advance(1)
    runs = (len({c.role for c in sensitive}) + 1) * len(coarse)
    progress.phase("coarse formats", runs, "runs")
    curves = corrected(
        graph,
        checkpoint.load,
        sensitive,
        curvatures,
        curves,
        windows,
        progress.advance,
        formats=coarse,
    )
    elements = sum(prod(shape(c)) for c in matrices)
    fixed = sum(-(-4 * prod(shape(c)) // PAGE) * PAGE for c in constants if c.format == ARRAY)
    rounds = Rounds(curves, _budget(request, elements, fixed))
    calibration = {
        "text": request.calibration.name if request.calibration else "own text",
        "tokens": sum(map(len, windows)),
    }
    return Solver(rounds, rounds.next(), fixed, elements, curvatures, calibration)


def _windows(
    request: BuildRequest, graph: Graph, checkpoint: Checkpoint, longest: int
) -> list[list[int]]:
    vocab = graph.outputs[0].shape[-1]
    assert isinstance(vocab, int)
    size = min(WINDOW, longest)
    text = text_of(request.calibration)
    return text_windows(checkpoint.path, vocab, WINDOW * WINDOWS, size, text, seed="calibration")


def _candidates(const: Constant, overrides: Overrides, tensorrt: bool) -> tuple[str, ...]:
    """A TensorRT network gathers embeddings, and a gather reads no int4."""
    settled = overrides(const)
    if settled is not None:
        return (settled.format,)
    if const.role in UNQUANTIZED:
        return ("f32",)
    if tensorrt:
        return ("f16",) if const.role == Role.TOKEN_EMBD else (INT4_SYM, "f16")
    return FORMATS


def _curve(
    const: Constant,
    checkpoint: Checkpoint,
    curvature: Curvature | None,
    formats: tuple[str, ...],
    page: int,
) -> Curve:
    values = source_values(const, checkpoint)
    return curve(const.name, values, curvature or Curvature.none(shape(const)), formats, page)


def _budget(request: BuildRequest, elements: int, fixed: int) -> Budget:
    """Limits in bytes of the matrices alone."""
    limit = request.size_limit
    if request.max_bpw is not None:
        return Budget(request.max_kl, int(request.max_bpw * elements / 8))
    return Budget(request.max_kl, None if limit is None else max(0, limit - fixed))
