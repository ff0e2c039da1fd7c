"""`spike inspect overflow`: a checkpoint's traced graph, run on calibration text."""

from __future__ import annotations

from pathlib import Path

from ...passes.assign_precision import DTYPES
from ..analysis import OverflowReport, States, Steps, locate
from ..frontend.import_model import import_model
from ..ir import Graph
from .calibration import feed
from .calibration_text import text_of
from .progress import Progress
from .request import BuildRequest
from .settings import sequence_limit
from .source import open_source

__all__ = ["OverflowReport", "find_overflow"]


def find_overflow(
    model: Path, dtype: str, calibration: Path | None, progress: Progress
) -> OverflowReport:
    """Which node of the traced model exceeds `dtype` (float16 or bfloat16) first.

    Traced, because the inside of norms and softmax is visible there. Raises SPK1xx and SPK2xx for
    the checkpoint, SPK816 for the text.
    """
    text = text_of(calibration)
    checkpoint = open_source(model).checkpoint
    longest = sequence_limit(BuildRequest(model, model), checkpoint)
    progress.phase("trace")
    graph = import_model(checkpoint, max_positions=longest)
    progress.phase("run")

    def read(graph: Graph) -> tuple[Steps, States]:
        return feed(graph, checkpoint, text, longest)

    return locate(graph, checkpoint.load, DTYPES[dtype], read)
