"""Records the golden sets that this repository ships, into `golden/`.

    python benchmarks/record_golden.py [NAME ...] [--out golden]

Sets: the two real development checkpoints (short prompts of several kinds; for Gemma one that
crosses its sliding window of 512) and the four tiny random ones (48 tokens, across every boundary).
Made again with other library versions, `spike golden diff` says what moved.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import models
from spikeinfer.compiler.golden import Prompt, record
from spikeinfer.compiler.golden.gate import PROSE
from spikeinfer.compiler.golden.record import random_tokens, tokenize

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {
    "fact": "The capital of France is",
    "count": "One, two, three, four, five, six,",
    "explain": "A hash table stores its entries in buckets. To find a key, the program first",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "list": "Three ways to make a slow program faster:\n1.",
    "unicode": "Der Zug nach Zürich fährt um 7:45 Uhr. « Où est la gare ? » 東京 →",
}
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)


def real_prompts(name: str, directory: Path) -> list[Prompt]:
    """Short texts; chat turns where the model has a template; one long text for a window."""
    prompts = [Prompt(key, text=text, greedy=40) for key, text in TEXTS.items()]
    if name == "smollm2":
        questions = {"chat-capital": "What is the capital of France?", "chat-sum": "What is 2 + 3?"}
        prompts += [Prompt(k, text=CHAT.format(question=q)) for k, q in questions.items()]
        return prompts
    length = 560
    tokens = tuple(tokenize(directory, PROSE.read_text(encoding="utf-8"))[:length])
    return [*prompts, Prompt("window", tokens=tokens, greedy=24, first=length - 72)]


def tiny_prompts(name: str, vocab_size: int) -> list[Prompt]:
    """Two prompts of 48 tokens and one of a single token, 16 more each (64 positions at most)."""
    long = [Prompt(k, tokens=random_tokens(vocab_size, 48, f"{name}/{k}"), greedy=16) for k in "ab"]
    return [*long, Prompt("one", tokens=random_tokens(vocab_size, 1, f"{name}/one"), greedy=16)]


def make(name: str, out: Path) -> Path:
    """Record the set of one model."""
    directory = models.ready(name)
    if name in models.PACKAGED:
        golden = record(directory, real_prompts(name, directory), models.PACKAGED[name].directory)
    else:
        from random_models import RANDOM

        prompts = tiny_prompts(name, int(RANDOM[name].config["vocab_size"]))
        golden = record(directory, prompts, name)
    return golden.save(out)


def main() -> None:
    """Parse arguments, record each set."""
    names = [*models.PACKAGED, "tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-gpt2"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=ROOT / "golden")
    arguments = parser.parse_args()
    for name in arguments.name or names:
        print(make(name, arguments.out), flush=True)


if __name__ == "__main__":
    main()
