"""What llama.cpp's own converter makes of small random models is read back as the same models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.gguf.checkpoint import GgufCheckpoint
from transformers import AutoConfig, AutoModelForCausalLM

PEER = Path(__file__).resolve().parents[2] / ".cache" / "peers" / "llama_cpp"
SOURCE = next(PEER.glob("llama_cpp_python-*/vendor/llama.cpp"), None)
pytestmark = pytest.mark.skipif(SOURCE is None, reason="llama.cpp's sources aren't in .cache/peers")

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 160,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
GEMMA = {**SMALL, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "llama-wide-heads": ("llama", {**SMALL, "head_dim": 32, "attention_bias": True}),
    "llama-3": ("llama", {**SMALL, "rope_parameters": LLAMA3}),
    "llama-tied": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", SMALL),
    "qwen2-yarn": ("qwen2", {**SMALL, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 32}),
    "qwen2-moe": ("qwen2_moe", {**SMALL, **MOE, "shared_expert_intermediate_size": 80}),
    "qwen3-moe": ("qwen3_moe", {**SMALL, **MOE, "head_dim": 32, "norm_topk_prob": True}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_ctx": 128,
                      "n_positions": 128}),
    "starcoder2": ("starcoder2", {**SMALL, "sliding_window": None}),
}  # fmt: skip

CONVERTER = """
import sys
source, directory, out = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]
import conversion.base as base, convert_hf_to_gguf
def everything(cls):
    return [cls, *(c for child in cls.__subclasses__() for c in everything(child))]
original = base.ModelBase.__init__
def without_vocabulary(self, *arguments, **options):
    for cls in everything(base.TextModel):
        if "set_vocab" in vars(cls):
            cls.set_vocab = base.TextModel._set_vocab_none
    original(self, *arguments, **options)
base.ModelBase.__init__ = without_vocabulary
sys.argv = ["convert_hf_to_gguf.py", directory, "--outfile", out, "--outtype", "f32"]
convert_hf_to_gguf.main()
"""
UNSTATED = {
    # what GGUF doesn't say, and what no inference needs
    *("_name_or_path", "architectures", "dtype", "transformers_version", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "n_ctx"),
    *("max_window_layers", "router_aux_loss_coef", "output_router_logits"),
    *("embedding_dropout", "residual_dropout"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_read_back(name: str, tmp_path: Path) -> None:
    model_type, sizes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    directory = tmp_path / "hf"
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    made.save_pretrained(directory)
    page = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**page, **sizes}))
    if model_type == "gemma3_text":  # its converter counts the vocabulary
        words = {"vocab": {str(i): i for i in range(sizes["vocab_size"])}}
        (directory / "tokenizer.json").write_text(json.dumps({"model": words, "added_tokens": []}))
    file = tmp_path / "model.gguf"
    command = [sys.executable, "-c", CONVERTER, str(SOURCE), str(directory), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

    theirs, ours = Checkpoint.open(directory), GgufCheckpoint.open(file)
    expected, found = theirs.config.to_dict(), ours.config.to_dict()
    assert {
        key: (found.get(key), expected.get(key))
        for key in {*expected, *found} - UNSTATED
        if found.get(key) != expected.get(key)
    } == {}
    assert ours.parameters.keys() == theirs.parameters.keys()
    for parameter in theirs.parameters:
        # a norm came back from 1 + weight
        tolerance = 2**-22 if parameter.endswith("norm.weight") else 0.0
        torch.testing.assert_close(
            ours.load(parameter), theirs.load(parameter), rtol=0, atol=tolerance
        )
