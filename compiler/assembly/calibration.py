"""Calibration: the text on which values are observed, and the run that observes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import ExitCode, SpikeError
from ..analysis import Observed, States, Steps, observe, prefill
from ..frontend.checkpoint import Checkpoint
from ..golden import text_windows
from ..ir import Graph

WINDOW = 128
"""Tokens of one sequence."""
WINDOWS = 4
LONGEST_TEXT = 1 << 16
"""Characters read: far more than the windows take, and quick to tokenize."""
OWN_TEXT = Path(__file__).parents[1] / "analysis" / "calibration.txt"


def text_of(path: Path | None, longest: int = LONGEST_TEXT) -> str:
    """The first `longest` characters of the given file, or of the text that ships.

    That is prose, code, tables, many languages. Raises SPK816 for a file that can't be read or
    has no text.
    """
    try:
        with (path or OWN_TEXT).open(encoding="utf-8") as file:
            text = file.read(longest)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path or OWN_TEXT, str(error)) from error
    if not text.strip():
        raise _unusable(path or OWN_TEXT, "it holds no text")
    return text


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


def _unusable(path: Path, why: str) -> SpikeError:
    return SpikeError(
        "SPK816",
        "calibration",
        f"{path} can't be used as calibration text: {why}.",
        "Give a UTF-8 text file, or none: then a text of ours is read.",
        ExitCode.BAD_INPUT,
    )
