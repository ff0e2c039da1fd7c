"""Streaming text equals decoding everything at once, for the kinds of decoders models use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spikeinfer.runtime.detokenizer import REPLACEMENT
from spikeinfer.runtime.text_codec import TextCodec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEXTS = st.text(st.sampled_from("ab é€😀 ▁\n日"), max_size=20)


def byte_level() -> TextCodec:
    """As GPT-2, Llama 3, SmolLM2: every byte is a letter, merges may end inside a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    grinning = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("😀")[0][0]
    half, rest = grinning[:2], grinning[2:]
    vocab = {letter: i for i, letter in enumerate([*letters, half, "ab", f"a{half}"])}
    merges = [(half[0], half[1]), ("a", "b"), ("a", half)]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert rest
    return with_special(tokenizer)


def byte_fallback(strip: bool) -> TextCodec:
    """As Llama 2 and Mistral (strip) or Gemma: ▁ for a space, unknown characters as bytes."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁▁", "ab", "é"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if strip else "never")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return with_special(tokenizer)


def metaspace() -> TextCodec:
    """As T5-like Unigram models: the decoder itself drops the first space."""
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", "a", "b", "▁a", "é", "€", "日"])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return with_special(tokenizer)


def with_special(tokenizer: Tokenizer) -> TextCodec:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return TextCodec(tokenizer, {"eos_token": "<|end|>"})


CODECS = {
    "byte level": byte_level(),
    "byte fallback, strip": byte_fallback(strip=True),
    "byte fallback": byte_fallback(strip=False),
    "metaspace": metaspace(),
}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


def stream(codec: TextCodec, ids: list[int], context: list[int] | tuple[()] = ()) -> list[str]:
    detokenizer = codec.detokenizer(context)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@each_codec
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_sum_up_to_the_decoded_whole(codec: TextCodec, data: st.DataObject) -> None:
    """Any ids, also ones no text would give: models write those."""
    size = codec._tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=24))
    assert "".join(stream(codec, ids)) == codec.decode(ids)


@each_codec
@given(text=TEXTS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_continuation_keeps_its_spaces(codec: TextCodec, text: str, data: st.DataObject) -> None:
    ids = codec.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    before = codec.decode(ids[:cut])
    if before.endswith(REPLACEMENT) or not before or (cut and ids[cut - 1] in codec.byte_ids):
        return  # no text to continue, or one that ends inside a character
    whole = codec.decode(ids)
    assert before + "".join(stream(codec, ids[cut:], ids[:cut])) == whole


@each_codec
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_piece_shows_half_a_character(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    if REPLACEMENT in codec.decode(ids):
        return
    assert not any(REPLACEMENT in piece for piece in stream(codec, ids))


def test_whole_characters_are_not_held_back() -> None:
    codec = CODECS["byte level"]
    pieces = stream(codec, codec.encode("ab b"))
    assert pieces == ["ab", " ", "b", ""]


def test_special_tokens_have_no_text_and_added_ones_do() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("a<|end|>b<tool>a")
    assert "".join(stream(codec, ids)) == "ab<tool>a"
    assert codec.eos_ids == {codec._tokenizer.token_to_id("<|end|>")}
