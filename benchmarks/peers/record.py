"""The raw figures of a comparison, in a JSON file that a later run goes on with.

    {"machine": {...}, "settings": {...},
     "models": {MODEL: {
        "sides": {SIDE: {"stamp", "versions", "cache", "disk MB"} or {"why": ...}},
        "rounds": [{"run", "when", "stream GB/s", "foreign", "figures": {SIDE: {NAME: value}},
                    "failed": {SIDE: why}}],
        "fidelity": {SIDE: {...}}}}}

A round is one run (such as a prompt of 512 tokens) by every side in turn. It is written whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Share of the machine that other programs may have had during a round that counts.
QUIET = 0.1
Json = dict[str, Any]


class Record:
    """The file and its contents.

    Args:
        path: JSON file; read if it is there.
        machine: what is measured on.
        settings: what must be equal for rounds to be comparable.

    Raises:
        SystemExit: the file comes from another machine or other settings.
    """

    def __init__(self, path: Path, machine: Json, settings: Json) -> None:
        self.path = path
        self.data: Json = {"machine": machine, "settings": settings, "models": {}}
        if path.is_file():
            self.data = json.loads(path.read_text())
            for name, now in (("machine", machine), ("settings", settings)):
                if self.data[name] != now:
                    raise SystemExit(
                        f"{path}: {name} was {self.data[name]}, is {now}. Give another --json."
                    )

    def save(self) -> None:
        """Replace the file at once."""
        work = self.path.with_suffix(".part")
        work.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(work, self.path)

    def model(self, name: str) -> Json:
        """The part about one model."""
        empty: Json = {"sides": {}, "rounds": [], "fidelity": {}}
        part: Json = self.data["models"].setdefault(name, empty)
        return part

    def describe(self, model: str, side: str, facts: Json) -> None:
        """Note what a side runs.

        Raises:
            SystemExit: rounds were measured with something else.
        """
        known = self.model(model)["sides"]
        before = known.get(side, {}).get("stamp")
        if before and facts.get("stamp") != before and self.measured(model, side):
            raise SystemExit(
                f"{self.path}: {model}, {side}: measured with {known[side]['versions']}; model or "
                f"program have changed since ({facts.get('versions', facts.get('why'))}). "
                "Give another --json."
            )
        known[side] = facts

    def measured(self, model: str, side: str) -> bool:
        """Whether anything of the side is in the file."""
        part = self.model(model)
        return side in part["fidelity"] or any(side in r["figures"] for r in part["rounds"])

    def rounds(self, model: str, run: str, sides: list[str]) -> list[Json]:
        """Rounds of a run that count: a quiet machine, and every one of `sides` took part."""
        return [
            found
            for found in self.model(model)["rounds"]
            if found["run"] == run
            and found["foreign"] <= QUIET
            and all(side in found["figures"] or side in found["failed"] for side in sides)
        ]
