"""What a build starts from: a checkpoint directory, plain or quantised by another tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..frontend.checkpoint import Checkpoint
from ..golden import Rebuilt
from .pipeline import GivenFormat, nothing_given
from .prequantized import Kept
from .weights import Ready, nothing_ready


@dataclass(frozen=True)
class Source:
    """A checkpoint, and what it has in storage formats already.

    Attributes:
        checkpoint: what the rest of the compiler reads.
        quantised: how its weights are quantised already, for people; empty if they are floats.
        ready: a constant's blocks as they are stored, if they are in the constant's format.
        given: the format that each matrix has already.
        notes: what is known once the formats are chosen.
    """

    checkpoint: Checkpoint
    quantised: str = ""
    ready: Ready = nothing_ready
    given: GivenFormat = nothing_given
    notes: Callable[[], Sequence[str]] = tuple

    def keeps(self, quantization: str) -> bool:
        """Whether the matrices keep the formats that they have."""
        return bool(self.quantised) and quantization.strip().lower() in ("none", "auto", "")


def open_source(path: Path, model_type: str | None = None) -> Source:
    """Opens and checks what `path` is. Raises as `Checkpoint.open`."""
    checkpoint = Checkpoint.open(path, model_type)
    if not checkpoint.quantised:
        return Source(checkpoint)
    kept = Kept(checkpoint)
    return Source(checkpoint, checkpoint.quantised, kept.ready, kept.given, kept.notes)


def rebuilt(checkpoint: Checkpoint) -> Rebuilt | None:
    """How the golden gate makes the source's model; None if transformers opens it."""
    if checkpoint.opens_in_transformers:
        return None
    own = {checkpoint.canonical(name) for name in checkpoint.parameters}
    count = sum(prod(checkpoint.parameters[name].shape) for name in own)
    return Rebuilt(tuple(checkpoint.weight_files()), count, checkpoint.float_model)


def requantised(quantised: str, chosen: str) -> str:
    """The warning about weights that are quantised a second time."""
    return (
        f"the source's weights are quantised already ({quantised}): storing them as {chosen} "
        "quantises them again, which loses more than quantising the original would; "
        "--quantization none keeps them as they are"
    )
