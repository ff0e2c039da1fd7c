"""The gate of a build: the engine just emitted against its source, recorded on the fly.

Reference and engine are compared sequence by sequence on full logits, nothing is kept: a short
technical text of our own (`prose.txt`, in windows), and one greedy continuation. A checkpoint
without tokenizer is given fixed pseudo-random ids.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .check import GoldenReport, Scorer, largest_difference, scored, summarise
from .metrics import Comparison, compare_full
from .record import random_tokens, tokenize
from .reference import Rebuilt, Reference
from .thresholds import Thresholds

PROSE = Path(__file__).with_name("prose.txt")
CONTINUATION = 32
Progress = Callable[[int, int], None]


def gate(
    checkpoint: Path,
    score: Scorer,
    thresholds: Thresholds,
    decode: Scorer | None = None,
    max_tokens: int = 384,
    window: int = 128,
    max_length: int | None = None,
    progress: Progress | None = None,
    rebuilt: Rebuilt | None = None,
) -> GoldenReport:
    """Compare an engine with transformers running its source in float32.

    Args:
        checkpoint: source directory.
        score: the engine, float32 ``[T, V]`` for T ids.
        thresholds: limits.
        decode: the engine token by token; tried on the greedy sequence only.
        max_tokens: how much text to score.
        window: tokens per scored sequence.
        max_length: the engine's longest sequence; windows are cut to it.
        progress: called with sequences done and in all.
        rebuilt: how to make the source's model, if transformers can't open the directory.

    Raises:
        SpikeError: SPK544 for logits of a wrong shape, SPK545/546 if the source can't run here.
    """
    with Reference.load(checkpoint, rebuilt) as source:
        longest = min(window, source.max_length, max_length or window)
        windows = text_windows(checkpoint, source.vocab_size, max_tokens, longest)
        comparisons: list[Comparison] = []
        for index, tokens in enumerate(windows):
            ours = scored(score, tokens, source.vocab_size)
            comparisons.append(compare_full(f"prose-{index}", tokens, source.score(tokens), ours))
            if progress:
                progress(index + 1, len(windows) + 1)
        prompt = windows[0][: max(longest // 2, 1)]
        tokens = prompt + source.greedy(prompt, min(max(longest - len(prompt), 1), CONTINUATION))
        ours = scored(score, tokens, source.vocab_size)
        theirs = source.score(tokens)
        comparisons.append(compare_full("greedy", tokens, theirs, ours, len(prompt)))
        decode_error = None
        if decode is not None:
            stepped = scored(decode, tokens, source.vocab_size)
            decode_error = largest_difference(ours, stepped)
        if progress:
            progress(len(windows) + 1, len(windows) + 1)
    return summarise("auto", False, comparisons, thresholds, decode_error)


def text_windows(
    checkpoint: Path, vocab_size: int, max_tokens: int, window: int, text: str = ""
) -> list[list[int]]:
    """At least one window of ids; the text's own beginning first, special tokens included.

    Without a text it is the gate's own; without a tokenizer, ids are drawn.
    """
    if not (checkpoint / "tokenizer.json").is_file():
        return [list(random_tokens(vocab_size, min(window, max_tokens), "gate"))]
    text = text or PROSE.read_text(encoding="utf-8")
    ids, plain = tokenize(checkpoint, text), tokenize(checkpoint, text, special=False)
    # A model trained with a first special token wants it in front of every window.
    lead = ids[: max(len(ids) - len(plain), 0)]
    if ids != lead + plain or len(lead) >= window:
        lead, plain = [], ids
    size = window - len(lead)
    pieces = [plain[i : i + size] for i in range(0, min(len(plain), max_tokens), size)]
    return [lead + piece for piece in pieces if len(piece) == size] or [lead + plain]
