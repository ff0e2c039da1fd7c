"""Layers that AutoGPTQ, AutoAWQ and compressed-tensors packed and unpacked (record_judged.py), and
transformers' own FP8: our values, rounded once to their dtype, are theirs bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from spikeinfer.compiler.frontend.prequantized import UnpackedFiles, unpack
from spikeinfer.compiler.frontend.prequantized.methods import read_scheme
from spikeinfer.compiler.frontend.weight_files import locate_weights
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

JUDGED = Path(__file__).with_name("judged.safetensors")


def judged() -> dict[str, dict[str, torch.Tensor]]:
    cases: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(str(JUDGED), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            case, part = name.split(".")
            cases.setdefault(case, {})[part] = file.get_tensor(name)
    return cases


CASES = judged()


def settings_of(case: str) -> dict[str, Any]:
    if case.startswith("gptq"):
        _, bits, kind = case.split("-")
        return packers.gptq_settings(int(bits), sym=kind != "asym", act_order=kind == "order")
    if case == "awq":
        return packers.awq_settings()
    sym, bits = "asym" not in case, int(next((p for p in case.split("-") if p.isdigit()), "8"))
    if case.startswith("ct-pack"):
        return packers.compressed_settings("pack-quantized", bits,
                                           None if "rows" in case else 32, sym)  # fmt: skip
    if case == "ct-float-blocks":
        return packers.compressed_settings(
            "float-quantized", 8, None, kind="float", strategy="block", block_structure=[24, 80]
        )
    kind = "float" if "float" in case else "int"
    return packers.compressed_settings(f"{kind}-quantized", 8, None, kind=kind)


def unpacked(directory: Path, parts: dict[str, torch.Tensor], settings: Any) -> torch.Tensor:
    """The values of one layer."""
    save_file({f"layer.{n}": t for n, t in parts.items()}, directory / "model.safetensors")
    scheme = read_scheme(directory, {"quantization_config": settings})
    assert scheme is not None
    files = unpack(locate_weights(directory), scheme)
    assert isinstance(files, UnpackedFiles)
    return files.tensor("layer.weight")


@pytest.mark.parametrize("case", CASES)
def test_values_of_the_formats_own_tools(tmp_path: Path, case: str) -> None:
    parts = dict(CASES[case])
    expected = parts.pop("expected")
    ours = unpacked(tmp_path, parts, settings_of(case))
    assert ours.dtype == torch.float32
    assert torch.equal(ours.to(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_transformers_where_blocks_are_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = (torch.randn(256, 384) * 40).to(torch.float8_e4m3fn)
    scale = (torch.rand(2, 3) * 1e-3).to(dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    parts = {"weight": weight, "weight_scale_inv": scale}
    assert torch.equal(unpacked(tmp_path, parts, packers.fp8_settings()), theirs)


def test_a_stack_of_experts_in_one_tensor(tmp_path: Path) -> None:
    weight = (torch.randn(3, 256, 128) * 40).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 1) * 1e-3
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    parts = {"weight": weight, "weight_scale_inv": scale}
    assert torch.equal(unpacked(tmp_path, parts, packers.fp8_settings()), theirs)


def test_transformers_misreads_what_is_no_multiple_of_the_block(tmp_path: Path) -> None:
    """192 rows in blocks of 128 are 128 + 64; transformers makes them 96 + 96."""
    weight = torch.ones(192, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0], [2.0]])
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    parts = {"weight": weight, "weight_scale_inv": scale}
    ours = unpacked(tmp_path, parts, packers.fp8_settings())
    assert ours[:, 0].tolist() == [1.0] * 128 + [2.0] * 64
    assert theirs[:, 0].tolist() == [1.0] * 96 + [2.0] * 96
