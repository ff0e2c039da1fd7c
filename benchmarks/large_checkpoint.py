"""A checkpoint of an 8B model's shape, random weights, written shard by shard in little memory.

    .venv/bin/python benchmarks/large_checkpoint.py OUT [--layers 32]

Shapes are Llama-3-8B's, dtype bfloat16, about 16 GB. Every tensor is a stretch of one pool of
normal numbers that starts elsewhere for each: quantisers don't care, and it is quickly written.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import torch

HIDDEN, MIDDLE, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128256
STD = 0.02
POOL = 1 << 26
SHARD_BYTES = 4 << 30


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every stored tensor."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (kv, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (kv, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", (MIDDLE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (MIDDLE, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, MIDDLE)
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def config(layers: int) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def shards(layers: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors in files of about SHARD_BYTES."""
    result: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensors(layers):
        size += 2 * math.prod(shape)
        if size > SHARD_BYTES and result[-1]:
            result.append([])
            size = 2 * math.prod(shape)
        result[-1].append((name, shape))
    return result


def write_shard(path: Path, members: list[tuple[str, tuple[int, ...]]], pool: torch.Tensor) -> None:
    """One safetensors file, streamed."""
    header, offset = {}, 0
    for name, shape in members:
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in members:
            left, start = math.prod(shape), crc32(name.encode()) % (POOL // 2)
            while left:
                piece = pool[start : start + left]
                file.write(piece.view(torch.uint8).numpy().data)
                left, start = left - len(piece), 0


def write(out: Path, layers: int) -> None:
    """The whole directory, unless it is there already."""
    if (out / "config.json").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    pool = (torch.randn(POOL, generator=generator) * STD).to(torch.bfloat16)
    files = shards(layers)
    home = {}
    for i, members in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_shard(out / name, members, pool)
        home.update({tensor: name for tensor, _ in members})
    total = sum(2 * math.prod(shape) for _, shape in tensors(layers))
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(config(layers), indent=1))


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    write(options.out, options.layers)


if __name__ == "__main__":
    main()
