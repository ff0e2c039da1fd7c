"""Accuracy of running models against their source: the same token ids to all, teacher forcing.

Windows of 512 tokens, each 256 further into the text; only the second half of a window is scored,
so every scored token has at least 256 tokens of context. The source is transformers in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from spikeinfer.compiler.golden import Reference
from spikeinfer.compiler.golden.metrics import row_metrics
from spikeinfer.compiler.golden.record import tokenize
from spikeinfer.compiler.golden.reference import Rebuilt
from spikeinfer.compiler.golden.sets import Float32, Float64

WINDOW = 512
HELD_OUT = Path(__file__).resolve().parent / "data" / "heldout_prose.txt"
# Token ids and the first wanted position -> logits float32 [T - first, V].
TailScorer = Callable[[list[int], int], Float32]


@dataclass(frozen=True)
class Accuracy:
    """Pooled over all scored positions; KL in nats.

    Attributes:
        positions: scored positions.
        perplexity: of the next tokens.
        mean_kl, p99_kl: KL(source || model).
        top1: share of positions with the source's likeliest token.
    """

    positions: int
    perplexity: float
    mean_kl: float
    p99_kl: float
    top1: float


def windows(checkpoint: Path, text: str) -> list[list[int]]:
    """Overlapping windows of ids, each led by the special token that the tokenizer leads with."""
    ids, plain = tokenize(checkpoint, text), tokenize(checkpoint, text, special=False)
    lead = ids[: len(ids) - len(plain)]
    size = WINDOW - len(lead)
    starts = range(0, len(plain) - size + 1, WINDOW // 2)
    return [lead + plain[start : start + size] for start in starts]


def measure(
    checkpoint: Path,
    models: Mapping[str, TailScorer],
    text: str,
    limit: int | None = None,
    rebuilt: Rebuilt | None = None,
) -> tuple[float, dict[str, Accuracy]]:
    """The source's perplexity, and each model's accuracy.

    Args:
        checkpoint: source directory; its tokenizer reads the text.
        models: name to scorer.
        text: what is scored.
        limit: use only so many windows.
        rebuilt: the source, if it is not what the directory holds.
    """
    kl: dict[str, list[Float64]] = {name: [] for name in models}
    nll: dict[str, list[Float64]] = {name: [] for name in [*models, ""]}
    agree: dict[str, list[Float64]] = {name: [] for name in models}
    first = WINDOW // 2
    with Reference.load(checkpoint, rebuilt) as source:
        for tokens in windows(checkpoint, text)[:limit]:
            truth = source.score(tokens)[first:]
            following = np.asarray(tokens[first + 1 :])
            index = np.arange(following.size)
            for name, scorer in models.items():
                ours = scorer(tokens, first)
                rows = row_metrics(truth, ours)
                kl[name].append(rows.kl)
                agree[name].append((truth.argmax(-1) == ours.argmax(-1)).astype(np.float64))
                nll[name].append(rows.engine_lse[:-1] - ours[index, following])
            own = row_metrics(truth, truth)
            nll[""].append(own.source_lse[:-1] - truth[index, following])
    source_perplexity = float(np.exp(np.concatenate(nll[""]).mean()))
    return source_perplexity, {name: _pool(kl[name], agree[name], nll[name]) for name in models}


def _pool(kl: list[Float64], agree: list[Float64], nll: list[Float64]) -> Accuracy:
    """One figure each over all windows."""
    divergence = np.concatenate(kl)
    return Accuracy(
        positions=int(divergence.size),
        perplexity=float(np.exp(np.concatenate(nll).mean())),
        mean_kl=float(divergence.mean()),
        p99_kl=float(np.quantile(divergence, 0.99)),
        top1=float(np.concatenate(agree).mean()),
    )
