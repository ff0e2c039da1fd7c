"""Calibration: the text on which values are observed, and the run that observes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import ExitCode, SpikeError
from ..analysis import Observed, observe, prefill
from ..frontend.checkpoint import Checkpoint
from ..golden import text_windows
from ..ir import Graph

WINDOW = 128
"""Tokens of one sequence."""
WINDOWS = 4
OWN_TEXT = Path(__file__).parents[1] / "analysis" / "calibration.txt"


def text_of(path: Path | None) -> str:
    """The given file's text, or the one that ships: prose, code, tables, five languages.

    Raises SPK816 for a file that can't be read or has no text.
    """
    try:
        text = (path or OWN_TEXT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path or OWN_TEXT, str(error)) from error
    if not text.strip():
        raise _unusable(path or OWN_TEXT, "it holds no text")
    return text


def windows(checkpoint: Checkpoint, text: str, vocab_size: int, longest: int) -> list[list[int]]:
    """Token ids of the text in pieces of one length, as the checkpoint's tokenizer cuts it."""
    return text_windows(
        checkpoint.path, vocab_size, WINDOW * WINDOWS, min(WINDOW, longest), text
    )


def observer(
    checkpoint: Checkpoint, path: Path | None, longest: int
) -> Callable[[Graph], Mapping[int, Observed]]:
    """Measures every value of a graph of this checkpoint on calibration text."""
    text = text_of(path)

    def run(graph: Graph) -> Mapping[int, Observed]:
        vocab = graph.outputs[0].shape[-1]
        assert isinstance(vocab, int)
        inputs, states = prefill(graph, windows(checkpoint, text, vocab, longest), longest)
        return observe(graph, checkpoint.load, inputs, states)

    return run


def _unusable(path: Path, why: str) -> SpikeError:
    return SpikeError(
        "SPK816",
        "calibration",
        f"{path} can't be used as calibration text: {why}.",
        "Give a UTF-8 text file of a few kilobytes, or leave --calibration out.",
        ExitCode.BAD_INPUT,
    )
