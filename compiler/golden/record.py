"""Record a golden set from a source checkpoint: its greedy tokens and a digest of its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import SpikeError
from .metrics import split_log_sum_exp
from .reference import Rebuilt, Reference
from .sets import Float32, GoldenPrompt, GoldenSet, Ids


@dataclass(frozen=True)
class Prompt:
    """What to record.

    Attributes:
        name: unique in the set; letters, digits, dash.
        text: tokenised with the checkpoint's tokenizer, special tokens added; or
        tokens: ids, for checkpoints without tokenizer files.
        greedy: how many tokens to continue (fewer at an end-of-sequence token).
        first: first recorded position; for long prompts of which only the end is of interest.
    """

    name: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    greedy: int = 32
    first: int = 0


def record(
    directory: Path,
    prompts: Sequence[Prompt],
    name: str,
    top_k: int = 64,
    probes: int = 16,
    rebuilt: Rebuilt | None = None,
) -> GoldenSet:
    """Run the source (float32, eager) over the prompts and keep what a check needs.

    Args:
        directory: checkpoint directory.
        prompts: what to run.
        name: of the set, and of its files.
        top_k: kept tokens per position.
        probes: how many fixed vocabulary ids have their logits kept at every position.
        rebuilt: how to make the source's model, if transformers can't open the directory.
    """
    with Reference.load(directory, rebuilt) as reference:
        width = reference.vocab_size
        probe_ids = probe_tokens(width, probes)
        recorded = tuple(
            _record_one(reference, prompt, min(top_k, width - 1), probe_ids) for prompt in prompts
        )
        return GoldenSet(name, width, probe_ids, recorded, reference.provenance())


def probe_tokens(vocab_size: int, count: int) -> Ids:
    """Distinct ids spread over the vocabulary by a fixed draw: the same for every set of a size.

    They make a shift or a dropped soft-cap visible on tokens that are unlikely everywhere.
    """
    raw = np.random.PCG64(0).random_raw(count).astype(np.uint64)
    width = vocab_size // count
    starts = np.arange(count, dtype=np.uint64) * np.uint64(width)
    return np.asarray(starts + raw % np.uint64(max(width, 1)), dtype=np.int32)


def _record_one(reference: Reference, prompt: Prompt, top_k: int, probe_ids: Ids) -> GoldenPrompt:
    """Greedy continuation, then one teacher-forced run over all of it."""
    tokens = list(prompt.tokens) or tokenize(reference.directory, prompt.text)
    greedy = reference.greedy(tokens, prompt.greedy)
    logits = reference.score(tokens + greedy)
    return digest(prompt, tokens, greedy, logits, top_k, probe_ids)


def digest(
    prompt: Prompt,
    tokens: list[int],
    greedy: list[int],
    logits: Float32,
    top_k: int,
    probe_ids: Ids,
) -> GoldenPrompt:
    """Keep of logits float32 ``[T, V]`` what `GoldenPrompt` describes."""
    rows = logits[prompt.first :]
    top_ids = likeliest(rows, top_k)
    following = np.asarray((tokens + greedy)[prompt.first + 1 :], dtype=np.int64)
    return GoldenPrompt(
        name=prompt.name,
        text=prompt.text,
        tokens=tuple(tokens),
        greedy=tuple(greedy),
        first=prompt.first,
        top_ids=top_ids,
        top_logits=np.take_along_axis(rows, top_ids.astype(np.int64), axis=-1),
        probe_logits=np.ascontiguousarray(rows[:, probe_ids]),
        next_logits=rows[np.arange(following.size), following],
        lse=split_log_sum_exp(rows, top_ids),
    )


def likeliest(logits: Float32, count: int) -> Ids:
    """Int32 ``[N, count]``: ids of the largest logits of each row, largest first, ties by id."""
    kept = np.sort(np.argpartition(-logits, count - 1, axis=-1)[:, :count], axis=-1)
    order = np.argsort(-np.take_along_axis(logits, kept, axis=-1), axis=-1, kind="stable")
    return np.asarray(np.take_along_axis(kept, order, axis=-1), dtype=np.int32)


def tokenize(directory: Path, text: str, special: bool = True) -> list[int]:
    """Ids of a text by the checkpoint's own `tokenizer.json`, with the special tokens it adds."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise SpikeError(
            "SPK547",
            "golden",
            f"{directory} has no tokenizer.json, so a text can't be recorded.",
            "Give the prompt as token ids.",
        )
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(path)).encode(text, add_special_tokens=special).ids)


def random_tokens(vocab_size: int, count: int, seed: str) -> tuple[int, ...]:
    """Ids by a fixed draw, for checkpoints without tokenizer."""
    key = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "little")
    raw = np.random.PCG64(key).random_raw(count).astype(np.uint64)
    return tuple(int(value) for value in raw % np.uint64(vocab_size))
