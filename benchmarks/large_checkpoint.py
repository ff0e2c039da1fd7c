"""A checkpoint of Llama-3's 8B or 70B shape, written shard by shard in little memory.

    .venv/bin/python benchmarks/large_checkpoint.py OUT [--shape 8b] [--layers 32] [--sparse]

dtype bfloat16; 8B is about 16 GB. Every tensor is a stretch of one pool of normal numbers that
starts elsewhere for each: quantisers don't care, and it is quickly written. `--sparse` leaves holes
in place of values (zeros, no disk): enough for `spike-build --dry-run` of a 70B.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch

VOCABULARY, HEAD_SIZE, KV_HEADS = 128256, 128, 8


@dataclass(frozen=True)
class Shape:
    """Widths and the number of layers."""

    hidden: int
    middle: int
    layers: int


SHAPES = {"8b": Shape(4096, 14336, 32), "70b": Shape(8192, 28672, 80)}
STD = 0.02
POOL = 1 << 26
SHARD_BYTES = 4 << 30


def tensors(model: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every stored tensor."""
    kv, hidden, middle = HEAD_SIZE * KV_HEADS, model.hidden, model.middle
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for i in range(model.layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (middle, hidden)
        yield f"{layer}.mlp.up_proj.weight", (middle, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, middle)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def config(model: Shape) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": model.hidden,
        "intermediate_size": model.middle,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.hidden // HEAD_SIZE,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def shards(model: Shape) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors in files of about SHARD_BYTES."""
    result: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensors(model):
        size += 2 * math.prod(shape)
        if size > SHARD_BYTES and result[-1]:
            result.append([])
            size = 2 * math.prod(shape)
        result[-1].append((name, shape))
    return result


def write_shard(
    path: Path, members: list[tuple[str, tuple[int, ...]]], pool: torch.Tensor | None
) -> None:
    """One safetensors file, streamed; a hole behind the header without a pool."""
    header, offset = {}, 0
    for name, shape in members:
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if pool is None:
            file.truncate(file.tell() + offset)
            return
        for name, shape in members:
            left, start = math.prod(shape), crc32(name.encode()) % (POOL // 2)
            while left:
                piece = pool[start : start + left]
                file.write(piece.view(torch.uint8).numpy().data)
                left, start = left - len(piece), 0


def write(out: Path, model: Shape, sparse: bool = False) -> None:
    """The whole directory, unless it is there already."""
    if (out / "config.json").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    pool = None
    if not sparse:
        normal = torch.randn(POOL, generator=torch.Generator().manual_seed(0))
        pool = (normal * STD).to(torch.bfloat16)
    files = shards(model)
    home = {}
    for i, members in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_shard(out / name, members, pool)
        home.update({tensor: name for tensor, _ in members})
    total = sum(2 * math.prod(shape) for _, shape in tensors(model))
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(config(model), indent=1))


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--sparse", action="store_true")
    options = parser.parse_args()
    model = SHAPES[options.shape]
    if options.layers:
        model = replace(model, layers=options.layers)
    write(options.out, model, options.sparse)


if __name__ == "__main__":
    main()
