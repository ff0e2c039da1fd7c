"""Importances: how much an error in each input channel of a matrix weighs.

The mean square of a channel on calibration text. The error of a product W x is, to first order and
for uncorrelated channels, the sum over channels of mean(x_k^2) * (error of W_k)^2: quantisers
minimise that instead of the plain squared error (llama.cpp's importance matrix).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...errors import SpikeError
from ..ir import Constant, Graph, Parameters
from .moments import Moment
from .walk import walk

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

SMALLEST = 1e-6
"""Least importance of a channel, of the matrix's mean: a channel that was always 0 on a short text
must not leave its weights free."""


@dataclass(frozen=True)
class Entry:
    """Of one tensor.

    Args:
        sums: sums of squares f64 [K], or [E, K] for stacked experts; may be flat if read from an
            old file.
        counts: tokens i64 [1], or [E].
    """

    sums: Sums
    counts: Counts

    @property
    def unseen(self) -> list[int]:
        """Experts to which no token was routed."""
        return np.flatnonzero(self.counts == 0).tolist()

    def means(self, shape: Sequence[int]) -> Floats | None:
        """Importances f32 [K] or [E, K] of a matrix [N, K] or [E, N, K]; None if none is known.

        An expert without tokens gets the mean over the tokens of all others, as if they had been
        routed to it. ValueError if the entry is of another shape.
        """
        experts, k = (shape[0] if len(shape) == 3 else 1), shape[-1]
        if self.sums.size != experts * k or self.counts.size not in (1, experts):
            raise ValueError(f"it has {self.sums.size} sums and {self.counts.size} counts")
        sums = self.sums.reshape(experts, k)
        counts = np.broadcast_to(self.counts.reshape(-1, 1), (experts, 1))
        if not sums.any() or not counts.any():
            return None
        seen = np.where(counts == 0, 0.0, sums)
        together = seen.sum(0) / counts.sum()
        means = np.where(counts == 0, together, seen / np.maximum(counts, 1))
        kept: Floats = np.maximum(means, SMALLEST * means.mean()).astype(np.float32)
        return kept if len(shape) == 3 else kept[0]


Names = Mapping[str, Sequence[str]]
"""Parameter -> the tensors of a GGUF file that it becomes (`compiler.gguf.tensor_names`)."""


@dataclass(frozen=True)
class Importance:
    """Of a whole model, by tensor name as in GGUF files.

    Args:
        entries: tensor name -> sums and counts; parameters without such a name have their own.
        datasets: names of the texts.
        chunks: windows that were read.
        chunk_tokens: tokens of a window; 0 if unknown.
        source: the file that it was read from, for messages.
    """

    entries: Mapping[str, Entry]
    datasets: Sequence[str] = ()
    chunks: int = 0
    chunk_tokens: int = 0
    source: str = field(default="the importances", compare=False)

    @property
    def unseen(self) -> dict[str, list[int]]:
        """Tensor -> experts that saw no token."""
        found = {name: entry.unseen for name, entry in self.entries.items()}
        return {name: experts for name, experts in found.items() if experts}

    def of(self, const: Constant, names: Names) -> Floats | None:
        """Importances of a matrix's channels; None if the text did not reach it.

        Raises SPK413 if the entry is of a matrix of another shape.
        """
        shape = tuple(d for d in const.shape if isinstance(d, int))
        for name in tensors_of(const, names):
            if name not in self.entries:
                continue
            try:
                return self.entries[name].means(shape)
            except ValueError as error:
                what = f"{name}: {error}, but the model's matrix is {list(shape)}"
                raise unfit(self.source, what) from None
        return None

    def require_fit(self, matrices: Iterable[Constant], names: Names) -> list[str]:
        """The parameters that have no importances. Raises SPK413 if that is all, or by `of`."""
        found = {c.parameter or c.name: self.of(c, names) is not None for c in matrices}
        if found and not any(found.values()):
            known = ", ".join(list(self.entries)[:2])
            what = f"none of its tensors ({known}, ...) is one of the model's"
            raise unfit(self.source, what)
        return [name for name, known in found.items() if not known]


def unfit(source: str, what: str) -> SpikeError:
    """SPK413 with this reason."""
    return SpikeError(
        "SPK413",
        "importances",
        f"{source} belongs to another model: {what}.",
        "Make one from this checkpoint: spike calibrate CHECKPOINT --output FILE.gguf.",
    )


def tensors_of(const: Constant, names: Names) -> Sequence[str]:
    """Tensors in GGUF that hold the constant, else its parameter."""
    parameter = const.parameter or const.name
    return names.get(parameter, ()) or (parameter,)


def collect(
    graph: Graph,
    parameters: Parameters,
    windows: Tensor,
    names: Names,
    *,
    datasets: Sequence[str] = (),
    threads: int = 0,
    tick: Callable[[int, int], None] | None = None,
) -> Importance:
    """Importances of every matrix of a fused functional graph on windows i64 [B, T].

    Raises SPK410 and SPK411 as `walk`.
    """
    entries: dict[str, Entry] = {}

    def visit(const: Constant, seen: Moment) -> None:
        counts = np.atleast_1d(np.asarray(seen.count, dtype=np.int64))
        entry = Entry(seen.sum.numpy(), counts)
        for name in tensors_of(const, names):
            entries.setdefault(name, entry)  # parts of a matrix see the same

    walk(graph, parameters, windows, visit, threads=threads, tick=tick)
    return Importance(entries, tuple(datasets), *windows.shape)
