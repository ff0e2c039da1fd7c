"""An engine as a GGUF file: its weights' blocks bit for bit, under llama.cpp's names.

A stored weight is a view of a parameter (some rows of it, its transpose, 1 added); the engine's
report says which. A GGUF tensor is put together from views that cover it; where none do, or the
format has no twin in GGUF, the export is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig

from ...errors import ExitCode, SpikeError
from ...kernels import Format, packed_bytes, unpack
from ..engine import EngineDirectory, WeightSpec
from .families import Family, interleaved_heads
from .metadata import (
    architecture_of,
    metadata_of,
    parsed_config,
    require_nothing_lost,
    rope_factors,
)
from .names import tensor_names
from .reader import TensorEntry
from .rope import FACTORS
from .tensor_types import OF_FORMAT
from .vocabulary import vocabulary
from .weights import Origin
from .writer import TensorOut, write_gguf

Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class View:
    """A stored weight, as part of a parameter.

    Attributes:
        spec: where it lies.
        first: its first row in the (transposed) parameter.
        rows: how many.
        transposed: it is the parameter's transpose.
        plus: added to the parameter's values.
        plain: several dimensions, stored row by row.
    """

    spec: WeightSpec
    first: int
    rows: int
    transposed: bool
    plus: float
    plain: bool


def export_gguf(engine: EngineDirectory, output: Path) -> Mapping[str, int]:
    """Writes the engine's model; how many tensors have each of ggml's types.

    Raises:
        SpikeError: SPK590 for a model that GGUF can't state, SPK591 for weights that aren't its
            tensors, SPK592 for the tokenizer, SPK593 for an engine of an older build, SPK594 if
            the disk refuses.
    """
    if engine.config.spike.tensorrt is not None:
        raise SpikeError(
            "SPK563",
            "export",
            f"{engine.path} is a TensorRT engine, whose weights lie inside of rank0.engine.",
            "Export an engine of the same checkpoint that was built with --backend onnxruntime.",
            ExitCode.UNSUPPORTED,
        )
    config = parsed_config(_source_config(engine))
    _, family = architecture_of(config.model_type)
    tensors = [*_tensors(engine, family, config)]
    if (factors := rope_factors(config)) is not None:
        data = factors.tobytes()
        tensors.append(TensorOut(FACTORS, OF_FORMAT["f32"], factors.shape, lambda: [data]))
    metadata = metadata_of(config, engine.config.pretrained_config.quantization.quant_algo)
    entries = {t.name: TensorEntry(t.name, t.type, t.shape, 0, t.bytes) for t in tensors}
    require_nothing_lost(output, metadata, entries, config)
    embedding = entries["token_embd.weight"].shape[0]
    metadata |= vocabulary(engine.path, config.to_dict(), embedding)
    write_gguf(output, metadata, tensors)
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[tensor.type.name] = counts.get(tensor.type.name, 0) + 1
    return counts


def _source_config(engine: EngineDirectory) -> Mapping[str, Any]:
    config = engine.config.spike.report.get("source config")
    if isinstance(config, Mapping) and "model_type" in config:
        return config
    raise SpikeError(
        "SPK593",
        "export",
        f"{engine.path} was built by a version that didn't keep its source's configuration.",
        "Build it again.",
    )


def _views(engine: EngineDirectory) -> dict[str, list[View]]:
    """Stored weights by parameter."""
    notes = cast("Mapping[str, Any]", engine.config.spike.report.get("weight views", {}))
    views: dict[str, list[View]] = {}
    for spec in engine.config.spike.weights:
        note: Mapping[str, Any] = notes.get(spec.name, {})
        rows = note.get("rows") or [0, spec.shape[-2] if len(spec.shape) > 1 else spec.shape[0]]
        if len(rows) == 2:  # every n-th row belongs to several tensors, which none has in GGUF
            made = View(spec, rows[0], rows[1] - rows[0], bool(note.get("transposed")),
                        float(note.get("plus", 0.0)), bool(note.get("plain")))  # fmt: skip
            views.setdefault(spec.parameters[0], []).append(made)
    return views


def _tensors(
    engine: EngineDirectory, family: Family, config: PretrainedConfig
) -> Iterator[TensorOut]:
    """All tensors, in the order of the engine's weights."""
    views = _views(engine)
    layers = engine.config.pretrained_config.num_hidden_layers
    names = tensor_names(family.model_type, layers, views)
    stored = np.memmap(engine.weights_path, np.uint8, "r")
    for parameter, own in views.items():
        if parameter not in names:
            raise _refused(parameter, "llama.cpp has no name for it")
        for index, name in enumerate(names[parameter]):
            share = (index, len(names[parameter]))
            yield _tensor(name, parameter, own, share, family, config, stored)


def _tensor(
    name: str,
    parameter: str,
    views: Sequence[View],
    share: tuple[int, int],
    family: Family,
    config: PretrainedConfig,
    stored: Rows,
) -> TensorOut:
    """One tensor: the `share[0]`-th of `share[1]` equal parts of a parameter."""
    shift = family.norm_shift if name.endswith("norm.weight") else 0.0
    transposed = name.endswith(family.transposed or ("\0",))
    fitting = [v for v in views if v.transposed == transposed and v.plus == shift]
    total = max((v.first + v.rows for v in fitting), default=0)
    first, last = (total * i // share[1] for i in (share[0], share[0] + 1))
    chosen = _cover(fitting, first, last)
    if not chosen:
        raise _refused(parameter, "the engine stores it in parts that llama.cpp doesn't have")
    spec = chosen[0].spec
    if len({v.spec.format for v in chosen}) > 1:
        raise _refused(parameter, "its parts have different formats")
    type = OF_FORMAT.get(spec.format)
    k = spec.shape[-1]
    if type is None or k % type.elements:
        raise _refused(parameter, f"{spec.format} rows of {k} have no equal in GGUF")
    shape = (last - first,) if len(spec.shape) == 1 else (*spec.shape[:-2], last - first, k)
    origin = Origin((name,), shape, heads=interleaved_heads(family, name, config.to_dict()))
    return TensorOut(name, type, shape, partial(_data, chosen, first, last, origin, stored))


def _cover(views: Sequence[View], first: int, last: int) -> list[View]:
    """Views that hold the rows [first, last) without a gap; empty if there are none."""
    chosen: list[View] = []
    while first < last:
        best = max((v for v in views if v.first <= first < v.first + v.rows),
                   key=lambda v: v.first + v.rows, default=None)  # fmt: skip
        if best is None:
            return []
        chosen.append(best)
        first = best.first + best.rows
    return chosen


def _data(
    views: Sequence[View], first: int, last: int, origin: Origin, stored: Rows
) -> Iterator[bytes]:
    """A tensor's bytes; stacked experts one after the other."""
    stack = prod(origin.shape[:-2])
    order = origin.order()
    for expert in range(stack):
        parts, row = [], first
        for view in views:
            rows = _rows(view, expert, stored)
            end = min(last, view.first + view.rows)
            parts.append(rows[row - view.first : end - view.first])
            row = end
        rows = np.concatenate(parts)
        if order is not None:
            there = np.empty_like(rows)
            there[order] = rows
            rows = there
        yield rows.tobytes()


def _rows(view: View, expert: int, stored: Rows) -> Rows:
    """A view's logical rows, uint8 [rows, row_bytes]; of a vector one number each."""
    spec = view.spec
    data = np.asarray(stored[spec.offset : spec.offset + spec.bytes])
    if len(spec.shape) == 1 or view.plain:
        matrices = data.reshape(prod(spec.shape[:-2]) if view.plain else 1, view.rows, -1)
        return cast(Rows, matrices[expert])
    format, (n, k) = cast(Format, spec.format), spec.shape[-2:]
    size = packed_bytes(format, n, k)
    return unpack(data[expert * size : (expert + 1) * size], format, n, k)


def _refused(parameter: str, why: str) -> SpikeError:
    return SpikeError(
        "SPK591",
        "export",
        f"{parameter} has no tensor in GGUF: {why}.",
        "Build the engine with a --quantization whose formats llama.cpp has, such as q8_0.",
        ExitCode.UNSUPPORTED,
    )
