"""One model's GGUF files: a file by itself, or all parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...errors import SpikeError
from .reader import GgufFile, TensorEntry, Value

SUFFIX = ".gguf"
MOST_PARTS = 9999
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufModel:
    """The tensors of one or several files, and the metadata of the first.

    Raises (from the constructor): SPK130-133 as `GgufFile`; SPK134 for parts that are missing or
    don't belong together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _parts(path, GgufFile(path))
        self.metadata: Mapping[str, Value] = self.files[0].metadata
        self.home: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self.home:
                    raise _split(path, f"{name} is in {file.path.name} and in another part")
                self.home[name] = file
        stated = self.metadata.get("split.tensors.count")
        if len(self.files) > 1 and stated is not None and stated != len(self.home):
            raise _split(path, f"the parts hold {len(self.home)} tensors, not {stated}")

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Name -> entry, in the files' order."""
        return {name: file.tensors[name] for name, file in self.home.items()}

    def rows(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's logical rows, uint8 [..., row_bytes], read-only over the mapped pages."""
        return self.home[name].rows(name)


def _parts(path: Path, file: GgufFile) -> list[GgufFile]:
    """All files of a split model in order; just the one if it isn't split."""
    count = file.metadata.get("split.count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_PARTS:
        raise _split(path, f"its split.count is {count!r}")
    if count <= 1:
        return [file]
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise _split(path, f"it is one of {count} parts, but isn't called NAME-00001-of-{count:05}")
    names = [f"{match['stem']}-{i:05}-of-{count:05}{SUFFIX}" for i in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise _split(path, f"{len(missing)} of {count} parts are missing, first: {missing[0]}")
    files = [file if n == path.name else GgufFile(path.with_name(n)) for n in names]
    for number, part in enumerate(files):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise _split(path, f"{part.path.name} says that it is another part")
    return files


def _split(path: Path, what: str) -> SpikeError:
    return SpikeError(
        "SPK134",
        "gguf",
        f"{path} can't be put together: {what}.",
        "Download all parts of the model into one directory, with their own names.",
    )
