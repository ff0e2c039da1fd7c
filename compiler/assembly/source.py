"""What a build starts from: a checkpoint directory, plain or quantised, or a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ...errors import SpikeError
from ..engine.manifest import MANIFEST, MODEL
from ..frontend.checkpoint import Checkpoint
from ..gguf.checkpoint import GgufCheckpoint, gguf_file
from ..gguf.names import file_type_name
from ..golden import Rebuilt
from ..ir import Constant
from ..quantize import Blocks, Given, Quantization
from .pipeline import GivenFormat, nothing_given
from .prequantized import Kept
from .weights import Ready, nothing_ready

NEAREST = {
    "q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "q2_k_s": "q2_k", "q3_k_s": "q3_k_m",
    "q3_k_l": "q3_k_m", "q5_k_s": "q5_k_m",
}  # fmt: skip
"""GGUF's name of a mix or format -> the quantisation of ours that is nearest to it."""


def no_blocks(_: Constant) -> bool:
    """The source's weights are floats."""
    return False


@dataclass(frozen=True)
class Source:
    """A checkpoint, and what it has in storage formats already.

    Attributes:
        checkpoint: what the rest of the compiler reads.
        quantised: how its weights are quantised already, for people; empty if they are floats.
        ready: a constant's blocks as they are stored, if they are in the constant's format.
        has_blocks: whether `ready` has some; unpacks nothing.
        given: the format that each matrix has already.
        notes: what is known once the formats are chosen.
        own: the quantisation of ours that is nearest to its own formats, if they are a mix of ours.
    """

    checkpoint: Checkpoint
    quantised: str = ""
    ready: Ready = nothing_ready
    has_blocks: Callable[[Constant], bool] = no_blocks
    given: GivenFormat = nothing_given
    notes: Callable[[], Sequence[str]] = tuple
    own: Quantization | None = None

    def keeps(self, quantization: str) -> bool:
        """Whether the matrices keep the formats that they have."""
        return bool(self.quantised) and quantization.strip().lower() in ("none", "auto", "")


def open_source(path: Path, model_type: str | None = None) -> Source:
    """Opens and checks what `path` is.

    Raises SPK145 for an engine, and as `Checkpoint.open` and `GgufCheckpoint.open`.
    """
    if (path / MANIFEST).is_file() and (path / MODEL).is_file():
        raise SpikeError(
            "SPK145",
            "checkpoint",
            f"{path} is an engine, and this reads the checkpoint that an engine is made from.",
            "Give that checkpoint; `spike inspect` of the engine names its architecture.",
        )
    if gguf_file(path) is not None:
        return _gguf(GgufCheckpoint.open(path, model_type))
    checkpoint = Checkpoint.open(path, model_type)
    if not checkpoint.quantised:
        return Source(checkpoint)
    kept = Kept(checkpoint)
    return Source(checkpoint, checkpoint.quantised, kept.ready, kept.keeps, kept.given, kept.notes)


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


def _gguf(checkpoint: GgufCheckpoint) -> Source:
    weights = checkpoint.weights

    def has_blocks(const: Constant) -> bool:
        return weights.format_of(const) == const.format

    def ready(const: Constant) -> Blocks | None:
        return weights.blocks(const) if has_blocks(const) else None

    def given(const: Constant) -> Given:
        if (format := weights.format_of(const)) is not None:
            return Given(format, "as in the GGUF file")
        assert const.parameter is not None
        plain = weights.plain_format(const.parameter)
        return Given(plain, "computed from the GGUF file, which stores it otherwise")

    own = _nearest(checkpoint)
    return Source(checkpoint, checkpoint.quantised, ready, has_blocks, given, own=own)


def _nearest(checkpoint: GgufCheckpoint) -> Quantization | None:
    """By what the file calls itself, else by the format of most weights of its layers."""
    model = checkpoint.weights.model
    sizes: Counter[str] = Counter()
    for entry in model.tensors.values():
        if entry.type.elements > 1:
            in_layer = entry.name.startswith("blk.")
            sizes[entry.type.format] += (entry.end - entry.begin) * in_layer
    if not sizes:
        return None
    names = [file_type_name(model.metadata), sizes.most_common(1)[0][0]]
    nearest = [NEAREST.get(name, name) for name in names]
    known = list(Quantization)
    return next((Quantization(n) for n in nearest if n in known), Quantization.Q4_K_M)
