"""Random checkpoints: four tiny ones with every boundary shrunk, and one of Llama-3.2-1B's shape.

The weights are a function of (seed, tensor name, shape) alone: raw PCG64 bits (a stream that numpy
keeps stable) summed as integers, so no library version, platform or thread count changes a byte.
The shapes are picked so that a 48-token prompt crosses what matters: sliding windows of 16, an
original context of 16 under llama3 rope scaling, 64 learned positions. Widths mix multiples of 256
and of 32, so that every storage format occurs. Soft-caps are low enough that dropping one shows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

# Standard deviation of a sum of four integers uniform on [0, 2**16).
RAW_STD = 65536.0 * float(np.sqrt(4.0 / 12.0))
RAW_MEAN = 2.0 * 65535.0
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class RandomModel:
    """A checkpoint made from a config and a seed.

    Attributes:
        directory: name of the checkpoint directory.
        config: what `AutoConfig.for_model` takes.
        weights_sha256: of `model.safetensors`.
        matrix_std: standard deviation of matrices times sqrt(fan in), or absolute when `absolute`.
        embedding_std: of embeddings; large enough that logits spread over several nats.
        final_norm: what the last norm's scale is near, when not its neutral value.
        absolute: `matrix_std` is not scaled by the fan in.
        dtype: stored dtype.
        tokenizer: also write a byte-level tokenizer with a chat template.
    """

    directory: str
    config: dict[str, Any]
    weights_sha256: str
    matrix_std: float = 2.0
    embedding_std: float = 0.4
    final_norm: float | None = None
    absolute: bool = False
    dtype: torch.dtype = torch.float32
    tokenizer: bool = False


RANDOM = {
    "tiny-llama": RandomModel(
        directory="tiny-llama",
        config={
            "model_type": "llama",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "tie_word_embeddings": False,
            "bos_token_id": 256,
            "eos_token_id": 257,
        },
        weights_sha256="2250937cc1c36a55748afd7ca23ff5a6908de4b663a865d7b6c5616e415a19b6",
        tokenizer=True,
    ),
    "tiny-qwen3": RandomModel(
        directory="tiny-qwen3",
        config={
            "model_type": "qwen3",
            "vocab_size": 384,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
        weights_sha256="f3cd6f79a5fda694808d0d9892ce3a78a746a920f7732763e73cb638f5a9629a",
    ),
    "tiny-gemma3": RandomModel(
        directory="tiny-gemma3",
        config={
            "model_type": "gemma3_text",
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "query_pre_attn_scalar": 48,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        weights_sha256="1cfaff25a7e3d843de8792ae68a97b79c26fbdefe9badeb51e9a7314fc1d5810",
        embedding_std=0.05,
        final_norm=7.0,
    ),
    "tiny-gpt2": RandomModel(
        directory="tiny-gpt2",
        config={
            "model_type": "gpt2",
            "vocab_size": 300,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        weights_sha256="cbbf579af0cdac3115348431c326957599b1501ef326af596a3e265be8bbcd78",
    ),
    "random-1b": RandomModel(
        directory="random-1b",
        config={
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        weights_sha256="860b103f48d62696528cae522a8e434c1f3a6c8c6c00eddceed48707ed276a25",
        matrix_std=0.02,
        embedding_std=0.02,
        absolute=True,
        dtype=torch.bfloat16,
    ),
}


def near_normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of mean 0 and deviation 1, from raw PCG64 bits, the same everywhere.

    Each value is the sum of the four 16-bit quarters of one 64-bit draw (Irwin-Hall of order 4).
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    raw = np.random.PCG64(key).random_raw(int(np.prod(shape)))
    total = sum((raw >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
    values = (np.asarray(total).astype(np.float64) - RAW_MEAN) / RAW_STD
    return np.asarray(values.reshape(shape), dtype=np.float32)


def weight(model: RandomModel, name: str, like: torch.Tensor, base: float) -> torch.Tensor:
    """One tensor: matrices scaled by fan in, norms near their neutral value, small biases."""
    values = near_normal(0, name, tuple(like.shape))
    if like.ndim == 1:
        scale = 0.1 if name.endswith("weight") else 0.05
        values = values * np.float32(scale) + np.float32(base)
    elif "embed" in name or "lm_head" in name or ".wte." in name or ".wpe." in name:
        values = values * np.float32(model.embedding_std)
    else:
        fan = 1.0 if model.absolute else float(np.sqrt(min(like.shape)))
        values = values * np.float32(model.matrix_std / fan)
    return torch.from_numpy(values).to(model.dtype)


def neutral(model: RandomModel, name: str, module: torch.nn.Module) -> float:
    """What a vector is near: norm scales act as 1 (Gemma stores them minus 1), the rest as 0."""
    if name == "model.norm.weight" and model.final_norm is not None:
        return model.final_norm
    owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
    is_scale = name.endswith("weight") and "Norm" in owner
    return 1.0 if is_scale and not owner.startswith("Gemma") else 0.0


def fill(model: RandomModel, out: Path) -> None:
    """Write the checkpoint files into the empty directory `out`."""
    values = dict(model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    tied = set(module.all_tied_weights_keys)
    tensors = {
        name: weight(model, name, parameter, neutral(model, name, module))
        for name, parameter in module.state_dict().items()
        if name not in tied
    }
    path = out / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)
    stated = config.to_diff_dict()
    stated["architectures"] = [type(module).__name__]
    stated["dtype"] = str(model.dtype).removeprefix("torch.")
    text = json.dumps(stated, indent=2, sort_keys=True)
    (out / "config.json").write_text(text + "\n")
    if model.tokenizer:
        write_byte_tokenizer(out)


def write_byte_tokenizer(out: Path) -> None:
    """One token per byte (ids 0-255), then the special tokens; with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)


def generate(
    model: RandomModel,
    root: Path,
    publish: Callable[[Path, Callable[[Path], None]], Path],
    require_hash: Callable[[Path, str], None],
) -> Path:
    """The checkpoint directory, generated if it isn't there, hash-checked."""
    directory = root / model.directory
    if not directory.is_dir():
        publish(directory, lambda out: fill(model, out))
    require_hash(directory / "model.safetensors", model.weights_sha256)
    return directory
