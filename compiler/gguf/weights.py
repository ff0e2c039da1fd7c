"""The tensors of a GGUF file under the names of a transformers model: as values, and as blocks.

llama.cpp stores some tensors otherwise than transformers does: rows of q and k in another order,
norms with 1 added, gate and up of stacked experts apart, GPT-2's matrices transposed. What only
moves whole rows keeps its blocks; the rest has to be dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from ...errors import ExitCode, SpikeError
from ...kernels import FORMATS, Format, dequantize
from ..frontend.safetensors_file import StoredTensor
from ..frontend.weight_files import WeightFiles
from ..ir import Constant
from ..quantize import Blocks
from .reader import TensorEntry
from .shards import GgufModel

FLOATS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
PLAIN = "array"
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Origin:
    """Where a parameter's values come from.

    Attributes:
        tensors: GGUF tensors, one above the other.
        shape: of the parameter.
        heads: the rows of each head are interleaved (first, middle, second, ...); 0 if not.
        shift: added in the file.
        transposed: stored the other way round.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    heads: int = 0
    shift: float = 0.0
    transposed: bool = False

    @property
    def is_plain(self) -> bool:
        """The file's values are the parameter's, up to the order of rows."""
        return not self.shift and not self.transposed

    def order(self) -> npt.NDArray[np.int64] | None:
        """The file's row of each row of the parameter; None for the same order."""
        if not self.heads:
            return None
        rows = np.arange(self.shape[0]).reshape(self.heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class GgufWeights(WeightFiles):
    """As `WeightFiles`: a file's tensors as if a checkpoint stored them plainly.

    Attributes:
        model: the files.
        origins: parameter -> where it comes from.
    """

    model: GgufModel = field(kw_only=True)
    origins: Mapping[str, Origin] = field(kw_only=True)

    def entry(self, name: str) -> StoredTensor:
        """What a header would say about a parameter: f16 and bf16 as they are, all else float32."""
        if name not in self.origins:  # a tensor that the model doesn't have
            return StoredTensor(name, "F32", self.model.tensors[name].shape, 0, 0)
        origin = self.origins[name]
        types = {self._entry(t).type.format for t in origin.tensors}
        dtype = FLOATS.get(types.pop(), "F32") if len(types) == 1 and not origin.shift else "F32"
        return StoredTensor(name, dtype, self._shape(origin), 0, 0)

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter's values, a new tensor; float32 but for f16 and bf16."""
        origin, entry = self.origins[name], self.entry(name)
        parts = [self._values(t) for t in origin.tensors]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)
        values = _reordered(values, origin)
        values = values.T if origin.transposed else values
        if origin.shift:
            values = values - np.float32(origin.shift)
        made = torch.from_numpy(np.ascontiguousarray(values)).reshape(entry.shape)
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(entry.dtype)
        return made if dtype is None else made.to(dtype)  # exact: it came from there

    def loading_bytes(self, name: str) -> int:
        """Of the values that `tensor` makes; a build that keeps the blocks doesn't need them."""
        return 4 * prod(self.entry(name).shape)

    def equal(self, left: str, right: str) -> bool:
        """Whether two parameters are stored as the same bytes."""
        a, b = self.origins[left], self.origins[right]
        if (a.shape, len(a.tensors)) != (b.shape, len(b.tensors)):
            return False
        pairs = zip(a.tensors, b.tensors, strict=True)
        return all(
            self._entry(x).type == self._entry(y).type
            and np.array_equal(self.model.rows(x), self.model.rows(y))
            for x, y in pairs
        )

    def plain_format(self, parameter: str) -> str:
        """The float format that holds a parameter's values exactly: f16, bf16 or f32."""
        dtype = self.entry(parameter).dtype
        return next(format for format, name in FLOATS.items() if name == dtype)

    def format_of(self, const: Constant) -> str | None:
        """The format in which the file has a constant of a graph; None if it must be computed.

        One-dimensional constants have the format `array`. No data are read.
        """
        origin = self.origins.get(const.parameter or "")
        if origin is None:
            return None
        if len(origin.shape) == 1:
            # norms as 1 + weight are in the file with their 1
            exact = const.plus == origin.shift and const.rows is None and len(origin.tensors) == 1
            plain = self._entry(origin.tensors[0]).type.format == "f32"
            return PLAIN if exact and plain else None
        if not origin.is_plain or const.transposed or const.plus or len(const.shape) < 2:
            return None
        types = {entry.type.format for entry in self._lies_in(const, origin).values()}
        return types.pop() if len(types) == 1 else None

    def blocks(self, const: Constant) -> Blocks | None:
        """A constant as the file stores it, row by row; None if it must be computed.

        A one-dimensional constant is one row of plain float32.
        """
        format = self.format_of(const)
        if format is None:
            return None
        origin = self.origins[const.parameter or ""]
        if format == PLAIN:
            row = _reordered(self.model.rows(origin.tensors[0]).reshape(-1, 4), origin)
            return Blocks(PLAIN, row.reshape(1, -1), len(row))
        within = self._lies_in(const, origin)
        parts = [self.model.rows(entry.name) for entry in within.values()]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)
        rows = _reordered(rows, origin).reshape(*origin.shape[:-2], *rows.shape[-2:])
        first, last, *step = const.rows or (0, origin.shape[-2])
        offset = next(iter(within))
        own = slice(first - offset, last - offset, *step)
        return Blocks(format, rows[..., own, :], origin.shape[-1])

    def _lies_in(self, const: Constant, origin: Origin) -> dict[int, TensorEntry]:
        """First row -> tensor, of the tensors that hold the constant's rows."""
        first, last = (const.rows or (0, origin.shape[-2]))[:2]
        found, start = {}, 0
        for name in origin.tensors:
            entry = self._entry(name)
            end = start + (1, *entry.shape)[-2]
            if start < last and end > first:
                found[start] = entry
            start = end
        return found

    def _values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor dequantised, float32 in its own shape."""
        entry, rows = self._entry(name), self.model.rows(name)
        flat = rows.reshape(-1, rows.shape[-1])
        format = cast(Format, entry.type.format)
        return dequantize(flat, format, entry.shape[-1]).reshape(entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        return self.model.home[name].tensors[name]

    def _shape(self, origin: Origin) -> tuple[int, ...]:
        """Of the values: the parameter's own if they differ from it by dimensions of 1 only."""
        entries = [self._entry(name) for name in origin.tensors]
        *outer, _, k = (1, *entries[0].shape)
        rows = sum((1, *entry.shape)[-2] for entry in entries)
        made = (*outer[1:], rows, k) if len(entries[0].shape) > 1 else entries[0].shape
        made = tuple(reversed(made)) if origin.transposed else made
        same = [n for n in made if n != 1] == [n for n in origin.shape if n != 1]
        return origin.shape if same else made


def _reordered(rows: npt.NDArray[Scalar], origin: Origin) -> npt.NDArray[Scalar]:
    """Rows in the parameter's order."""
    order = origin.order()
    return rows if order is None else rows[order]


def require_formats(model: GgufModel) -> None:
    """Raises SPK133 for a tensor whose type is no weight, or has no kernels in this version."""
    for entry in model.tensors.values():
        if entry.type.format not in FORMATS:
            raise SpikeError(
                "SPK133",
                "gguf",
                f"the tensor {entry.name} in {model.path} is stored as {entry.type.name}, which "
                "is not in this version.",
                f"Get the model in one of the formats {', '.join(FORMATS)}.",
                ExitCode.UNSUPPORTED,
            )
