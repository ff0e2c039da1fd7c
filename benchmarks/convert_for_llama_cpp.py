"""Runs llama.cpp's own converter on a checkpoint of ours, with the vocabulary given to it.

    python benchmarks/convert_for_llama_cpp.py LLAMA_CPP_SOURCE CHECKPOINT OUT.gguf [f32|bf16]

The tensors are the converter's business alone. Vocabulary is not: it takes Gemma's from a
`tokenizer.model`, which neither GGUF-born checkpoints nor random ones have. Comparisons feed token
ids, so the vocabulary only has to be there, in the right size and kind, for its loading time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# gguf.TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def sentencepiece_vocabulary(model: Any) -> None:
    """Write a `▁` BPE vocabulary of `tokenizer.json` as llama.cpp's SentencePiece kind."""
    page = json.loads((model.dir_model / "tokenizer.json").read_text(encoding="utf-8"))
    kinds = dict.fromkeys(page["model"]["vocab"].values(), NORMAL)
    names = {index: name for name, index in page["model"]["vocab"].items()}
    for item in page["added_tokens"]:
        names[item["id"]] = item["content"]
        kinds[item["id"]] = CONTROL if item["special"] else USER_DEFINED
    for index, name in names.items():
        if len(name) == 6 and name.startswith("<0x"):
            kinds[index] = BYTE
        elif name == page["model"]["unk_token"]:
            kinds[index] = UNKNOWN
    order = sorted(names)
    writer = model.gguf_writer
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names[index].encode() for index in order])
    writer.add_token_scores([-float(index) for index in order])
    writer.add_token_types([kinds[index] for index in order])
    writer.add_add_space_prefix(False)
    config = model.hparams
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def unknown_pre_tokenizer(convert: Any) -> Any:
    """The converter's own choice; for a tokenizer that it doesn't know (one that we trained),
    llama.cpp's default."""

    def choose(model: Any, tokenizer: Any) -> str:
        try:
            return str(convert(model, tokenizer))
        except NotImplementedError:
            return "default"

    return choose


def main() -> None:
    """Import the converter from the source tree, give it the vocabulary, run its own main."""
    source, checkpoint, out, *kind = sys.argv[1:]
    dtype = kind[0] if kind else "f32"
    sys.path.insert(0, source)
    sys.path.insert(1, f"{source}/gguf-py")
    import conversion.base
    import convert_hf_to_gguf
    from conversion.gemma import Gemma3Model

    text_model = conversion.base.TextModel
    text_model.get_vocab_base_pre = unknown_pre_tokenizer(text_model.get_vocab_base_pre)
    Gemma3Model.set_vocab = sentencepiece_vocabulary
    if not (Path(checkpoint) / "tokenizer.json").is_file():
        from conversion.llama import LlamaModel

        LlamaModel.set_vocab = text_model._set_vocab_none
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", dtype]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
