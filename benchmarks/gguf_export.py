"""An engine and its GGUF export in llama.cpp: the same greedy tokens, and the same ids of texts.

    python benchmarks/gguf_export.py ENGINE FILE.gguf [--tokens 48] [--out TABLE.md]

The engine continues every prompt greedily; llama.cpp then reads prompt and continuation, and its
likeliest token is compared at every position. The two compute with different roundings of
activations, so where llama.cpp's first two tokens are nearly equal a flip means nothing: every
flip is listed with that margin.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peers_llama_cpp
from spikeinfer import SpikeEngine
from worker import Worker

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at",
    "Il était une fois",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of motion are",
    "SELECT name FROM users WHERE",
)
TEXTS = (
    *PROMPTS,
    "Hello 2+3  = 5,\n\n  world 12345 naïve — 日本 don't",
    "   leading and trailing   \t\ttabs ",
    "price: $1,234.56 (50%) e-mail@example.org https://example.org/a?b=c",
)
NEAR_TIE = 0.5
"""Logits; the kernels' rounding of activations moves single logits by up to half of this."""


@dataclass(frozen=True)
class Flip:
    """A position at which the two choose different tokens."""

    prompt: str
    position: int
    margin: float


def compare(engine: SpikeEngine, peer: Worker, prompt: str, count: int) -> tuple[int, list[Flip]]:
    """Tokens compared, and the flips among them."""
    ids = engine.encode(prompt)
    made = list(engine.complete(ids, max_tokens=count, temperature=0.0).token_ids)
    logits = peer.score([*ids, *made][:-1], len(ids) - 1)
    top = np.sort(logits, axis=-1)[:, -2:]
    margins = top[:, 1] - top[:, 0]
    wrong = np.flatnonzero(logits.argmax(axis=-1) != np.array(made))
    return len(made), [Flip(prompt, int(i), float(margins[i])) for i in wrong]


def main() -> None:
    """Compare, print a table, exit with 1 if a flip is no near tie or a text splits otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    peer = peers_llama_cpp.install()
    total, flips, different = 0, [], []
    with SpikeEngine(arguments.engine) as engine, peers_llama_cpp.worker(peer) as worker:
        model = {"model": str(arguments.file), "threads": 1, "context": 512}
        worker.call({"do": "open", **model})
        for prompt in PROMPTS:
            count, found = compare(engine, worker, prompt, arguments.tokens)
            total, flips = total + count, flips + found
        for text in TEXTS:
            if worker.call({"do": "tokenize", "text": text})["ids"] != engine.encode(text):
                different.append(text)
    rows = [
        "| | |", "|---|---|",
        f"| engine, file | {arguments.engine.name}, {arguments.file.name} |",
        f"| llama.cpp | {peer.version()} |",
        f"| prompts, greedy tokens | {len(PROMPTS)}, {total} |",
        f"| other tokens | {len(flips)} |",
        *(f"| {f.prompt!r}, token {f.position} | margin {f.margin:.3f} |" for f in flips),
        f"| texts that split otherwise | {len(different)} of {len(TEXTS)} {different or ''} |",
    ]  # fmt: skip
    table = "\n".join(rows) + "\n"
    print(table)
    if arguments.out:
        arguments.out.write_text(table)
    if different or any(flip.margin > NEAR_TIE for flip in flips):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
