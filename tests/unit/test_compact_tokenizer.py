"""A compacted tokenizer.json is the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spikeinfer.compiler.assembly.tokenizer import compact_tokenizer
from spikeinfer.errors import SpikeError
from tokenizers import Tokenizer, models, pre_tokenizers

TEXT = "low lower lowest — 日本 low\n\n  low"


def _tokenizer(spaced: bool) -> Tokenizer:
    vocab = {"l": 0, "o": 1, "w": 2, "lo": 3, "low": 4, " ": 5, "é": 6, "e": 7}
    merges = [("l", "o"), ("lo", "w")]
    if spaced:
        vocab[" low"] = 8
        merges.append((" ", "low"))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    if not spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("spaced", [False, True])
def test_it_is_smaller_and_gives_the_same_ids(tmp_path: Path, spaced: bool) -> None:
    path = tmp_path / "tokenizer.json"
    _tokenizer(spaced).save(str(path), pretty=True)
    compact = compact_tokenizer(path)
    assert len(compact) < path.stat().st_size
    model = json.loads(compact)["model"]
    assert model["merges"][0] == (["l", "o"] if spaced else "l o")
    assert list(model["vocab"]) == sorted(model["vocab"], key=str.encode)
    before, after = Tokenizer.from_file(str(path)), Tokenizer.from_str(compact.decode())
    assert after.to_str() == before.to_str()
    assert after.encode(TEXT).ids == before.encode(TEXT).ids


def test_a_vocabulary_whose_order_is_the_ids_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    pieces = [("<unk>", 0.0), ("lower", -1.0), ("low", -2.0)]
    Tokenizer(models.Unigram(pieces, unk_id=0)).save(str(path), pretty=True)
    after = Tokenizer.from_str(compact_tokenizer(path).decode())
    assert after.to_str() == Tokenizer.from_file(str(path)).to_str()
    assert after.encode("lowerlow").ids == [1, 2]


@pytest.mark.parametrize("content", [b"{not json", b"{}", b"\xff"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(SpikeError, match=r"SPK128 .*is no tokenizer"):
        compact_tokenizer(path)
