"""Prints the shell commands of a Markdown page's ```console blocks (lines that start with $)."""

from __future__ import annotations

import sys
from pathlib import Path


def commands(page: str) -> list[str]:
    """Lines behind `$ ` inside ```console fences, in order."""
    found, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line.strip() == "```console"
        elif inside and line.startswith("$ "):
            found.append(line[2:])
    return found


if __name__ == "__main__":
    print("\n".join(commands(Path(sys.argv[1]).read_text(encoding="utf-8"))))
