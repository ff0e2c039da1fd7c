"""What can't be taken is refused by name, and damaged packed weights by the part that is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from safetensors.torch import load_file, save_file
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.frontend.prequantized import read_scheme, unpack
from spikeinfer.compiler.frontend.safetensors_file import SafetensorsFile
from spikeinfer.compiler.frontend.weight_files import locate_weights
from spikeinfer.errors import ExitCode, SpikeError

UP = "model.layers.1.mlp.up_proj"


def refused(directory: Path, code: str, *words: str) -> SpikeError:
    with pytest.raises(SpikeError) as caught:
        Checkpoint.open(directory)
    error = caught.value
    assert error.code == code, str(error)
    assert error.exit_code is ExitCode.BAD_INPUT
    assert error.remedy
    for word in words:
        assert word in str(error)
    return error


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A tiny llama whose weights are all plain."""
    packers.write_checkpoint(tmp_path, packers.gptq(), {}, chosen=lambda _: False)
    return tmp_path


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "model.dequantize()"),
    "bitsandbytes of old": ({"load_in_8bit": True}, "bitsandbytes"),
    "mxfp4": ({"quant_method": "mxfp4"}, "Mxfp4Config(dequantize=True)"),
    **{
        method: ({"quant_method": method}, method)
        for method in ("nvfp4", "eetq", "hqq", "quanto", "aqlm", "vptq", "spqr", "higgs", "quark",
                       "fp_quant", "torchao", "bitnet", "auto-round", "modelopt", "exl3", "zzz")
    },
    "no method": ({"bits": 4}, "unknown method"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "AWQ gemv"),
    "llm-awq": ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "llm-awq"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ marlin"),
    "planar": ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, "GPTQ gptq_p"),
    "dynamic": ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, "dynamic"),
    "rotated": ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "with rotation"),
    "fp4 experts": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp4 experts"),
    "nvfp4 of compressed-tensors": (
        packers.compressed_settings("nvfp4-pack-quantized"), "nvfp4-pack-quantized"
    ),
    "sparse": (
        packers.compressed_settings() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse-24-bitmask sparsity",
    ),
    "transforms": (
        packers.compressed_settings() | {"transform_config": {"config_groups": {"R1": {}}}},
        "transforms",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods_by_name_before_a_tensor_is_read(
    plain: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, words = METHODS[name]
    packers.edit_config(plain, quantization_config=settings)
    monkeypatch.setattr(SafetensorsFile, "__init__", lambda *_: pytest.fail("a file was opened"))
    refused(plain, "SPK120", "already quantised", "GPTQ, AWQ (GEMM), FP8", words)


def test_modelopt_by_its_file(plain: Path) -> None:
    (plain / "hf_quant_config.json").write_text("{}")
    refused(plain, "SPK120", "modelopt", "hf_quant_config.json")


def test_settings_inside_of_the_text_config(plain: Path) -> None:
    settings = {"quantization_config": {"quant_method": "aqlm"}}
    packers.edit_config(plain, text_config=settings, quantization_config=None)
    refused(plain, "SPK120", "aqlm")


def gptq(**values: Any) -> dict[str, Any]:
    return packers.gptq_settings() | values


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "bits": (gptq(bits=5), "one of 2, 3, 4, 8"),
    "bits as text": (gptq(bits="4"), "a whole number"),
    "no bits": ({"quant_method": "gptq"}, "`bits`"),
    "group size": (gptq(group_size=0), "positive, or -1"),
    "sym": (gptq(sym="yes"), "true or false"),
    "format": (gptq(checkpoint_format=2), "a name"),
    "awq bits": ({"quant_method": "awq", "bits": 8}, "one of 4"),
    "fp8 block": ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive numbers"),
    "fp8 block of zero": (
        {"quant_method": "fp8", "weight_block_size": [0, 1]},
        "two positive numbers",
    ),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups"),
    "no weights": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"targets": 1, "weights": {"num_bits": 4}}},
        },
        "a list of `targets`",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cant_be_used(plain: Path, name: str) -> None:
    settings, words = SETTINGS[name]
    packers.edit_config(plain, quantization_config=settings)
    refused(plain, "SPK140", words, "config.json")


def test_old_settings_files(plain: Path) -> None:
    (plain / "quantize_config.json").write_text("{}")
    refused(plain, "SPK140", "`bits` in quantize_config.json")
    (plain / "quantize_config.json").write_text("[")
    refused(plain, "SPK140", "quantize_config.json")
    (plain / "quantize_config.json").unlink()
    old = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMV"}
    (plain / "quant_config.json").write_text(json.dumps(old))
    refused(plain, "SPK120", "AWQ gemv", "quant_config.json")


def test_packed_names_without_settings(tmp_path: Path) -> None:
    packers.write_checkpoint(tmp_path, packers.gptq(), {})
    refused(tmp_path, "SPK120", "it stores", ".g_idx")


FORMATS = {
    "gptq": (packers.gptq(act_order=True), packers.gptq_settings(act_order=True)),
    "awq": (packers.awq(), packers.awq_settings()),
    "compressed": (packers.pack_quantized(sym=False), packers.compressed_settings(sym=False)),
    "ordered": (packers.pack_quantized(act_order=True), packers.compressed_settings()),
    "int8": (
        packers.int_quantized(sym=False),
        packers.compressed_settings("int-quantized", 8, None, sym=False),
    ),
    "fp8": (packers.float8((96, 80)), packers.fp8_settings((96, 80))),
}


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *(("gptq", part) for part in ("qweight", "qzeros", "scales")),
        *(("awq", part) for part in ("qweight", "qzeros", "scales")),
        *(("compressed", f"weight_{p}") for p in ("packed", "scale", "shape", "zero_point")),
        ("int8", "weight_zero_point"),
        ("fp8", "weight_scale_inv"),
        ("fp8", "weight"),
    ],
)
def test_missing_parts(tmp_path: Path, kind: str, part: str) -> None:
    writer, settings = FORMATS[kind]
    packers.write_checkpoint(tmp_path, writer, settings)
    edit_tensors(tmp_path, lambda tensors: tensors.__delitem__(f"{UP}.{part}"))
    word = "scale" if part == "weight_scale_inv" else part
    refused(tmp_path, "SPK141", f"{UP}.weight", f"its {word} is missing")


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1]


@pytest.mark.parametrize("change", [shorter, narrower, torch.Tensor.double])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *(("gptq", part) for part in ("qzeros", "scales")),
        *(("awq", part) for part in ("qzeros", "scales")),
        *(("compressed", f"weight_{p}") for p in ("packed", "scale", "zero_point")),
        ("int8", "weight_scale"),
        ("fp8", "weight_scale_inv"),
    ],
)
def test_parts_of_wrong_shape_or_dtype(tmp_path: Path, kind: str, part: str, change: Any) -> None:
    writer, settings = FORMATS[kind]
    packers.write_checkpoint(tmp_path, writer, settings)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.{part}"] = change(tensors[f"{UP}.{part}"])

    edit_tensors(tmp_path, edit)
    refused(tmp_path, "SPK142", f"{UP}.{part} is", "but must be")


SHAPES = [(), (0,), (1,), (3,), (2,), (0, 0), (0, 128), (256, 0), (1, 1), (2, 2, 2), (256, 128)]


@pytest.mark.parametrize("kind", FORMATS)
def test_parts_of_any_shape_and_dtype_never_end_in_a_traceback(tmp_path: Path, kind: str) -> None:
    writer, settings = FORMATS[kind]
    scheme = read_scheme(tmp_path, {"quantization_config": settings})
    assert scheme is not None
    parts, _ = writer(np.random.default_rng(0), 256, 128)
    good = {f"layer.{part}": data for part, data in parts.items()}
    codes = set()
    for name, shape in itertools.product(good, SHAPES):
        for dtype in (good[name].dtype, torch.int32, torch.float32):
            bad = good | {name: torch.zeros(shape, dtype=dtype)}
            save_file(bad, tmp_path / "model.safetensors")
            try:
                unpack(locate_weights(tmp_path), scheme)
            except SpikeError as error:
                codes.add(error.code)
    assert "SPK142" in codes
    assert codes <= {"SPK141", "SPK142", "SPK144"}


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_group_size_of_other_weights(tmp_path: Path, kind: str) -> None:
    writer, settings = FORMATS[kind]
    packers.write_checkpoint(tmp_path, writer, settings)
    text = json.dumps(settings).replace('"group_size": 32', '"group_size": 64')
    packers.edit_config(tmp_path, quantization_config=json.loads(text))
    refused(tmp_path, "SPK142", "groups of 64", "belong to different checkpoints")


def test_codes_of_a_smaller_model(tmp_path: Path) -> None:
    writer, settings = FORMATS["awq"]
    packers.write_checkpoint(tmp_path, writer, settings)
    packers.edit_config(tmp_path, intermediate_size=512)
    refused(tmp_path, "SPK109", "asks for [128, 512]")


def test_shape_that_contradicts_the_codes(tmp_path: Path) -> None:
    writer, settings = FORMATS["compressed"]
    packers.write_checkpoint(tmp_path, writer, settings)
    shape = {f"{UP}.weight_shape": torch.tensor([256, 1 << 40])}
    edit_tensors(tmp_path, lambda tensors: tensors.update(shape))
    refused(tmp_path, "SPK142", f"as {UP}.weight_shape says")


@pytest.mark.parametrize("value", [-1, 4, 1 << 30])
@pytest.mark.parametrize(("kind", "part"), [("gptq", "g_idx"), ("ordered", "weight_g_idx")])
def test_group_indices_out_of_range(tmp_path: Path, kind: str, part: str, value: int) -> None:
    writer, settings = FORMATS[kind]
    packers.write_checkpoint(tmp_path, writer, settings)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.{part}"][7] = value

    edit_tensors(tmp_path, edit)
    refused(tmp_path, "SPK143", f"{UP}.{part}[7] is {value}", "4 groups")


def test_zero_points_of_symmetric_weights(tmp_path: Path) -> None:
    writer, settings = packers.gptq(sym=False), packers.gptq_settings(sym=True)
    packers.write_checkpoint(tmp_path, writer, settings)
    refused(tmp_path, "SPK144", "symmetric", '"sym": false')


def test_module_that_no_target_names(tmp_path: Path) -> None:
    settings = packers.compressed_settings()
    only = settings["config_groups"]["group_0"]
    settings["config_groups"] = {
        "a": only | {"targets": ["re:.*attn.*"]}, "b": only | {"targets": [f"{UP[:-7]}down_proj"]},
    }  # fmt: skip
    packers.write_checkpoint(tmp_path, packers.pack_quantized(), settings)
    refused(tmp_path, "SPK140", "no target", "mlp")


def test_compressed_tensors_before_it_is_compressed(tmp_path: Path) -> None:
    settings = packers.compressed_settings("dense")
    packers.write_checkpoint(tmp_path, packers.pack_quantized(), settings, chosen=lambda _: False)
    scale = {f"{UP}.weight_scale": torch.ones(256, 4)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(scale))
    refused(tmp_path, "SPK140", "`format`", "'dense'", "still to be rounded")


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_widths_whose_packing_differs_between_versions(tmp_path: Path, bits: int) -> None:
    writer = packers.pack_quantized(bits)
    packers.write_checkpoint(tmp_path, writer, packers.compressed_settings(bits=bits))
    refused(tmp_path, "SPK140", "`num_bits`", "one of 2, 4, 8")
