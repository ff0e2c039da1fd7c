"""The stored tensors of a quantised checkpoint, each packed weight as one float32 tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..safetensors_file import StoredTensor
from ..weight_files import WeightFiles
from .integers import Integers
from .packed import Packed, Scheme
from .precision import Precision

BYTES_PER_VALUE = 6
"""While a packed weight is loaded: float32, its code in one byte, and that once more in order."""


@dataclass(frozen=True)
class UnpackedFiles(WeightFiles):
    """As `WeightFiles`; `home` names weights, not what they are packed in.

    Attributes:
        stored: the files as they are.
        packed: weight name (as a plain checkpoint would store it) -> the packed weight.
        label: how they are packed, for people.
    """

    stored: WeightFiles
    packed: Mapping[str, Packed]
    label: str

    def entry(self, name: str) -> StoredTensor:
        """The header entry; that of a packed weight says float32 and its shape."""
        packed = self.packed.get(name)
        return self.stored.entry(name) if packed is None else packed.entry()

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor over mapped pages, or a packed weight's values as a new tensor."""
        packed = self.packed.get(name)
        read = self.stored.tensor
        return read(name) if packed is None else packed.load(read)

    def integers(self, name: str) -> Integers | None:
        """A packed weight as integers and scales, if it is that."""
        packed = self.packed.get(name)
        return None if packed is None else packed.integers(self.stored.tensor)

    def precision(self, name: str) -> Precision | None:
        """What a packed weight's values need of a float; None for a plain one."""
        packed = self.packed.get(name)
        return None if packed is None else packed.precision(self.stored.tensor)

    def loading_bytes(self, name: str) -> int:
        """Values and codes of a packed weight; nothing for a plain one."""
        packed = self.packed.get(name)
        return 0 if packed is None else math.prod(packed.shape) * BYTES_PER_VALUE

    def equal(self, left: str, right: str) -> bool:
        """Whether two weights have the same dtype, shape and values."""
        if left not in self.packed and right not in self.packed:
            return self.stored.equal(left, right)
        a, b = self.entry(left), self.entry(right)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bool(torch.equal(self.tensor(left), self.tensor(right)))


def unpack(files: WeightFiles, scheme: Scheme) -> WeightFiles:
    """The files as if every packed weight were plain; checks all parts, and reads the small ones.

    Raises: SPK141 for missing parts, SPK142 for shapes and dtypes, SPK143 for group indices,
        SPK144 for zero points.
    """
    parts, home = _parts_by_weight(files, scheme)
    packed: dict[str, Packed] = {}
    remarks: dict[str, list[str]] = {}
    for name, of in parts.items():
        made = scheme.packed(name, of, files.tensor)
        packed[name] = made
        home[name] = files.home[next(iter(of.values())).name]
        if remark := made.check_values(files.tensor):
            remarks.setdefault(remark, []).append(name)
    notes = [*files.notes, *_notes(scheme, packed, remarks)]
    return UnpackedFiles(files.files, files.index, home, tuple(notes), files, packed, scheme.label)


def _parts_by_weight(
    files: WeightFiles, scheme: Scheme
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, str]]:
    """What makes each packed weight, and the homes of the tensors that are stored plainly."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    home: dict[str, str] = {}
    for name in files.home:
        entry = files.entry(name)
        if name.endswith(scheme.dropped):
            continue
        if (part := scheme.part(entry)) is None:
            home[name] = files.home[name]
        else:
            parts.setdefault(part[0], {})[part[1]] = entry
    return parts, home


def _notes(
    scheme: Scheme, packed: Mapping[str, Packed], remarks: Mapping[str, list[str]]
) -> list[str]:
    if not packed:
        return [f"config.json announces {scheme.label}, but all weights are stored plainly"]
    notes = [f"{len(packed)} weights are quantised at the source ({scheme.label}); taken exactly"]
    notes += scheme.remarks
    notes += [f"{text}: {len(names)} weights, first {names[0]}" for text, names in remarks.items()]
    return notes
