"""Plain writers of quantised formats, from their descriptions, and what the bytes stand for.

Everything is numpy on whole bit strings; nothing is shared with the readers under test. Each writer
draws its own codes, scales and zero points, and gives (parts, float32 values [N, K]).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

Arrays = dict[str, torch.Tensor]
Writer = Callable[[np.random.Generator, int, int], tuple[Arrays, np.ndarray]]

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def bit_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [rows, words]: each row's codes one after the other, lowest bit first."""
    single = (codes[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)) & 1
    rows = single.reshape(len(codes), -1).astype(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return np.packbits(rows, axis=1, bitorder="little").view(np.int32)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def product(scales: np.ndarray, codes: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """scale * (code - zero) in float64, rounded once to float32."""
    exact = scales.astype(np.float64) * (codes.astype(np.float64) - zeros.astype(np.float64))
    return exact.astype(np.float32)


def small_scales(rng: np.random.Generator, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """float16, such that values are about those of a trained layer."""
    return (rng.uniform(0.5, 2.0, shape) * 0.1 / 2 ** (bits - 1)).astype(np.float16)


def gptq(
    bits: int = 4, group: int = 32, sym: bool = True, act_order: bool = False, version: int = 1
) -> Writer:
    """Zero points of version 1 are stored minus one, wrapped."""

    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Arrays, np.ndarray]:
        size = k if group == -1 else group
        groups = -(-k // size)
        index = np.arange(k) // size
        if act_order:
            index = rng.permutation(index)
        codes = rng.integers(0, 1 << bits, (n, k))
        scales = small_scales(rng, (n, groups), bits)
        zeros = np.full((n, groups), 1 << (bits - 1))
        if not sym:
            zeros = rng.integers(0, 1 << bits, (n, groups))
        stored = (zeros - (version == 1)) % (1 << bits)
        parts = {
            "qweight": tensor(bit_stream(codes, bits).T),
            "qzeros": tensor(bit_stream(stored.T, bits)),
            "scales": tensor(scales.T),
            "g_idx": tensor(index.astype(np.int32)),
        }
        return parts, product(scales[:, index], codes, zeros[:, index])

    return write


def awq(group: int = 32) -> Writer:
    """The words' nibbles hold outputs 0 2 4 6 1 3 5 7."""

    def shuffled(codes: np.ndarray) -> np.ndarray:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return codes.reshape(len(codes), -1, 8)[:, :, order].reshape(len(codes), -1)

    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Arrays, np.ndarray]:
        size = k if group == -1 else group
        codes = rng.integers(0, 16, (n, k))
        scales = small_scales(rng, (n, k // size), 4)
        zeros = rng.integers(0, 16, (n, k // size))
        parts = {
            "qweight": tensor(bit_stream(shuffled(codes.T), 4)),
            "qzeros": tensor(bit_stream(shuffled(zeros.T), 4)),
            "scales": tensor(scales.T),
        }
        index = np.arange(k) // size
        return parts, product(scales[:, index], codes, zeros[:, index])

    return write


def pack_quantized(
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    packed_zeros: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Writer:
    """compressed-tensors' W4A16: signed codes, stored plus half their range."""

    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Arrays, np.ndarray]:
        size, half = k if group == -1 else group, 1 << (bits - 1)
        index = np.arange(k) // size
        if act_order:
            index = rng.permutation(index)
        codes = rng.integers(-half, half, (n, k))
        scales = tensor(small_scales(rng, (n, k // size), bits)).to(dtype)
        zeros = np.zeros((n, k // size), dtype=np.int64)
        if not sym:
            zeros = rng.integers(-half, half, zeros.shape)
        parts = {
            "weight_packed": tensor(bit_stream(codes + half, bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if not sym:
            words = tensor(bit_stream((zeros + half).T, bits).T)
            parts["weight_zero_point"] = words if packed_zeros else tensor(zeros.astype(np.int8))
        if act_order:
            parts["weight_g_idx"] = tensor(index.astype(np.int32))
        grid = scales.float().numpy()
        return parts, product(grid[:, index], codes, zeros[:, index])

    return write


def int_quantized(per_row: bool = True, sym: bool = True) -> Writer:
    """compressed-tensors' W8A8: int8 weights as they are."""

    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Arrays, np.ndarray]:
        codes = rng.integers(-128, 128, (n, k))
        scales = small_scales(rng, (n, 1) if per_row else (1,), 8)
        zeros = rng.integers(-9, 9, scales.shape) if not sym else np.zeros(scales.shape, np.int64)
        parts = {"weight": tensor(codes.astype(np.int8)), "weight_scale": tensor(scales)}
        if not sym:
            parts["weight_zero_point"] = tensor(zeros.astype(np.int8))
        return parts, product(scales, codes, zeros)

    return write


def float8(
    block: tuple[int, int] | str = (128, 128),
    name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    code: torch.dtype = torch.float8_e4m3fn,
) -> Writer:
    """float8 times a scale per block, "row" or "tensor"; the last blocks may be short."""

    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Arrays, np.ndarray]:
        codes = tensor(rng.standard_normal((n, k)) * 60).to(code)
        height, width = {"row": (1, k), "tensor": (n, k)}.get(block, block)  # type: ignore[call-overload]
        shape = (-(-n // height), -(-k // width))
        if dtype is torch.uint8:
            scales = tensor(rng.integers(112, 118, shape).astype(np.uint8))
            grid = 2.0 ** (scales.numpy().astype(np.float32) - 127)
        else:
            scales = tensor(rng.uniform(1e-4, 1e-3, shape)).to(dtype)
            grid = scales.float().numpy()
        wide = grid[np.arange(n) // height][:, np.arange(k) // width]
        values = codes.float().numpy() * wide  # float32, as every implementation does
        return {"weight": codes, name: scales[0, 0] if block == "tensor" else scales}, values

    return write


def write_checkpoint(
    directory: Path,
    writer: Writer,
    settings: Mapping[str, Any],
    model_type: str = "llama",
    chosen: Callable[[str], bool] = lambda module: "lm_head" not in module,
    dtype: torch.dtype = torch.float16,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """A tiny random model with its linear layers packed; its stored names -> values, unpacked.

    Args:
        chosen: which modules are packed, by their stored name.
    """
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **(TINY | config))
    AutoModelForCausalLM.from_config(made).to(dtype).save_pretrained(directory)
    path = directory / "model.safetensors"
    rng = np.random.default_rng(0)
    stored: Arrays = {}
    values: Arrays = {}
    for name, weight in load_file(path).items():
        module = name.removesuffix(".weight")
        other = any(word in name for word in ("embed", "router", ".gate.weight"))
        linear = weight.ndim == 2 and not other
        if not linear or not chosen(module):
            stored[name] = values[name] = weight
            continue
        parts, unpacked = writer(rng, *weight.shape)
        stored |= {f"{module}.{part}": data for part, data in parts.items()}
        values[name] = torch.from_numpy(unpacked)
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(directory, quantization_config=dict(settings))
    return values


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def gptq_settings(
    bits: int = 4, group: int = 32, sym: bool = True, act_order: bool = False, version: int = 1
) -> dict[str, Any]:
    """As GPTQModel writes them."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


def awq_settings(group: int = 32) -> dict[str, Any]:
    """As AutoAWQ writes them."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def compressed_settings(
    form: str = "pack-quantized",
    bits: int = 4,
    group: int | None = 32,
    sym: bool = True,
    kind: str = "int",
    **weights: Any,
) -> dict[str, Any]:
    """As llm-compressor writes them; `group` None is one scale per row."""
    strategy = "channel" if group is None else "group"
    arguments = {"num_bits": bits, "type": kind, "symmetric": sym, "group_size": group}
    arguments |= {"strategy": strategy, "dynamic": False, "actorder": None} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
    }


def fp8_settings(block: tuple[int, int] | None = (128, 128)) -> dict[str, Any]:
    """As DeepSeek-V3 has them."""
    size = list(block) if block else None
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": size,
    }
