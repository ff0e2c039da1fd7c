"""What a scheme says about stored names, and what one packed weight can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from ....errors import SpikeError
from ..safetensors_file import StoredTensor
from .integers import Integers
from .precision import Precision

ReadTensor: TypeAlias = Callable[[str], torch.Tensor]
"""A stored tensor by its name, over mapped pages."""

Parts: TypeAlias = Mapping[str, StoredTensor]
"""What makes one weight: the part's role (`qweight`, `scales`) -> its header entry."""

SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Packed(ABC):
    """One weight in its packed form; its shapes are checked, its values not yet read.

    Args:
        name: of the weight that it stands for.
        parts: what it is made of.
        shape: of the weight.
    """

    name: str
    parts: Parts
    shape: tuple[int, ...]

    # The two below are for some schemes only, so they aren't abstract.
    def check_values(self, read: ReadTensor) -> str | None:
        """Checks small parts (zero points, group indices); a note, if there is anything to say.

        Raises: SPK143 for group indices, SPK144 for zero points.
        """
        return None

    def integers(self, read: ReadTensor) -> Integers | None:
        """The weight as integers and scales, if it is that."""
        return None

    @abstractmethod
    def precision(self, read: ReadTensor) -> Precision:
        """What its values need of a float; follows from the scales, codes aren't read."""

    @abstractmethod
    def load(self, read: ReadTensor) -> torch.Tensor:
        """The weight's values, float32, shape as `shape`."""

    def entry(self) -> StoredTensor:
        """A header entry as if the weight were stored plainly."""
        return StoredTensor(self.name, "F32", self.shape, 0, 0)


class Scheme(ABC):
    """How one tool stores weights."""

    label: str
    """For people: "GPTQ, 4 bits, groups of 128"."""

    remarks: tuple[str, ...] = ()
    """What of the source isn't taken over, such as quantised activations."""

    dropped: ClassVar[tuple[str, ...]] = ()
    """Ends of names of tensors that concern activations, not weights."""

    @abstractmethod
    def part(self, entry: StoredTensor) -> tuple[str, str] | None:
        """(weight that it belongs to, its role there); None if it is stored plainly."""

    @abstractmethod
    def packed(self, name: str, parts: Parts, read: ReadTensor) -> Packed:
        """The weight that `parts` make, checked.

        Raises: SPK141 for a missing part, SPK142 for shapes or dtypes that don't fit.
        """


def require_parts(name: str, parts: Parts, needed: Collection[str], label: str) -> None:
    """Raises SPK141 for the first of `needed` that isn't stored."""
    for role in needed:
        if role not in parts:
            have = ", ".join(sorted(entry.name for entry in parts.values()))
            raise SpikeError(
                "SPK141",
                "checkpoint",
                f"{name} is packed ({label}), but its {role} is missing; stored are {have}.",
                "Download the checkpoint again, or correct its quantisation settings.",
            )


def require_form(
    entry: StoredTensor, dtypes: Collection[str], shapes: Collection[tuple[int, ...]], why: str
) -> None:
    """Raises SPK142 unless a part has one of the dtypes and one of the shapes.

    Args:
        why: what the shape follows from: "96 inputs in groups of 32".
    """
    if entry.dtype not in dtypes or entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes) or "of whole groups"
        raise _wrong_form(entry, dtypes, wanted, why)


def require_matrix(
    entry: StoredTensor, dtypes: Collection[str], why: str, stack: bool = False
) -> None:
    """Raises SPK142 unless a part is a matrix (or a stack of them) of one of the dtypes."""
    ranked = len(entry.shape) == 2 or (stack and len(entry.shape) > 2)
    if entry.dtype not in dtypes or not ranked or not all(entry.shape):
        raise _wrong_form(entry, dtypes, "[rows, columns]", why)


def _wrong_form(entry: StoredTensor, dtypes: Collection[str], wanted: str, why: str) -> SpikeError:
    return SpikeError(
        "SPK142",
        "checkpoint",
        f"{entry.name} is {entry.dtype} {list(entry.shape)}, but must be {' or '.join(dtypes)} "
        f"{wanted} ({why}).",
        "The tensors and the quantisation settings in config.json belong to different checkpoints: "
        "get them together again.",
    )


def split_leaf(name: str, leaves: Collection[str]) -> tuple[str, str] | None:
    """``("a.b.weight", "scales")`` for ``a.b.scales``, if its last part is one of `leaves`."""
    module, dot, leaf = name.rpartition(".")
    return (f"{module}.weight", leaf) if dot and leaf in leaves else None
