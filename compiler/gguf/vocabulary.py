"""An engine's tokenizer as GGUF's `tokenizer.*` keys: the reverse of `tokenizer.py`.

Two kinds exist in both worlds: byte-level BPE ("gpt2"), told apart by the regular expression that
splits text, and sentencepiece's BPE ("llama"). llama.cpp merges the latter by the score of the
result, so a token's score is the rank of the first merge that makes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from ...errors import ExitCode, SpikeError
from .reader import Value

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""`llama_token_type`."""
SPACE = "\u2581"
UNRANKED = -1e6
"""Score of a token that no merge makes."""
COMMON_NAMES = ("llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35")
"""Of the pre-tokenizers with equal expressions, the ones to write."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def vocabulary(directory: Path, config: Mapping[str, Any], size: int) -> dict[str, Value]:
    """All `tokenizer.*` keys.

    Args:
        directory: of the engine: tokenizer.json, tokenizer_config.json, chat_template.jinja.
        config: of the source, for ids of special tokens.
        size: rows of the embedding; missing tokens are filled up, those beyond are dropped.

    Raises: SPK592 for a tokenizer that llama.cpp has no kind for.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {"tokenizer.ggml.model": "none"}
    page = json.loads(path.read_bytes())
    if page["model"]["type"] != "BPE":
        raise _unsupported(path, f"its kind is {page['model']['type']}, not BPE")
    sentencepiece = bool(page["model"].get("byte_fallback"))
    keys = _sentencepiece(page) if sentencepiece else _byte_level(path, page)
    tokens, kinds = _tokens(page, size, sentencepiece)
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    if sentencepiece:
        keys["tokenizer.ggml.scores"] = _scores(page, tokens)
    else:
        keys["tokenizer.ggml.merges"] = [" ".join(pair) for pair in _merges(page)]
    keys |= _special_ids(directory, config, tokens) | _around(path)
    template = directory / "chat_template.jinja"
    if template.is_file():
        keys["tokenizer.chat_template"] = template.read_text("utf-8")
    return keys


def _unsupported(path: Path, why: str) -> SpikeError:
    return SpikeError(
        "SPK592",
        "export",
        f"{path} can't be stated in GGUF: {why}.",
        "llama.cpp's own converter may have it; or export an engine without tokenizer files.",
        ExitCode.UNSUPPORTED,
    )


def _byte_level(path: Path, page: Mapping[str, Any]) -> dict[str, Value]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer(path, page["pre_tokenizer"]),
    }


def pre_tokenizer(path: Path, stated: Mapping[str, Any] | None) -> str:
    """llama.cpp's name of a byte-level pre-tokenizer. Raises SPK592 if it has none."""
    parts = (stated or {}).get("pretokenizers", [stated])
    kinds = [part["type"] if part else None for part in parts]
    last = parts[-1] or {}
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        pattern = parts[0]["pattern"].get("Regex")
        names = [name for name, own in GGUF_PRE_TOKENIZER_SPLITS.items() if own == pattern]
        if names:
            return next((name for name in COMMON_NAMES if name in names), names[0])
    raise _unsupported(path, f"llama.cpp has no name for its pre-tokenizer {stated!r:.200}")


def _sentencepiece(page: Mapping[str, Any]) -> dict[str, Value]:
    text = json.dumps([page.get("normalizer"), page.get("pre_tokenizer")])
    prepends = '"Prepend"' in text or '"prepend_scheme": "always"' in text
    prepends = prepends or '"prepend_scheme": "first"' in text
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prepends,
    }


def _tokens(
    page: Mapping[str, Any], size: int, sentencepiece: bool
) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]]:
    """Texts and `llama_token_type`s of all ids below `size`."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = np.full(size, UNUSED, "<i4")
    for token, number in page["model"]["vocab"].items():
        if number < size:
            is_byte = sentencepiece and _BYTE.fullmatch(token)
            unknown = token == page["model"].get("unk_token")
            tokens[number] = token
            if token != f"[PAD{number}]":  # as a GGUF source had filled it up
                kinds[number] = BYTE if is_byte else UNKNOWN if unknown else NORMAL
    for added in page["added_tokens"]:
        number, token = added["id"], added["content"]
        if number < size and kinds[number] != UNKNOWN:
            special = added["special"]
            # llama.cpp looks for these in the text as it was typed
            tokens[number] = token if special or not sentencepiece else token.replace(SPACE, " ")
            kinds[number] = CONTROL if special else USER_DEFINED
    return tokens, kinds


def _merges(page: Mapping[str, Any]) -> list[list[str]]:
    return [m.split(" ") if isinstance(m, str) else m for m in page["model"]["merges"]]


def _scores(page: Mapping[str, Any], tokens: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    rank: dict[str, int] = {}
    for number, pair in enumerate(_merges(page)):
        rank.setdefault("".join(pair), number)
    return np.array([-float(rank[t]) if t in rank else UNRANKED for t in tokens], "<f4")


def _special_ids(directory: Path, config: Mapping[str, Any], tokens: list[str]) -> dict[str, Value]:
    """Ids by tokenizer_config.json, else by the model's configuration."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    number_of = {token: number for number, token in enumerate(tokens)}
    keys: dict[str, Value] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = number_of.get(token) if token else config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            keys[f"tokenizer.ggml.{key}_token_id"] = number
    return keys


def _around(path: Path) -> dict[str, Value]:
    """Whether texts get a first and a last token: tried out."""
    made = Tokenizer.from_file(str(path))
    plain = made.encode("a", add_special_tokens=False).ids
    whole = made.encode("a").ids
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    if not starts or starts[0] > 1 or len(whole) - len(plain) - starts[0] > 1:
        raise _unsupported(path, "it puts more than one token before or after a text")
    return {
        "tokenizer.ggml.add_bos_token": starts[0] == 1,
        "tokenizer.ggml.add_eos_token": len(whole) - len(plain) - starts[0] == 1,
    }
