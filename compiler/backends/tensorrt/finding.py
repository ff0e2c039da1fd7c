"""What the checker finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One difference between network and graph: where (a value, layer or constant), and what."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"
