"""Which files hold a checkpoint's weights, and which tensor lies in which.

Follows `transformers`: `model.safetensors`, or the shards of `model.safetensors.index.json`, or
the file that config.json names in `transformers_weights`. Where `transformers` would silently
choose between two sets, we refuse. Pickle files are never opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import SpikeError
from .json_file import read_json_object
from .safetensors_file import GET_AGAIN, SafetensorsFile, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_SUFFIXES = (".gguf", ".h5", ".msgpack", ".onnx")
COMPARE_BYTES = 1 << 24


@dataclass(frozen=True)
class WeightFiles:
    """The stored tensors of one checkpoint.

    Attributes:
        files: every weight file in use, by file name.
        index: the index file, if the weights are sharded.
        home: tensor name (as stored) -> name of the file that holds it.
        notes: what a user may want to know about the choice of files.
    """

    files: Mapping[str, SafetensorsFile]
    index: Path | None
    home: Mapping[str, str]
    notes: tuple[str, ...]

    def entry(self, name: str) -> StoredTensor:
        """The header entry of the stored tensor `name`."""
        return self.files[self.home[name]].tensors[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor `name`, over mapped pages, in its stored dtype."""
        return self.files[self.home[name]].tensor(name)

    def loading_bytes(self, name: str) -> int:
        """Memory that `tensor` takes beyond a mapping: none."""
        return 0

    def equal(self, left: str, right: str) -> bool:
        """Whether two stored tensors have the same dtype, shape and bytes."""
        return _same_tensor(self.files[self.home[left]], left, self.files[self.home[right]], right)


def locate_weights(directory: Path, named: object = None) -> WeightFiles:
    """Find and check the weight files of `directory`; reads headers only.

    Args:
        directory: the checkpoint directory.
        named: the value of `transformers_weights` in config.json, if any.

    Raises: SPK104, SPK106-108, SPK112-115, SPK119, SPK123, SPK126 (see `checkpoint.py`).
    """
    if named is not None:
        return _locate_named(directory, named)
    single, index = directory / SINGLE, directory / INDEX
    has_single, has_index = _is_there(single), _is_there(index)
    if not has_single and not has_index:
        raise _no_weights(directory)
    if not has_index:
        return _from_single(directory, single)
    weight_map = _read_index(index)
    sharded = _from_index(directory, index, weight_map)
    if has_single and SINGLE not in sharded.files:
        _require_same_set(directory, SafetensorsFile(single), sharded)
    return sharded


def _is_there(path: Path) -> bool:
    """Present in the directory, also as a dangling link (reported later, by name)."""
    return path.exists() or path.is_symlink()


def _locate_named(directory: Path, named: object) -> WeightFiles:
    name = _safe_file_name(named, "`transformers_weights` in config.json")
    path = directory / name
    if not path.is_file():
        raise _missing(directory, name, "`transformers_weights` in config.json", ())
    if name.endswith(".index.json"):
        return _from_index(directory, path, _read_index(path))
    return _from_single(directory, path)


def _from_single(directory: Path, path: Path) -> WeightFiles:
    if not path.is_file():
        raise _missing(directory, path.name, "a link", ())
    file = SafetensorsFile(path)
    return WeightFiles(
        {path.name: file},
        None,
        dict.fromkeys(file.tensors, path.name),
        tuple(_unread_files(directory, {path.name})),
    )


def _from_index(directory: Path, index: Path, weight_map: Mapping[str, str]) -> WeightFiles:
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (directory / name).is_file():
            needs = [tensor for tensor, home in weight_map.items() if home == name]
            raise _missing(directory, name, "the index", needs, index.name)
    files = {name: SafetensorsFile(directory / name) for name in names}
    _require_indexed_tensors(directory, index, weight_map, files)
    home = dict(weight_map)
    for name, file in files.items():
        for tensor in file.tensors:
            other = home.setdefault(tensor, name)
            if other != name and tensor not in weight_map:
                raise _bad_index(index, f"doesn't say whether {tensor} is in {other} or in {name}")
    return WeightFiles(files, index, home, tuple(_unread_files(directory, set(names))))


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, "SPK123").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(path, "has no `weight_map` with tensor names")
    for tensor, file in weight_map.items():
        _safe_file_name(file, f"the entry of {tensor} in {path.name}")
    return weight_map


def _safe_file_name(value: object, where: str) -> str:
    """A plain name of a safetensors file or index: nothing that leaves the directory."""
    if isinstance(value, str) and value == Path(value).name and "\\" not in value:
        if value.endswith((".safetensors", ".safetensors.index.json")):
            return value
        if value.endswith(PICKLE_SUFFIXES):
            raise _pickle_only(where, [value])
    raise SpikeError(
        "SPK123",
        "checkpoint",
        f"{where} names {value!r}, which isn't the name of a safetensors file in the directory.",
        "Shards must lie beside config.json; correct the entry or download the checkpoint again.",
    )


def _require_indexed_tensors(
    directory: Path,
    index: Path,
    weight_map: Mapping[str, str],
    files: Mapping[str, SafetensorsFile],
) -> None:
    absent = [name for name, home in weight_map.items() if name not in files[home].tensors]
    if not absent:
        return
    first = absent[0]
    elsewhere = [name for name, file in files.items() if first in file.tensors]
    found = f"; it is in {elsewhere[0]}" if elsewhere else ""
    raise SpikeError(
        "SPK108",
        "checkpoint",
        f"{index.name} in {directory} names {_count(absent, 'tensor')} that the shards don't hold, "
        f"first: {first} in {weight_map[first]}{found}.",
        "The index and the shards come from different downloads: get them together again.",
    )


def _require_same_set(directory: Path, single: SafetensorsFile, sharded: WeightFiles) -> None:
    """Refuse a stray `model.safetensors` beside an index, unless it holds the very same tensors.

    `transformers` would take the single file without a word; the index may be the newer one.
    """
    names, other = single.tensors.keys(), sharded.home.keys()
    if names == other:
        different = [
            name
            for name in names
            if not _same_tensor(single, name, sharded.files[sharded.home[name]], name)
        ]
        if not different:
            return
        what = f"different values in {_count(different, 'tensor')}, first: {different[0]}"
    else:
        only = sorted(names ^ other)
        what = f"{_count(only, 'tensor')} in one of them only, first: {only[0]}"
    raise SpikeError(
        "SPK112",
        "checkpoint",
        f"{directory} holds two different weight sets: {SINGLE} ({len(names)} tensors) and the "
        f"shards of {INDEX} ({len(other)} tensors); {what}.",
        f"Keep the one that you mean: move {SINGLE} away, or the index with its shards.",
    )


def _same_tensor(left: SafetensorsFile, name: str, right: SafetensorsFile, other: str) -> bool:
    a, b = left.tensors[name], right.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if left.path.samefile(right.path) and a.begin == b.begin:
        return True
    left_bytes, right_bytes = left.raw_bytes(name), right.raw_bytes(other)

    def same(start: int) -> bool:
        part = slice(start, start + COMPARE_BYTES)
        equal = bytes(left_bytes[part]) == bytes(right_bytes[part])
        left.release()
        right.release()
        return equal

    return all(map(same, range(0, len(left_bytes), COMPARE_BYTES)))  # up to the first difference


def _unread_files(directory: Path, used: set[str]) -> Iterator[str]:
    for path in sorted(directory.iterdir()):
        if path.name in used or path.suffix not in (".safetensors", *PICKLE_SUFFIXES):
            continue
        if path.name not in ("training_args.bin", "optimizer.pt", "scheduler.pt", SINGLE):
            yield f"{path.name} isn't part of the checkpoint's weights and was not read"


def _no_weights(directory: Path) -> SpikeError:
    """The error for a directory without a usable weight file: by what lies there instead."""
    names = sorted(path.name for path in directory.iterdir())
    if "adapter_config.json" in names:
        return adapter_only(directory)
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    stray = [name for name in names if name.endswith(".safetensors")]
    if pickles and not stray:
        return _pickle_only(str(directory), pickles)
    if stray:
        what = f"it has {', '.join(stray[:3])} but neither {SINGLE} nor {INDEX}"
        remedy = f"Download {INDEX} as well, or rename a lone complete file to {SINGLE}."
    else:
        other = [name for name in names if name.endswith(OTHER_SUFFIXES)]
        found = f"; {', '.join(other[:3])} can't be used as a source" if other else ""
        what = f"it has neither {SINGLE} nor {INDEX}{found}"
        remedy = "Download the safetensors weights of the model into the directory."
    return SpikeError("SPK115", "checkpoint", f"{directory} holds no weights: {what}.", remedy)


def adapter_only(directory: Path) -> SpikeError:
    """SPK113 for a PEFT adapter without its base model."""
    return SpikeError(
        "SPK113",
        "checkpoint",
        f"{directory} holds only an adapter (adapter_config.json), not a whole model.",
        "Merge it into its base model (PEFT: `model.merge_and_unload().save_pretrained(DIR)`) "
        "and build from DIR.",
    )


def _pickle_only(where: str, names: list[str]) -> SpikeError:
    return SpikeError(
        "SPK114",
        "checkpoint",
        f"{where}: the weights are in pickle files only ({', '.join(names[:3])}). Pickle files "
        "can run any code when opened, so SpikeInfer never opens them.",
        "Get the safetensors version of the model, or convert it yourself: load it with "
        "transformers and `save_pretrained` it again.",
    )


def _missing(
    directory: Path, name: str, source: str, needs: Iterable[str], index: str = ""
) -> SpikeError:
    path, tensors = directory / name, list(needs)
    broken = f" (a link to {path.readlink()}, which doesn't exist)" if path.is_symlink() else ""
    needed = f" {_count(tensors, 'tensor')} need it, first: {tensors[0]}." if tensors else ""
    return SpikeError(
        "SPK104",
        "checkpoint",
        f"shard {name} is named by {source} but missing from {directory}{broken}.{needed}",
        f"Download it again or remove it from {index}." if index else GET_AGAIN,
    )


def _bad_index(path: Path, what: str) -> SpikeError:
    return SpikeError(
        "SPK123", "checkpoint", f"{path.name} in {path.parent} {what}.", "Download it again."
    )


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
