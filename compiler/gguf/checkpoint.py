"""A GGUF file as a checkpoint: the rest of the compiler sees a directory of Hugging Face's kind.

config.json and tokenizer files come from the file's metadata, or from beside the file: a directory
with one .gguf may hold the model's own, which then win. They lie in a temporary directory while the
checkpoint is used. Weights stay in the file, mapped: `load` gives values, `weights` the blocks.

Errors: SPK130-138 (docs/errors.md), and those of `frontend.checkpoint` for what lies beside.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ...errors import SpikeError
from ...kernels import dequantize
from ..frontend.checkpoint import TOKENIZER_FILES, Checkpoint
from ..frontend.model_config import CONFIG, ModelConfig, meta_model, read_config
from ..frontend.weight_names import WeightPlan, plan_weights
from .config import Facts, config_of
from .families import Family, interleaved_heads
from .names import tensor_names
from .reader import MAGIC
from .rope import FACTORS
from .shards import SUFFIX, GgufModel
from .tokenizer import write_tokenizer
from .weights import GgufWeights, Origin, require_formats


class GgufCheckpoint(Checkpoint):
    """An opened GGUF file; make one with `GgufCheckpoint.open`.

    Attributes:
        weights: the file's tensors by parameter.
    """

    weights: GgufWeights

    @classmethod
    def open(cls, path: str | os.PathLike[str], model_type: str | None = None) -> GgufCheckpoint:
        """Open and check a GGUF file, or a directory with one; values are not read.

        Args:
            path: the file, or its directory.
            model_type: must agree with what the file's architecture is.

        Raises:
            SpikeError: see the module's docstring.
        """
        given = Path(path).expanduser()
        file = gguf_file(given)
        assert file is not None, "ask gguf_file first"
        model = GgufModel(file)
        facts = Facts(file, model.metadata, model.tensors, lambda name: _numbers(model, name))
        require_formats(model)
        beside = given if given.is_dir() else None
        directory = Path(tempfile.mkdtemp(prefix="spike-gguf-"))
        weakref.finalize(model, shutil.rmtree, directory, ignore_errors=True)
        copied = _copy_beside(beside, directory)
        if CONFIG not in copied:
            (directory / CONFIG).write_text(json.dumps(config_of(facts), indent=1, sort_keys=True))
        if "tokenizer.json" not in copied:
            write_tokenizer(file, facts.architecture, model.metadata, directory)
        parsed = _read_config(directory, file, model_type)
        skeleton = meta_model(parsed, torch.float32)
        origins = _origins(facts.family, parsed, skeleton)
        weights = _weights(model, origins)
        plan = plan_weights(weights, skeleton, file)
        _require_all_used(file, plan)
        made = cls(directory, parsed, weights, plan, skeleton)
        made.weights, made._own = weights, [file.parent / name for name in copied]
        made.notes = (*made.notes, *_notes(weights))
        made.quantised = _label(model)
        return made

    _own: list[Path]

    @property
    def opens_in_transformers(self) -> bool:
        """Not without reading the file in its own way."""
        return False

    def release(self) -> None:
        """Let go of the mapped pages of all weights read so far."""
        for file in self.weights.model.files:
            file.release()

    def weight_files(self) -> list[Path]:
        """The GGUF files in use, sorted by name."""
        return sorted(file.path for file in self.weights.model.files)

    def fingerprint(self) -> str:
        """As of a directory: name, size and modification time of every file that is read."""
        digest = hashlib.sha256()
        for path in (*self.weight_files(), *sorted(self._own)):
            status = path.stat()
            digest.update(f"\n{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one of a directory without safetensors.

    A file is one by its name or by its first bytes; None if the path means something else. Of the
    parts of a split file it is the first. Raises SPK139 if a directory holds several.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if path.is_file():
        with path.open("rb") as file:
            return path if file.read(len(MAGIC)) == MAGIC else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(p for p in path.glob(f"*{SUFFIX}"))
    firsts = [p for p in found if "-of-" not in p.name or "-00001-of-" in p.name] or found
    if len(firsts) > 1:
        raise SpikeError(
            "SPK139",
            "gguf",
            f"{path} holds {len(firsts)} GGUF files: {', '.join(p.name for p in firsts[:4])}.",
            "Give the file that you mean.",
        )
    return firsts[0] if firsts else None


def _numbers(model: GgufModel, name: str) -> npt.NDArray[np.float64]:
    """Values of a small tensor of plain floats."""
    rows = model.rows(name)
    flat = rows.reshape(-1, rows.shape[-1])
    entry = model.tensors[name]
    values = dequantize(flat, entry.type.format, entry.shape[-1])  # type: ignore[arg-type]
    return values.reshape(-1).astype(np.float64)


def _copy_beside(beside: Path | None, into: Path) -> list[str]:
    """Copies config.json and tokenizer files from beside the file; their names."""
    names = (CONFIG, *TOKENIZER_FILES) if beside else ()
    found = [name for name in names if beside and (beside / name).is_file()]
    for name in found:
        assert beside is not None
        shutil.copyfile(beside / name, into / name)
    return found


def _read_config(directory: Path, file: Path, model_type: str | None) -> ModelConfig:
    """The config; what is wrong with it is said of the file, not of our copy."""
    try:
        return read_config(directory, model_type)
    except SpikeError as error:
        what = error.what.replace(str(directory), str(file.parent))
        raise SpikeError(error.code, error.where, what, error.remedy, error.exit_code) from error


def _origins(family: Family, model: ModelConfig, skeleton: torch.nn.Module) -> Mapping[str, Origin]:
    """Where every parameter that has a name in GGUF comes from."""
    config = model.parsed.get_text_config().to_dict()
    layers = model.parsed.get_text_config().num_hidden_layers
    shapes = {name: tuple(t.shape) for name, t in skeleton.state_dict().items()}
    names = tensor_names(model.model_type, layers, shapes)
    return {
        name: Origin(
            tensors,
            shapes[name],
            heads=interleaved_heads(family, tensors[0], config),
            shift=family.norm_shift if tensors[0].endswith("norm.weight") else 0.0,
            transposed=tensors[0].endswith(family.transposed or ("\0",)),
        )
        for name, tensors in names.items()
    }


def _weights(model: GgufModel, origins: Mapping[str, Origin]) -> GgufWeights:
    present = {n: o for n, o in origins.items() if all(t in model.home for t in o.tensors)}
    taken = {tensor for origin in present.values() for tensor in origin.tensors} | {FACTORS}
    home = {name: model.home[o.tensors[0]].path.name for name, o in present.items()}
    home |= {name: file.path.name for name, file in model.home.items() if name not in taken}
    return GgufWeights({}, None, home, (), model=model, origins=present)


def _require_all_used(file: Path, plan: WeightPlan) -> None:
    """A tensor that the model has no place for means that it isn't the file's model."""
    if plan.unused:
        raise SpikeError(
            "SPK137",
            "gguf",
            f"{len(plan.unused)} tensors of {file} have no place in the model that its metadata "
            f"describe, first: {plan.unused[0]}.",
            "Build from the model's safetensors checkpoint, or put the model's own config.json "
            "beside the file, in a directory with nothing else.",
        )


def _label(model: GgufModel) -> str:
    """``GGUF: 210 Q4_1, 1 Q8_0``; empty if all tensors are floats."""
    counts = Counter(e.type.name for e in model.tensors.values() if e.type.elements > 1)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"GGUF: {kinds}" if kinds else ""


def _notes(weights: GgufWeights) -> Iterator[str]:
    blocks = {
        name: weights.model.tensors[tensor].type.name
        for name, origin in weights.origins.items()
        for tensor in origin.tensors
        if weights.model.tensors[tensor].type.elements > 1 and not origin.is_plain
    }
    if blocks:
        name, type = next(iter(blocks.items()))
        yield (
            f"{len(blocks)} quantised matrices are stored the other way round in the file and "
            f"were dequantised, first: {name} from {type}"
        )
