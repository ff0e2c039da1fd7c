"""The settings that a quantiser left in a checkpoint, with every value checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import SpikeError


@dataclass(frozen=True)
class Settings:
    """One JSON object of settings.

    Args:
        directory: the checkpoint.
        origin: where they stand, for messages: "`quantization_config` in config.json".
        values: the object.
    """

    directory: Path
    origin: str
    values: Mapping[str, Any]

    def get(self, *names: str) -> Any:
        """The first of several spellings that is there and not null."""
        return next((v for name in names if (v := self.values.get(name)) is not None), None)

    def integer(self, *names: str, default: int | None = None) -> int:
        """A whole number. Raises SPK140 if it is none, or missing without a default."""
        value = self.get(*names)
        value = default if value is None else value
        if type(value) is not int:
            raise self.wrong(names[0], "a whole number")
        return value

    def flag(self, *names: str, default: bool) -> bool:
        """True or false. Raises SPK140 for anything else."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(names[0], "true or false")
        return value

    def word(self, *names: str, default: str) -> str:
        """A name in lower case. Raises SPK140 for anything but a string."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.wrong(names[0], "a name")
        return value.lower()

    def group_size(self, *names: str, default: int | None = None) -> int:
        """Elements that share a scale; -1 for a whole row. Raises SPK140."""
        size = self.integer(*names, default=default)
        if size != -1 and size <= 0:
            raise self.wrong(names[0], "positive, or -1 for whole rows")
        return size

    def one_of(self, value: int, allowed: Sequence[int], name: str) -> int:
        """`value` if it is allowed. Raises SPK140 otherwise."""
        if value not in allowed:
            raise self.wrong(name, f"one of {', '.join(map(str, allowed))}")
        return value

    def part(self, name: str, values: Mapping[str, Any]) -> Settings:
        """An object inside of this one."""
        return Settings(self.directory, f"`{name}` of {self.origin}", values)

    def wrong(self, name: str, should: str) -> SpikeError:
        """SPK140 for a value that can't be used."""
        return SpikeError(
            "SPK140",
            "checkpoint",
            f"`{name}` in {self.origin} of {self.directory} is {self.values.get(name)!r}; it must "
            f"be {should}.",
            "Correct it, or download the file again.",
        )
