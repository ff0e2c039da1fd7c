"""Packed weights in block formats of ours, read back by the gguf package; and lossless floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import packers
import pytest
import torch
from spikeinfer.compiler.assembly.prequantized import BLOCK_SIZE, Kept, blocks
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.frontend.prequantized import Precision
from spikeinfer.compiler.ir import Constant, DType, TensorType

UP = "model.layers.1.mlp.up_proj.weight"
TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}

# (writer, settings, formats that hold it)
CASES: dict[str, tuple[packers.Writer, dict[str, Any], list[str]]] = {
    "4 bits": (packers.gptq(), packers.gptq_settings(), ["q4_0", "q5_0", "q8_0"]),
    "4 bits, long groups": (
        packers.gptq(group=-1), packers.gptq_settings(group=-1), ["q4_0", "q5_0", "q8_0"],
    ),
    "4 bits, short last group": (
        packers.gptq(group=96), packers.gptq_settings(group=96), ["q4_0", "q5_0", "q8_0"],
    ),
    "4 bits asymmetric": (packers.awq(), packers.awq_settings(), ["q5_0", "q8_0"]),
    "3 bits asymmetric": (
        packers.gptq(3, sym=False), packers.gptq_settings(3, sym=False), ["q4_0", "q5_0"],
    ),
    "2 bits": (packers.gptq(2), packers.gptq_settings(2), ["q4_0", "q5_0", "q8_0"]),
    "8 bits": (packers.gptq(8), packers.gptq_settings(8), ["q8_0"]),
    "int8": (
        packers.int_quantized(), packers.compressed_settings("int-quantized", 8, None), ["q8_0"],
    ),
}  # fmt: skip


def constant(name: str, shape: tuple[int, ...]) -> Constant:
    return Constant(name, TensorType(DType.F32, shape), parameter=name, role="ffn_up")


@pytest.mark.parametrize(
    ("case", "format"), [(case, f) for case, (*_, formats) in CASES.items() for f in formats]
)
def test_blocks_as_gguf_reads_them(tmp_path: Path, case: str, format: str) -> None:
    writer, settings, formats = CASES[case]
    values = packers.write_checkpoint(tmp_path, writer, settings)
    checkpoint = Checkpoint.open(tmp_path)
    integers = checkpoint.integers(UP)
    assert integers is not None
    grid = integers.per_block(BLOCK_SIZE)
    assert grid is not None
    read = gguf.quants.dequantize(blocks(format, integers.codes(), *grid), TYPES[format])
    assert np.array_equal(read, values[UP].numpy())
    given = Kept(checkpoint).given(constant(UP, (256, 128)))
    assert given is not None
    assert given.format == formats[0]


def bf16_scales_out_of_range(rng: Any, n: int, k: int) -> Any:
    parts, values = packers.pack_quantized()(rng, n, k)
    parts["weight_scale"] = parts["weight_scale"] * 2.0**-20
    return parts, values * np.float32(2.0**-20)


def powers_of_two(rng: Any, n: int, k: int) -> Any:
    parts, values = packers.gptq(act_order=True)(rng, n, k)
    parts["scales"] = torch.full_like(parts["scales"], 2.0**-7)
    return parts, values  # of other scales: not looked at here


FLOATS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "act-order": (
        packers.gptq(act_order=True), packers.gptq_settings(act_order=True), "f32",
    ),
    "act-order, powers of two": (
        powers_of_two, packers.gptq_settings(act_order=True), "bf16",
    ),
    "scales beyond fp16": (bf16_scales_out_of_range, packers.compressed_settings(), "f32"),
    "groups of 16": (packers.gptq(group=16), packers.gptq_settings(group=16), "f32"),
    "fp8": (packers.float8(), packers.fp8_settings(), "f32"),
    "fp8, powers of two": (
        packers.float8((1, 32), dtype=torch.uint8), {"quant_method": "mxfp8"}, "bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FLOATS)
def test_floats_where_no_block_fits(tmp_path: Path, case: str) -> None:
    writer, settings, format = FLOATS[case]
    packers.write_checkpoint(tmp_path, writer, settings)
    checkpoint = Checkpoint.open(tmp_path)
    given = Kept(checkpoint).given(constant(UP, (256, 128)))
    assert given is not None
    assert given.format == format
    values = checkpoint.load(UP)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[format]
    assert torch.equal(values.to(dtype).float(), values)
    assert values.abs().max() > 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scales_that_arent_numbers_make_no_blocks(tmp_path: Path, value: float) -> None:
    def write(rng: Any, n: int, k: int) -> Any:
        parts, values = packers.gptq()(rng, n, k)
        parts["scales"][1, 2] = value
        return parts, values

    packers.write_checkpoint(tmp_path, write, packers.gptq_settings())
    given = Kept(Checkpoint.open(tmp_path)).given(constant(UP, (256, 128)))
    assert given is not None
    assert given.format in ("f32", "f16", "bf16")  # storing them refuses the value by name


def test_plain_weights_and_small_roles_are_left_to_the_rules(tmp_path: Path) -> None:
    packers.write_checkpoint(tmp_path, packers.gptq(), packers.gptq_settings())
    kept = Kept(Checkpoint.open(tmp_path))
    assert kept.given(constant("lm_head.weight", (96, 128))) is None
    router = Constant(UP, TensorType(DType.F32, (256, 128)), parameter=UP, role="ffn_gate_inp")
    assert kept.given(router) is None
    assert kept.notes() == []


@pytest.mark.parametrize("bits", range(1, 14))
@pytest.mark.parametrize("exponent", [-140, -26, -15, 0, 14, 100])
def test_smallest_float_never_rounds(bits: int, exponent: int) -> None:
    """And is no wider than needed where the bound is tight: odd codes, full-width scales."""
    torch.manual_seed(bits)
    whole = torch.randint(1 << (bits - 1), 1 << bits, (64,)) | 1
    scales = torch.ldexp(whole.double(), torch.tensor(exponent - bits)).float()
    exact = scales.double()
    format = Precision.of(scales, 0, 0, 1.0).smallest_float()
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
    assert torch.equal(exact.to(dtype).double(), exact)
    for narrower in {"f32": (torch.bfloat16, torch.float16), "f16": (torch.bfloat16,)}.get(
        format, ()
    ):
        assert not torch.equal(exact.to(narrower).double(), exact)
