"""`spike calibrate`: a checkpoint's reference graph, walked over calibration text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from ...errors import SpikeError
from ...passes.manager import run_pipeline
from ...passes.pipeline import default_pipeline
from ..calibrate import Importance, collect, read_imatrix, write_imatrix
from ..frontend.checkpoint import Checkpoint
from ..frontend.import_model import import_model
from ..gguf.names import tensor_names
from ..golden import text_windows
from ..ir import Graph
from .calibration_text import text_of
from .progress import Progress
from .request import BuildRequest
from .settings import sequence_limit, text_config
from .source import open_source

__all__ = ["Importance", "calibrate", "read_imatrix", "reference_graph", "write_imatrix"]

REFERENCE = ("clean", "raise", "fuse")
"""Phases that keep the functional interface and leave every value f32."""

CHARACTERS = 16
"""Characters read per token that is wanted: a text of long tokens still has enough."""


def reference_graph(checkpoint: Checkpoint, longest: int) -> Graph:
    """The fused functional graph of a checkpoint, all f32. Raises SPK2xx as `import_model`."""
    graph = import_model(checkpoint, max_positions=longest)
    run_pipeline(graph, [p for p in default_pipeline() if p.name in REFERENCE])
    return graph


def gguf_names(checkpoint: Checkpoint) -> Mapping[str, Sequence[str]]:
    """Parameter -> tensors in GGUF, for those that llama.cpp has names for."""
    layers = int(text_config(checkpoint).num_hidden_layers)
    return tensor_names(checkpoint.model_type, layers, checkpoint.parameters)


def windows_of(
    checkpoint: Checkpoint, vocab: int, texts: Sequence[Path | None], tokens: int, window: int
) -> Tensor:
    """Up to about `tokens` ids i64 [B, window] of the texts, which take turns; None is our own.

    Raises SPK816 for a text that can't be read, SPK414 if there is not one window.
    """
    if not (checkpoint.path / "tokenizer.json").is_file():
        what = f"{checkpoint.path} has no tokenizer.json, so that no text can be read."
        raise SpikeError("SPK414", "calibration", what, "Put the model's tokenizer.json there.")
    found, most = [], 0
    for path in texts:
        text = text_of(path, CHARACTERS * tokens)
        pieces = text_windows(checkpoint.path, vocab, tokens, window, text)
        most = max(most, len(pieces[0]))
        found.append([piece for piece in pieces if len(piece) == window])
    turns = [piece for turn in zip_longest(*found) for piece in turn if piece]
    if not turns:
        few = tokens < window
        raise SpikeError(
            "SPK414",
            "calibration",
            f"{tokens} tokens of text are less than one window of {window}."
            if few
            else f"the calibration text has {most} tokens, not one window of {window}.",
            "Give more --tokens, or a smaller --window."
            if few
            else "Give more text (a few hundred kilobytes are good), or a smaller --window.",
        )
    return torch.tensor(turns[: max(1, tokens // window)])


def calibrate(
    model: Path,
    texts: Sequence[Path],
    tokens: int,
    window: int,
    threads: int,
    progress: Progress,
) -> Importance:
    """Importances of a checkpoint's matrices.

    Raises SPK1xx and SPK2xx for the checkpoint, SPK410, SPK411, and as `windows_of`.
    """
    progress.phase("checkpoint")
    checkpoint = open_source(model).checkpoint
    for note in checkpoint.notes:
        progress.note(note)
    longest = sequence_limit(BuildRequest(model, model), checkpoint)
    progress.phase("trace")
    graph = reference_graph(checkpoint, longest)
    vocab = graph.outputs[0].shape[-1]
    assert isinstance(vocab, int)
    chosen = windows_of(checkpoint, vocab, list(texts) or [None], tokens, min(window, longest))

    def tick(done: int, total: int) -> None:
        progress.phase("calibrate", total, "matrices")
        progress.advance(1)
        checkpoint.release()

    found = collect(
        graph,
        checkpoint.load,
        chosen,
        gguf_names(checkpoint),
        datasets=[path.name for path in texts] or ["own text"],
        threads=threads,
        tick=tick,
    )
    for name, experts in found.unseen.items():
        progress.note(f"{name}: no token was routed to experts {', '.join(map(str, experts))}")
    return found
