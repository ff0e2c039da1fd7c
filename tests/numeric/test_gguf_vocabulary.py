"""Tokenizers into GGUF's keys and back: the same ids, and llama.cpp's names for pre-tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikeinfer.compiler.gguf.reader import Value
from spikeinfer.compiler.gguf.tokenizer import write_tokenizer
from spikeinfer.compiler.gguf.vocabulary import (
    BYTE,
    COMMON_NAMES,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    vocabulary,
)
from spikeinfer.errors import SpikeError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

PROSE = Path(__file__).parents[2] / "compiler" / "golden" / "prose.txt"
TEXTS = ("Hello 2+3  = 5,\n\n  world 12345 naïve — 日本 don't", " a", "", "x <user> y")


def byte_level() -> Tokenizer:
    """A small byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(PROSE)], trainer)
    return made


def sentencepiece() -> Tokenizer:
    """A small BPE of sentencepiece's kind: spaces are letters, unknown letters are bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    trained.train([str(PROSE)], trainer)
    page = json.loads(trained.to_str())
    page["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    page["added_tokens"] = page["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(page))
    made.add_tokens(["<user>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return made


def keys_of(made: Tokenizer, folder: Path, size: int, **settings: str) -> dict[str, Value]:
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocabulary(folder, {}, size)


def back(keys: dict[str, Value], architecture: str, folder: Path) -> Tokenizer:
    folder.mkdir()
    write_tokenizer(Path("x.gguf"), architecture, keys, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def kinds(keys: dict[str, Value]) -> Any:
    return keys["tokenizer.ggml.token_type"]


def test_byte_level_goes_there_and_back(tmp_path: Path) -> None:
    made = byte_level()
    keys = keys_of(made, tmp_path, 410, eos_token="<end>")
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.ggml.eos_token_id"] == made.token_to_id("<end>")
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert kinds(keys)[0] == CONTROL
    assert set(kinds(keys)[1:400]) == {NORMAL}
    assert set(kinds(keys)[400:]) == {UNUSED}
    again = back(keys, "llama", tmp_path / "again")
    for text in (*TEXTS, PROSE.read_text()):
        assert again.encode(text).ids == made.encode(text).ids
    assert np.array_equal(kinds(keys_of(again, tmp_path / "again", 410)), kinds(keys))


def test_sentencepiece_goes_there_and_back(tmp_path: Path) -> None:
    made = sentencepiece()
    keys = keys_of(made, tmp_path, made.get_vocab_size(), bos_token="<s>", unk_token="<unk>")
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_space_prefix"] is False
    assert list(kinds(keys)[:4]) == [UNKNOWN, CONTROL, CONTROL, BYTE]
    assert kinds(keys)[-1] == USER_DEFINED
    again = back(keys, "gemma3", tmp_path / "again")
    for text in (*TEXTS, PROSE.read_text()):
        assert again.encode(text).ids == made.encode(text).ids


@pytest.mark.parametrize("name", [*COMMON_NAMES, "smollm", "gpt-2"])
def test_names_of_pre_tokenizers(name: str, tmp_path: Path) -> None:
    keys = keys_of(byte_level(), tmp_path, 400)
    again = back({**keys, "tokenizer.ggml.pre": name}, "llama", tmp_path / "again")
    assert keys_of(again, tmp_path / "again", 400)["tokenizer.ggml.pre"] == name


def test_an_unknown_pre_tokenizer_is_never_guessed(tmp_path: Path) -> None:
    keys = keys_of(byte_level(), tmp_path, 400)
    with pytest.raises(SpikeError, match=r"SPK138 .* pre-tokenizer 'of-tomorrow' is unknown"):
        back({**keys, "tokenizer.ggml.pre": "of-tomorrow"}, "llama", tmp_path / "again")
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(SpikeError, match=r"SPK592 .* no name for its pre-tokenizer"):
        keys_of(made, tmp_path, 400)


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    keys = keys_of(byte_level(), tmp_path, 400)
    for number, damage in enumerate(({"merges": ["x"]}, {"merges": [1]}, {"tokens": []})):
        worse = keys | {f"tokenizer.ggml.{k}": v for k, v in damage.items()}  # type: ignore[operator]
        with pytest.raises(SpikeError, match="SPK138"):
            back(worse, "llama", tmp_path / str(number))
    with pytest.raises(SpikeError, match=r"SPK592 .* its kind is WordLevel"):
        keys_of(Tokenizer(models.WordLevel({"a": 0}, "a")), tmp_path, 1)


def test_no_tokenizer_is_stated_as_none(tmp_path: Path) -> None:
    assert vocabulary(tmp_path, {}, 9) == {"tokenizer.ggml.model": "none"}
    write_tokenizer(Path("x.gguf"), "llama", {"tokenizer.ggml.model": "none"}, tmp_path)
    assert list(tmp_path.iterdir()) == []
