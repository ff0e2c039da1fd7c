"""A Hugging Face checkpoint directory, checked completely before any work and never loaded whole.

    checkpoint = Checkpoint.open("SmolLM2-135M-Instruct")
    checkpoint.parameters["model.norm.weight"]   # TensorInfo(shape=(576,), dtype=torch.bfloat16)
    checkpoint.load("model.norm.weight")         # a tensor over mapped pages

Errors (each a `SpikeError`, exit code 3, before anything is written):

    SPK101  the path doesn't exist                 SPK114  weights in pickle files only
    SPK102  the path isn't a directory             SPK115  no weights in the directory
    SPK103  no config.json                         SPK116  unknown or missing model type
    SPK104  a weight file is missing               SPK117  not a causal language model
    SPK105  config.json isn't a JSON object        SPK118  unknown rope type
    SPK106  a weight file is truncated             SPK119  a weight file is corrupt
    SPK107  a git-LFS pointer instead of a file    SPK120  already quantised weights
    SPK108  the index names absent tensors         SPK121  stored dtype not in this version
    SPK109  wrong shapes                           SPK122  config.json has invalid values
    SPK110  missing parameters                     SPK123  invalid index
    SPK111  missing head on an untied model        SPK124  weights can't be converted
    SPK112  two different weight sets              SPK125  one parameter stored twice, differently
    SPK113  only an adapter                        SPK126  a file can't be read
                                                   SPK127  --model-type contradicts config.json
                                                   SPK128  tokenizer unreadable (when copied)
                                                   SPK129  chat template broken (by the driver)

Of checkpoints that another tool has quantised (see `prequantized`):

    SPK140  settings can't be used                 SPK143  a group index is out of range
    SPK141  part of a packed weight is missing     SPK144  zero points contradict the settings
    SPK142  parts of a packed weight don't fit
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig

from ...errors import SpikeError
from .model_config import CONFIG, ModelConfig, float_model, meta_model, read_config
from .prequantized import (
    Integers,
    Precision,
    UnpackedFiles,
    read_scheme,
    recipe_integers,
    recipe_precision,
    unpack,
)
from .prequantized.methods import OLD_FILES
from .safetensors_file import is_lfs_pointer, lfs_pointer_error, unreadable
from .weight_files import WeightFiles, adapter_only, locate_weights
from .weight_names import TensorInfo, WeightPlan, plan_weights

__all__ = ["Checkpoint", "TensorInfo"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
HASH_CHUNK = 1 << 22


class Checkpoint:
    """An opened checkpoint; make one with `Checkpoint.open`.

    Attributes:
        path: the directory.
        config: transformers' configuration object.
        model_type: of `config`, for example ``llama``.
        architecture: class of the model that is built, for example ``LlamaForCausalLM``.
        parameters: name in the model's state dict -> shape and stored dtype, in the model's order;
            tied names are all listed.
        unused: stored tensors that the model doesn't take (old rotary buffers, for example).
        notes: sentences that a user may want to read; none of them is an error.
        quantised: how another tool has quantised it, for people; empty for a plain checkpoint.
    """

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        files: WeightFiles,
        plan: WeightPlan,
        skeleton: torch.nn.Module,
    ) -> None:
        self.path = path
        self.config: PretrainedConfig = model.parsed
        self.model_type = model.model_type
        self.architecture = type(skeleton).__name__
        self.parameters: Mapping[str, TensorInfo] = plan.parameters
        self.unused = plan.unused
        self.notes = (*files.notes, *plan.notes)
        self.quantised = files.label if isinstance(files, UnpackedFiles) else ""
        self._model, self._files, self._plan, self._skeleton = model, files, plan, skeleton

    @classmethod
    def open(cls, path: str | os.PathLike[str], model_type: str | None = None) -> Checkpoint:
        """Open and check a checkpoint directory: headers are read, weights are not.

        Two tensors that may be tied are compared, up to the first difference; of packed weights,
        zero points and group indices are checked.

        Args:
            path: a local directory; links inside it (Hugging Face caches) are followed.
            model_type: needed only if config.json doesn't state it.

        Raises:
            SpikeError: SPK101 to SPK127 and SPK140 to SPK144, see the module's docstring.
        """
        directory = Path(path).expanduser()
        try:
            _require_directory(directory)
            model = read_config(directory, model_type)
            _refuse_tokenizer_pointers(directory)
            files = locate_weights(directory, model.raw.get("transformers_weights"))
        except OSError as error:
            raise unreadable(error.filename or directory, error) from error
        skeleton = meta_model(model, torch.float32)
        if (scheme := read_scheme(directory, model.raw, skeleton)) is not None:
            files = unpack(files, scheme)
        return cls(directory, model, files, plan_weights(files, skeleton, directory), skeleton)

    def load(self, name: str) -> torch.Tensor:
        """The values of one parameter in its stored dtype, shape as in `parameters`.

        A tensor over mapped pages if it is stored as it is; a new tensor if it has to be stacked,
        split or unpacked (then of float32). Don't write to it: it may be shared.

        Raises:
            KeyError: the model has no such parameter.
        """
        stored = self.canonical(name)
        return self._plan.recipes[stored].run(self._files.tensor, self._skeleton)[stored]

    def integers(self, name: str) -> Integers | None:
        """One parameter as integers and scales, if that is how the source stores it.

        Raises:
            KeyError: the model has no such parameter.
        """
        stored = self.canonical(name)
        return recipe_integers(self._plan.recipes[stored], stored, self._files, self._skeleton)

    def precision(self, name: str) -> Precision | None:
        """What a float needs to hold one parameter's values exactly; None if it isn't packed.

        Raises:
            KeyError: the model has no such parameter.
        """
        return recipe_precision(self._plan.recipes[self.canonical(name)], self._files)

    def release(self) -> None:
        """Let go of the mapped pages of all weights read so far: they would count as memory."""
        for file in self._files.files.values():
            file.release()

    def loading_bytes(self, name: str) -> int:
        """Memory that `load` takes beyond a mapping: the parameter's own and its sources' bytes.

        0 for a tensor that is stored as it is.
        """
        stored = self.canonical(name)
        recipe = self._plan.recipes[stored]
        sources = sum(map(self._files.loading_bytes, recipe.names()))
        if recipe.converter is None:
            return sources
        entries = map(self._files.entry, recipe.names())
        info = self.parameters[stored]
        made: int = info.dtype.itemsize * math.prod(info.shape)
        return made + (sources or sum(e.end - e.begin for e in entries))

    def canonical(self, name: str) -> str:
        """The one name that stands for all parameters with the same (tied) values."""
        return self._plan.stored_as[name]

    def meta_model(self, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """A new model on the meta device, eager attention, tied as the checkpoint really is.

        Non-persistent buffers (rotary frequencies) have no values on the meta device.
        """
        model = meta_model(self._model, dtype)
        for name, keeper in self._plan.untied:
            # The flag made them one parameter, but the checkpoint has two.
            parent, _, leaf = name.rpartition(".")
            apart = torch.nn.Parameter(torch.empty_like(model.get_parameter(keeper)))
            setattr(model.get_submodule(parent), leaf, apart)
        return model

    @property
    def opens_in_transformers(self) -> bool:
        """Whether transformers can load `path` by itself; else there is `float_model`."""
        return not self.quantised

    def float_model(self) -> torch.nn.Module:
        """transformers' model in float32 with the values that `load` gives, to be run."""
        return float_model(self._model, self.load)

    def weight_files(self) -> list[Path]:
        """The safetensors files in use, sorted by name."""
        return [self.path / name for name in sorted(self._files.files)]

    def tokenizer_files(self) -> list[Path]:
        """Tokenizer, chat template and generation_config files that the directory holds."""
        found = [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]
        return found + sorted((self.path / "additional_chat_templates").glob("*.jinja"))

    def source_hash(self) -> str:
        """SHA-256 over the contents of config.json, the index and all weight files, and of an
        old quantiser's settings file.

        Reads every byte (about a second per gigabyte or two). The same as
        ``sha256sum config.json [settings] [index] FILES... | sha256sum``, files in order of name.
        """
        lines = hashlib.sha256()
        for path in self._source_files():
            lines.update(f"{_file_sha256(path)}  {path.name}\n".encode())
        return lines.hexdigest()

    def fingerprint(self) -> str:
        """A cheap key for caches: changes when a source file is replaced or written to.

        SHA-256 over the bytes of config.json, and the name, size and modification time in
        nanoseconds of every weight and tokenizer file. Not proof of content: `source_hash` is.
        """
        digest = hashlib.sha256((self.path / CONFIG).read_bytes())
        for path in (*self._source_files(), *self.tokenizer_files()):
            status = path.stat()
            name = path.relative_to(self.path)
            digest.update(f"\n{name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _source_files(self) -> Iterator[Path]:
        yield self.path / CONFIG
        if self.quantised:  # older tools have their settings apart
            yield from (p for name in OLD_FILES if (p := self.path / name).is_file())
        if self._files.index is not None:
            yield self._files.index
        yield from self.weight_files()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _require_directory(directory: Path) -> None:
    if not directory.exists():
        hint = ""
        if not directory.is_absolute() and len(directory.parts) == 2:
            hint = f" (for a model on the hub: `hf download {directory} --local-dir DIR`)"
        raise SpikeError(
            "SPK101",
            "checkpoint",
            f"{directory} doesn't exist.",
            f"Give the path of a local checkpoint directory{hint}.",
        )
    if not directory.is_dir():
        raise SpikeError(
            "SPK102",
            "checkpoint",
            f"{directory} is a file, not a checkpoint directory.",
            "Give the directory that holds config.json and the .safetensors files.",
        )
    if not (directory / CONFIG).exists():
        raise _no_config(directory)


def _no_config(directory: Path) -> SpikeError:
    """The error for a directory without config.json: by what lies there instead."""
    if (directory / "adapter_config.json").exists():
        return adapter_only(directory)
    remedy = "Give the directory that holds config.json and the .safetensors files."
    snapshots = sorted(directory.glob("snapshots/*/config.json"))
    if snapshots:
        remedy = f"This is a Hugging Face cache entry: give {snapshots[-1].parent} instead."
    elif (directory / "params.json").exists():
        remedy = "These are original (not Hugging Face) files: get the converted checkpoint."
    return SpikeError("SPK103", "checkpoint", f"{directory} holds no config.json.", remedy)


def _refuse_tokenizer_pointers(directory: Path) -> None:
    for name in TOKENIZER_FILES:
        path = directory / name
        if path.is_file() and is_lfs_pointer(path):
            raise lfs_pointer_error(path)
