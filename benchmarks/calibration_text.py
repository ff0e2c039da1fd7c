"""Calibration text for comparisons: prose of Python's language reference, on every machine.

    python benchmarks/calibration_text.py OUT.txt

No paragraph of it is in the text that accuracy is measured on, nor in the golden gate's, and the
small llama isn't trained on it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data import topics

import accuracy
from spikeinfer.compiler.golden.gate import PROSE

SHORTEST = 120
"""Characters of a paragraph."""
LETTERS = 0.9
"""Share of letters and spaces that makes prose; grammar and examples have less."""
OVERLAP = 8
"""Words in a row that calibration and test may not share."""


def paragraphs() -> list[str]:
    """Prose of the reference, in order of topic, each paragraph on one line, none twice."""
    found: dict[str, None] = {}
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].split("\n\n"):
            text = " ".join(paragraph.replace("*", "").split())
            letters = sum(c.isalpha() or c == " " for c in text)
            if len(text) >= SHORTEST and letters >= LETTERS * len(text):
                found.setdefault(text)
    return list(found)


def phrases(text: str) -> set[tuple[str, ...]]:
    """Every OVERLAP words in a row."""
    words = text.lower().split()
    return {tuple(words[i : i + OVERLAP]) for i in range(len(words) - OVERLAP + 1)}


def write(path: Path) -> Path:
    """The text file, made if it isn't there. SystemExit if it shares a phrase with a test text."""
    if not path.is_file():
        text = "\n\n".join(paragraphs()) + "\n"
        own = phrases(text)
        for test in (accuracy.HELD_OUT, PROSE):
            if shared := own & phrases(test.read_text(encoding="utf-8")):
                raise SystemExit(f"{test} and the calibration text share {' '.join(min(shared))!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
