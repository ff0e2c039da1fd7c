"""Converts one GGUF file into a Hugging Face checkpoint directory with exactly the same weights.

transformers reads the GGUF (it undoes llama.cpp's q/k interleave and Gemma's `norm + 1`); the
directory is then written by us, because `save_pretrained` refuses a model that came from GGUF.
What its reader leaves wrong is put right here: a leftover `quantization_config`, an RMSNorm epsilon
that went through float32, the pre-tokenizer of `tokenizer.ggml.pre = smollm` (transformers falls
back to GPT-2's), and tokenizer fields that describe the reading rather than the model.

Weights are float32: `scale * quant + min` of a Q4_1 or Q4_K block has up to 24 significant bits,
which neither float16 nor bfloat16 holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

EPSILON_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
READING_FIELDS = ("is_local", "local_files_only", "name_or_path", "extra_special_tokens")


def convert(gguf: Path, out: Path, pre_tokenizer: str) -> None:
    """Write `out/` (must exist): weights, config, generation config, tokenizer, chat template.

    Args:
        gguf: the file to read.
        out: an empty directory.
        pre_tokenizer: ``smollm`` replaces the pre-tokenizer; ``as-read`` keeps transformers' own.
    """
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    write_weights(model, out / "model.safetensors")
    write_configs(model, out)
    write_tokenizer(gguf, out, pre_tokenizer, int(model.config.max_position_embeddings))


def write_weights(model: PreTrainedModel, path: Path) -> None:
    """One safetensors file, float32, tied tensors stored once; same weights, same bytes."""
    tied = set(model.all_tied_weights_keys)
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n not in tied}
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes through a private temporary file


def write_configs(model: PreTrainedModel, out: Path) -> None:
    """`config.json` and `generation_config.json` as the original repository would state them."""
    config: dict[str, Any] = model.config.to_diff_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id"):
        config.pop(name, None)
    for name in EPSILON_FIELDS:
        if name in config:
            config[name] = float(f"{config[name]:.6g}")
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "float32"
    write_json(out / "config.json", config)
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
    write_json(out / "generation_config.json", {k: config[k] for k in kept if k in config})


def write_tokenizer(gguf: Path, out: Path, pre_tokenizer: str, max_length: int) -> None:
    """Tokenizer files; `tokenizer.json` is the authority, so its class is the generic fast one."""
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(out))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    for name in READING_FIELDS:
        settings.pop(name, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["model_max_length"] = max_length
    write_json(out / "tokenizer_config.json", settings)
    if pre_tokenizer == "smollm":
        backend = Tokenizer.from_file(str(out / "tokenizer.json"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        backend.save(str(out / "tokenizer.json"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Sorted, indented, with a final newline: the same bytes every time."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
