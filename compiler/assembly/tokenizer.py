"""tokenizer.json as an engine holds it: the checkpoint's content, in a form that loads faster."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from ...errors import SpikeError


def compact_tokenizer(path: Path) -> bytes:
    """The same tokenizer without white space, its vocabulary sorted, merges as "a b" where plain.

    The `tokenizers` library reads both spellings of merges; strings parse in two thirds of the
    time. Pairs stay where a token itself contains a space. It puts a vocabulary into a B-tree
    before anything else: in order that takes a tenth off reading the file.

    Raises:
        SpikeError: SPK128, the `tokenizers` library cannot read the file.
    """
    try:
        Tokenizer.from_file(str(path))
        content = json.loads(path.read_bytes())
    except Exception as error:  # the library raises bare Exception for every cause
        raise SpikeError(
            "SPK128",
            "checkpoint",
            f"{path} is no tokenizer: {error}.",
            "Download it again, or remove it: the engine then takes token ids only.",
        ) from error
    model = content["model"]
    vocab, merges = model.get("vocab"), model.get("merges")
    if isinstance(merges, list) and all(_plain_pair(merge) for merge in merges):
        model["merges"] = [" ".join(merge) for merge in merges]
    if isinstance(vocab, dict):  # Unigram has a list there, whose order is the ids
        model["vocab"] = dict(sorted(vocab.items(), key=lambda entry: entry[0].encode()))
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _plain_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and not any(" " in part for part in merge)
