"""Calibration: the text on which values are observed, and the run that observes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..analysis import Observed, States, Steps, observe, prefill
from ..frontend.checkpoint import Checkpoint
from ..golden import text_windows
from ..ir import Graph
from .calibration_text import text_of

WINDOW = 128
"""Tokens of one sequence."""
WINDOWS = 4


def feed(graph: Graph, checkpoint: Checkpoint, text: str, longest: int) -> tuple[Steps, States]:
    """Inputs and empty states of steps of the graph that read the text, cut into windows."""
    vocab = graph.outputs[0].shape[-1]
    assert isinstance(vocab, int)
    size = min(WINDOW, longest)
    sequences = text_windows(checkpoint.path, vocab, WINDOW * WINDOWS, size, text)
    return prefill(graph, sequences, longest)


def observer(
    checkpoint: Checkpoint, path: Path | None, longest: int
) -> Callable[[Graph], Mapping[int, Observed]]:
    """Measures every value of a graph of this checkpoint on calibration text."""
    text = text_of(path)

    def run(graph: Graph) -> Mapping[int, Observed]:
        return observe(graph, checkpoint.load, *feed(graph, checkpoint, text, longest))

    return run
