"""Matrices quantised to their inputs, before the weights are written.

The model's reference graph is walked over calibration text; each matrix is quantised to the inputs
that the quantised matrices before it give. The blocks wait in a file without a name, beside the
engine that is being written, so that memory holds one matrix at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ExitCode, SpikeError
from ...kernels import Format, block_elements, dequantize, quantize, row_bytes
from ..calibrate import Moment, walk
from ..calibrate.importance import Entry
from ..frontend.checkpoint import Checkpoint
from ..ir import Constant, Graph
from ..quantize import Blocks
from ..quantize.feedback import Outcome, quantize_to_inputs, triangular_factor
from ..quantize.store import as_f32, raise_if_unrepresentable
from .calibrate import reference_graph, windows_of
from .progress import Progress
from .request import BuildRequest
from .source import Source
from .weights import Ready, parameters, shape, source_values

TOKENS = 32768
WINDOW = 512
MOST_MOMENT_BYTES = 1 << 28
"""Of X^T X, K = 8192; matrices with longer rows, or of more experts, are quantised by the
importances of their input channels alone."""

Key: TypeAlias = tuple[str | None, bool, tuple[int, ...] | None]


def key_of(const: Constant) -> Key:
    """The part of a parameter that a constant is, the same in the walked and in the built graph."""
    return const.parameter, const.transposed, const.rows


def block_formats(graph: Graph, given: Callable[[Constant], bool]) -> dict[Key, str]:
    """Formats of the placed graph's matrices that are to be quantised to blocks.

    Matrices whose blocks are `given` by the source stay as they are.
    """
    return {
        key_of(c): c.format
        for c in parameters(graph)
        if c.format != "array" and len(c.shape) > 1 and block_elements(cast(Format, c.format)) > 1
        if not given(c)
    }


@dataclass
class Spill:
    """Blocks in a file without a name; called with a constant, it gives them back, mapped."""

    directory: Path
    otherwise: Ready
    _places: dict[Key, tuple[str, int, tuple[int, ...], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._file = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115, lives as we do

    def add(self, const: Constant, format: str, chunks: Iterator[npt.NDArray[np.uint8]]) -> None:
        """Takes a matrix's logical rows."""
        start = self._file.seek(0, 2)
        for rows in chunks:
            self._file.write(rows.data)
        *stack, k = shape(const)
        place = (format, start, (*stack, row_bytes(cast(Format, format), k)), k)
        self._places[key_of(const)] = place

    def __call__(self, const: Constant) -> Blocks | None:
        """The blocks of a constant, or whatever `otherwise` has."""
        place = self._places.get(key_of(const))
        if place is None:
            return self.otherwise(const)
        self._file.flush()
        format, start, size, k = place
        return Blocks(format, np.memmap(self._file, np.uint8, "r", start, size), k)


class ModelQuantizer:
    """Visits matrices during a walk; `blocks` then has them.

    Args:
        formats: storage formats by `key_of`.
        checkpoint: the source.
        given: blocks that exist already and are kept.
        directory: for the blocks that come into being.
        threads: of the quantiser, 0 for one per CPU.
        vocab: rows of the head.
    """

    def __init__(
        self,
        formats: Mapping[Key, str],
        checkpoint: Checkpoint,
        given: Ready,
        directory: Path,
        threads: int,
        vocab: int = 0,
    ) -> None:
        self.formats, self.checkpoint, self.given = formats, checkpoint, given
        self.threads, self.vocab = threads, vocab
        self.blocks = Spill(directory, given)
        self.outcomes: dict[str, Outcome] = {}
        self._factor: tuple[Moment, int, npt.NDArray[np.float32] | None] | None = None

    def wants_products(self, const: Constant) -> bool:
        """Whether X^T X of a matrix's inputs is needed, and not too large."""
        *stack, _, k = shape(const)
        experts = stack[0] if stack else 1
        small = 4 * experts * k * k <= MOST_MOMENT_BYTES
        return small and key_of(const) in self.formats

    def __call__(self, const: Constant, seen: Moment) -> torch.Tensor | None:
        """Quantises one matrix; its new values, None for the head, whose result nobody reads."""
        format = self.formats.get(key_of(const))
        if format is None:
            return None
        if (blocks := self.given(const)) is None:
            outcome = self.outcomes.setdefault(const.name, Outcome())
            self.blocks.add(const, format, self._rows(const, format, seen, outcome))
            blocks = self.blocks(const)
            assert blocks is not None
        return None if shape(const)[-2] == self.vocab else _values_of(blocks)

    def _rows(
        self, const: Constant, format: str, seen: Moment, outcome: Outcome
    ) -> Iterator[npt.NDArray[np.uint8]]:
        name = const.parameter or const.name
        values = source_values(const, self.checkpoint)
        for expert, matrix in enumerate(values if values.ndim == 3 else values[None]):
            label = f"{name}[{expert}]" if values.ndim == 3 else name
            if seen.sum.dtype == torch.float64:
                yield _quantized(matrix, format, self.threads, _means(const, seen, expert), label)
            elif (factor := self._factor_of(seen, expert)) is not None:
                yield from quantize_to_inputs(
                    matrix, factor, format, outcome, name=label, threads=self.threads
                )
            else:
                yield _quantized(matrix, format, self.threads, None, label)

    def _factor_of(self, seen: Moment, expert: int) -> npt.NDArray[np.float32] | None:
        """Made once for matrices that share an input."""
        kept = self._factor
        if kept is None or kept[0] is not seen or kept[1] != expert:
            stacked = seen.sum.ndim == 3
            moment = seen.sum[expert] if stacked else seen.sum
            if stacked and not bool(moment.any()):
                moment = seen.sum.sum(0)  # no token came here: what all experts saw stands in
            kept = self._factor = seen, expert, triangular_factor(moment)
        return kept[2]


def _means(const: Constant, seen: Moment, expert: int) -> npt.NDArray[np.float32] | None:
    """Importances of one matrix's input channels."""
    counts = np.atleast_1d(np.asarray(seen.count, dtype=np.int64))
    means = Entry(seen.sum.numpy(), counts).means(shape(const))
    return means[expert] if means is not None and means.ndim == 2 else means


def _quantized(
    matrix: torch.Tensor,
    format: str,
    threads: int,
    importance: npt.NDArray[np.float32] | None,
    label: str,
) -> npt.NDArray[np.uint8]:
    values = as_f32(matrix)
    try:
        return quantize(values, cast(Format, format), threads, importance)
    except ValueError:
        raise_if_unrepresentable(label, values, 0, format)
        raise


def _values_of(blocks: Blocks) -> torch.Tensor:
    rows = blocks.rows.reshape(-1, blocks.rows.shape[-1])
    values = dequantize(np.asarray(rows), cast(Format, blocks.format), blocks.k)
    return torch.from_numpy(values.reshape(*blocks.rows.shape[:-1], blocks.k))


def quantize_model(
    request: BuildRequest,
    source: Source,
    graph: Graph,
    longest: int,
    directory: Path,
    progress: Progress,
) -> Ready:
    """The blocks of a placed graph's matrices, quantised as the request says.

    Raises:
        SpikeError: SPK417 if no matrix is stored in blocks, SPK403, SPK410, SPK411, SPK414, SPK816.
    """
    if request.resolved_quantizer == "plain":
        return source.ready
    checkpoint = source.checkpoint
    formats = block_formats(graph, source.has_blocks)
    if not formats:
        raise SpikeError(
            "SPK417",
            "quantization",
            "--quantizer feedback has nothing to do: no matrix of this build is quantised to "
            "blocks.",
            "Choose a --quantization such as q4_k_m, or leave --quantizer and --calibration out.",
            ExitCode.USAGE,
        )
    progress.phase("trace")
    reference = reference_graph(checkpoint, longest)
    vocab = reference.outputs[0].shape[-1]
    assert isinstance(vocab, int)
    texts = [request.calibration]
    windows = windows_of(checkpoint, vocab, texts, TOKENS, min(WINDOW, longest))
    visitor = ModelQuantizer(formats, checkpoint, source.ready, directory, request.workers, vocab)

    def tick(done: int, total: int) -> None:
        if done == 1:
            progress.phase("quantize", total, "matrices")
        progress.advance(1)

    walk(
        reference, checkpoint.load, windows, visitor, full=visitor.wants_products,
        threads=request.workers, tick=tick,
    )  # fmt: skip
    for note in _notes(visitor, windows.numel()):
        progress.note(note)
    return visitor.blocks


def _notes(visitor: ModelQuantizer, tokens: int) -> Iterator[str]:
    known = [o for o in visitor.outcomes.values() if o.rows.any()]
    if known:
        mean = sum(o.relative for o in known) / len(known)
        yield (
            f"{len(known)} matrices quantised to {tokens} tokens of calibration text: "
            f"{mean:.2f} of the plain quantiser's output error there, on average"
        )
