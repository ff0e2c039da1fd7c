"""Text to token ids and back, as the checkpoint's tokenizer does it in transformers.

Reads tokenizer.json with the `tokenizers` library, and from tokenizer_config.json what that file
does not hold: which special token is which. What is put around a plain text (a BOS, usually) is
decided by the post-processor of tokenizer.json; transformers 5, too, then passes over
``add_bos_token`` and ``add_eos_token``. `tests/numeric/test_chat_oracle.py` compares with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import SpikeError
from .detokenizer import StreamingDetokenizer
from .heap import roomy_heap

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"


class TextCodec:
    """A tokenizer and what it says about its special tokens.

    Args:
        tokenizer: the `tokenizers` object; padding and truncation are switched off.
        config: tokenizer_config.json, or an empty mapping.
    """

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.special_tokens = _special_tokens(config)
        self.special_ids = frozenset(
            index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        byte_tokens = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids = frozenset(index for index in byte_tokens if index is not None)

    @classmethod
    def open(cls, directory: Path) -> TextCodec | None:
        """The tokenizer of an engine directory; None when it has no tokenizer.json.

        Raises:
            SpikeError: SPK610, a tokenizer file that can't be read.
        """
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            return None
        try:
            with roomy_heap():
                tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every cause
            raise _unreadable(path, error) from error
        named = read_json(directory / SPECIAL_TOKENS_FILE)
        return cls(tokenizer, {**named, **read_json(directory / TOKENIZER_CONFIG_FILE)})

    @property
    def eos_ids(self) -> frozenset[int]:
        """Id of the tokenizer's own end-of-sequence token, if it names one."""
        name = self.special_tokens.get("eos_token")
        index = self._tokenizer.token_to_id(name) if name else None
        return frozenset() if index is None else frozenset((index,))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with the BOS or EOS that the tokenizer puts around a plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no character become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    def detokenizer(self, context: Sequence[int] = ()) -> StreamingDetokenizer:
        """A streaming decoder for one request; `context` is the text it continues, if any."""
        return StreamingDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            self.special_ids,
            self.byte_ids,
            context,
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file.

    Raises:
        SpikeError: SPK610, not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise _unreadable(path, ValueError("not a JSON object"))
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of the special tokens (``bos_token`` ...); a chat template may use them."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _unreadable(path: Path, error: Exception) -> SpikeError:
    return SpikeError(
        "SPK610",
        "tokenizer",
        f"{path} can't be read: {error}.",
        "Copy the file from the checkpoint again, or build the engine again.",
    )
