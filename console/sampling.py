"""The sampling flags of `spike run` as keyword arguments of a request, and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import usage
from .tables import table

if TYPE_CHECKING:
    from ..runtime import SpikeEngine, TokenLogprob

FILE = "@"
TEXTS = ("json_schema", "regex", "grammar")


def sampling_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the flags that are sampling options and were given (not None).

    Raises:
        SpikeError: SPK807, a bias that is none or a file that can't be read; SPK608, a value out
            of range: before an engine is loaded for it.
    """
    from ..runtime import SamplingParams

    names = [one.name for one in fields(SamplingParams)]
    options = {name: flags[name] for name in names if flags.get(name) is not None}
    for name in TEXTS:
        if name in options:
            options[name] = text_of(options[name], f"--{name.replace('_', '-')}")
    if "logit_bias" in options:
        options["logit_bias"] = biases(options["logit_bias"])
    SamplingParams(**options)
    return options


def text_of(value: str, flag: str) -> str:
    """The value, or what the file holds that it names: ``@FILE``. SPK807 if that can't be read."""
    if not value.startswith(FILE):
        return value
    try:
        return Path(value[len(FILE) :]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise usage(f"{flag} {value!r} can't be read: {error}.", "Name a text file.") from error


def biases(words: Sequence[str]) -> dict[int, float]:
    """Biases from ``ID=NUMBER`` words, ``-inf`` among the numbers. SPK807 for anything else."""
    try:
        pairs = [word.split("=") for word in words]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        given = " ".join(words)
        raise usage(f"--logit-bias {given!r} is none.", "Give ID=NUMBER: 42=-inf.") from error


def logprobs_table(engine: SpikeEngine, logprobs: Sequence[TokenLogprob]) -> str:
    """A line for each token: how likely it was, its rank, and what was likely beside it."""
    rows = []
    for one in logprobs:
        beside = [f"{token(engine, other)} {value:.3f}" for other, value in one.top]
        rows.append((token(engine, one.token_id), f"{one.logprob:.3f}", one.rank, *beside))
    width = max((len(row) for row in rows), default=3)
    rows = [(*row, *("",) * (width - len(row))) for row in rows]
    return table(["token", "#logprob", "#rank", *("",) * (width - 3)], rows)


def token(engine: SpikeEngine, index: int) -> str:
    """A token as one would type it, or its id where there is no tokenizer."""
    if not engine.has_tokenizer:
        return str(index)
    return repr(engine.decode([index], skip_special_tokens=False))
