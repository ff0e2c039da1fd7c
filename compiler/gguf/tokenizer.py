"""tokenizer.json, tokenizer_config.json and the chat template, from a GGUF file's metadata.

transformers builds the tokenizer from the vocabulary; what it doesn't know is added here: the
pre-tokenizer of SmolLM (it falls back to GPT-2's) and the template that adds the first token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
)

from ...errors import SpikeError
from ..frontend.model_config import quiet_transformers
from .reader import Value

PREFIX = "tokenizer."
GPT2_SPLIT = ("gpt-2", "default", "mpt", "olmo", "jais", "trillion", "granite-docling")
"""Pre-tokenizers of the regular expression that ByteLevel has built in."""
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""The same after every digit was split off."""
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


def write_tokenizer(
    path: Path, architecture: str, metadata: Mapping[str, Value], into: Path
) -> None:
    """Writes the files into `into`; nothing if the file holds no vocabulary.

    Raises: SPK138 if no tokenizer can be made of it.
    """
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return
    fields = {
        name: _plain(metadata[PREFIX + key])
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if PREFIX + key in metadata
    }
    _require_pre_tokenizer(path, fields)
    try:
        with quiet_transformers():
            made, _ = convert_gguf_tokenizer(architecture, fields)
        _finish(made, metadata)
    except Exception as error:  # the libraries raise bare exceptions for every cause
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise _unusable(path, cause) from error
    made.save(str(into / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {name: token for name in SPECIAL if (token := _special(metadata, name))}
    (into / "tokenizer_config.json").write_text(json.dumps(settings, sort_keys=True))
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (into / "chat_template.jinja").write_text(template, encoding="utf-8")


def _plain(value: Value) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _require_pre_tokenizer(path: Path, fields: Mapping[str, Any]) -> None:
    """A pre-tokenizer that is guessed splits text otherwise than the model was trained on."""
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *GPT2_SPLIT, *DIGITS}
    pre = fields.get("pre_tokenizer_type", "default")
    if fields.get("tokenizer_type") == "gpt2" and pre not in known:
        raise _unusable(path, f"its pre-tokenizer {pre!r} is unknown")


def _unusable(path: Path, why: str) -> SpikeError:
    return SpikeError(
        "SPK138",
        "gguf",
        f"no tokenizer can be made of {path}: {why}.",
        "Put the model's own tokenizer.json and tokenizer_config.json beside the file, in a "
        "directory with nothing else.",
    )


def _finish(made: Tokenizer, metadata: Mapping[str, Value]) -> None:
    """Pre-tokenizer of `tokenizer.ggml.pre`, and the first and last token of every text."""
    if metadata.get("tokenizer.ggml.pre") in DIGITS:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    # llama.cpp adds BOS to a sentencepiece vocabulary that does not say otherwise
    spm = metadata.get("tokenizer.ggml.model") == "llama"
    first = _special(metadata, "bos_token") if _adds(metadata, "bos", spm) else None
    last = _special(metadata, "eos_token") if _adds(metadata, "eos", False) else None
    around = [token for token in (first, last) if token]
    single = f"{first or ''} $A:0 {last or ''}".split()
    pair = [*single, *f"{f'{first}:1' if first else ''} $B:1 {f'{last}:1' if last else ''}".split()]
    made.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(token, made.token_to_id(token)) for token in dict.fromkeys(around)],
    )


def _adds(metadata: Mapping[str, Value], which: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.add_{which}_token", default))


def _special(metadata: Mapping[str, Value], name: str) -> str | None:
    """The text of a special token, if the file names one of its vocabulary."""
    number = metadata.get(f"tokenizer.ggml.{SPECIAL[name]}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(number, int) and isinstance(tokens, list) and 0 <= number < len(tokens):
        return tokens[number]
    return None
