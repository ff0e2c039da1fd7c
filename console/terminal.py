"""Where output goes: answers to stdout, all else to stderr; JSON on stdout with `--json`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class LogLevel(StrEnum):
    """How much stderr says: errors only, warnings too, progress too, tracebacks too."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


@dataclass(frozen=True)
class Terminal:
    """What the user asked to see.

    Attributes:
        json: machine-readable output.
        level: how much stderr says.
    """

    json: bool = False
    level: LogLevel = LogLevel.INFO

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """From raw arguments: errors must find their form even where parsing them fails."""
        asked = list(words[: words.index("--")] if "--" in words else words)
        levels = [w.partition("=")[2] for w in asked if w.startswith("--log-level=")]
        levels += [b for a, b in itertools.pairwise(asked) if a == "--log-level"]
        known = [LogLevel(level) for level in levels if level in list(LogLevel)]
        return cls("--json" in asked, known[-1] if known else LogLevel.INFO)

    def answer(self, text: str, data: object) -> None:
        """What a command was asked for: text for a person or one JSON document."""
        if self.json:
            write_json(data, indent=2)
        elif text:
            print(text, flush=True)

    def event(self, name: str, /, **values: object) -> None:
        """One JSON line with `--json`; nothing otherwise."""
        if self.json:
            write_json({"event": name, **values})

    def say(self, text: str) -> None:
        """A line on stderr for a person; none with `--json` or below level info."""
        if not self.json and self.level in (LogLevel.INFO, LogLevel.DEBUG):
            print(text, file=sys.stderr, flush=True)

    def fail(self, block: str, data: Mapping[str, object]) -> None:
        """An error on stderr: a block of text, or one JSON line."""
        text = json.dumps({"event": "error", **data}, ensure_ascii=False) if self.json else block
        print(text, file=sys.stderr, flush=True)


def write_json(data: object, indent: int | None = None) -> None:
    """JSON on stdout, flushed, so that a reader of events sees each at once."""
    print(json.dumps(data, ensure_ascii=False, indent=indent, default=str), flush=True)
