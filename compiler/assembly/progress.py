"""How a build tells what it is doing. The default says nothing; the command line shows it."""

from __future__ import annotations


class Progress:
    """Receives phases in order; subclass to show them."""

    def phase(self, name: str, total: int = 0, unit: str = "") -> None:
        """A phase begins; `total` units of work are known beforehand, or 0."""

    def advance(self, amount: int) -> None:
        """Work of the current phase that was done since the last call."""

    def finish(self) -> None:
        """The current phase is over, before the next one begins."""

    def note(self, message: str) -> None:
        """A sentence the user may want to read; not an error."""
