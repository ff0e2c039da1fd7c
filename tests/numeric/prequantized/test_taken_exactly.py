"""Packed weights against plain numpy writers of their formats: every value, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from packers import Writer
from spikeinfer.compiler.frontend.checkpoint import Checkpoint


def assert_taken(directory: Path, values: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Every stored weight's values, under the names of a plain checkpoint."""
    checkpoint = Checkpoint.open(directory)
    assert set(values) <= set(checkpoint.parameters)
    for name, expected in values.items():
        loaded = checkpoint.load(name)
        assert loaded.dtype == expected.dtype == checkpoint.parameters[name].dtype, name
        assert tuple(loaded.shape) == checkpoint.parameters[name].shape
        assert torch.equal(loaded, expected), name
    assert checkpoint.unused == ()
    return checkpoint


GPTQ: list[dict[str, Any]] = [
    *({"bits": bits, "version": v} for bits in (2, 3, 4, 8) for v in (1, 2)),
    *({"bits": bits, "sym": False} for bits in (2, 3, 4, 8)),
    {"sym": False, "version": 2},
    *({"group": group} for group in (-1, 64, 128)),
    *({"group": group, "act_order": True} for group in (32, 128)),
    {"group": -1, "act_order": True},
    {"bits": 3, "sym": False, "act_order": True, "version": 2},
    {"bits": 8, "group": -1},
]


@pytest.mark.parametrize("kind", GPTQ, ids=str)
def test_gptq(tmp_path: Path, kind: dict[str, Any]) -> None:
    settings = packers.gptq_settings(**kind)
    checkpoint = assert_taken(
        tmp_path, packers.write_checkpoint(tmp_path, packers.gptq(**kind), settings)
    )
    assert any("14 weights are quantised at the source (GPTQ" in n for n in checkpoint.notes)


def test_gptq_with_a_short_last_group(tmp_path: Path) -> None:
    settings = packers.gptq_settings(group=48, sym=False)
    writer = packers.gptq(group=48, sym=False)  # 128 = 48 + 48 + 32
    assert_taken(tmp_path, packers.write_checkpoint(tmp_path, writer, settings))


def test_gptq_without_group_indices(tmp_path: Path) -> None:
    def write(rng: Any, n: int, k: int) -> Any:
        parts, values = packers.gptq()(rng, n, k)
        del parts["g_idx"]
        return parts, values

    assert_taken(tmp_path, packers.write_checkpoint(tmp_path, write, packers.gptq_settings()))


@pytest.mark.parametrize(("stored", "label"), [(1, 2), (2, 1)])
def test_symmetric_gptq_with_the_wrong_version_label(
    tmp_path: Path, stored: int, label: int
) -> None:
    writer = packers.gptq(version=stored)
    settings = packers.gptq_settings(version=label)
    checkpoint = assert_taken(tmp_path, packers.write_checkpoint(tmp_path, writer, settings))
    assert any("contradicts the settings' GPTQ version" in note for note in checkpoint.notes)


def test_gptq_settings_in_the_old_file(tmp_path: Path) -> None:
    values = packers.write_checkpoint(tmp_path, packers.gptq(), {})
    old = '{"bits": 4, "group_size": 32, "desc_act": false, "sym": true, "damp_percent": 0.01}'
    (tmp_path / "quantize_config.json").write_text(old)
    assert_taken(tmp_path, values)


def test_gptq_of_a_model_that_keeps_inputs_first(tmp_path: Path) -> None:
    def write(rng: Any, k: int, n: int) -> Any:  # GPT-2's Conv1D stores [inputs, outputs]
        parts, values = packers.gptq(sym=False)(rng, n, k)
        return parts, values.T.copy()

    def chosen(module: str) -> bool:
        return module.endswith(("c_attn", "c_proj", "c_fc"))  # attn.c_proj is square

    settings = packers.gptq_settings(sym=False)
    values = packers.write_checkpoint(tmp_path, write, settings, "gpt2", chosen)
    values = {f"transformer.{n}".replace("transformer.transformer", "transformer"): v
              for n, v in values.items() if "lm_head" not in n}  # fmt: skip
    assert_taken(tmp_path, values)


@pytest.mark.parametrize("group", [32, 128, -1])
def test_awq(tmp_path: Path, group: int) -> None:
    settings = packers.awq_settings(group)
    assert_taken(tmp_path, packers.write_checkpoint(tmp_path, packers.awq(group), settings))


COMPRESSED: dict[str, tuple[Writer, dict[str, Any]]] = {
    "W4A16": (packers.pack_quantized(), packers.compressed_settings()),
    "W4A16 rows": (
        packers.pack_quantized(group=-1),
        packers.compressed_settings(group=None),
    ),
    "W4A16 fp16 scales": (
        packers.pack_quantized(dtype=torch.float16, group=128),
        packers.compressed_settings(group=128),
    ),
    "W4A16 asymmetric": (
        packers.pack_quantized(sym=False),
        packers.compressed_settings(sym=False),
    ),
    "W4A16 asymmetric, zero points unpacked": (
        packers.pack_quantized(sym=False, packed_zeros=False),
        packers.compressed_settings(sym=False),
    ),
    "W4A16 act-order": (
        packers.pack_quantized(act_order=True),
        packers.compressed_settings(actorder="group"),
    ),
    "W8A16": (packers.pack_quantized(bits=8), packers.compressed_settings(bits=8)),
    "W2A16": (packers.pack_quantized(bits=2), packers.compressed_settings(bits=2)),
    "W8A16 asymmetric": (
        packers.pack_quantized(bits=8, sym=False),
        packers.compressed_settings(bits=8, sym=False),
    ),
    "W8A8": (
        packers.int_quantized(),
        packers.compressed_settings("int-quantized", 8, None),
    ),
    "W8A8 one scale": (
        packers.int_quantized(per_row=False),
        packers.compressed_settings("int-quantized", 8, None, strategy="tensor"),
    ),
    "W8A8 asymmetric": (
        packers.int_quantized(sym=False),
        packers.compressed_settings("int-quantized", 8, None, sym=False),
    ),
    "FP8 rows": (
        packers.float8("row", "weight_scale", torch.bfloat16),
        packers.compressed_settings("float-quantized", 8, None, kind="float"),
    ),
    "FP8 tensor": (
        packers.float8("tensor", "weight_scale"),
        packers.compressed_settings("float-quantized", 8, None, kind="float", strategy="tensor"),
    ),
    "FP8 groups": (
        packers.float8((1, 64), "weight_scale", torch.bfloat16),
        packers.compressed_settings("float-quantized", 8, 64, kind="float"),
    ),
    "FP8 blocks": (
        packers.float8((48, 80), "weight_scale"),
        packers.compressed_settings(
            "float-quantized", 8, None, kind="float", strategy="block", block_structure=[48, 80]
        ),
    ),
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors(tmp_path: Path, kind: str) -> None:
    writer, settings = COMPRESSED[kind]
    assert_taken(tmp_path, packers.write_checkpoint(tmp_path, writer, settings))


def test_compressed_tensors_with_settings_per_module(tmp_path: Path) -> None:
    wide = packers.compressed_settings(bits=8, group=64)["config_groups"]["group_0"]
    settings = packers.compressed_settings()
    settings["config_groups"]["group_1"] = wide | {"targets": ["re:.*down_proj$"]}

    def write(rng: Any, n: int, k: int) -> Any:
        eight = k == packers.TINY["intermediate_size"]  # only down_proj reads that many
        return packers.pack_quantized(8 if eight else 4, 64 if eight else 32)(rng, n, k)

    assert_taken(tmp_path, packers.write_checkpoint(tmp_path, write, settings))


FP8: dict[str, tuple[Writer, dict[str, Any]]] = {
    "blocks": (packers.float8(), packers.fp8_settings()),
    "short blocks": (packers.float8((96, 80)), packers.fp8_settings((96, 80))),
    "bf16 scales": (packers.float8(dtype=torch.bfloat16), packers.fp8_settings()),
    "e5m2": (
        packers.float8(code=torch.float8_e5m2),
        packers.fp8_settings() | {"fmt": "e5m2"},
    ),
    "one scale": (packers.float8("tensor", "weight_scale"), {"quant_method": "fp8"}),
    "rows": (
        packers.float8("row", "weight_scale"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "mxfp8": (packers.float8((1, 32), dtype=torch.uint8), {"quant_method": "mxfp8"}),
}


@pytest.mark.parametrize("kind", FP8)
def test_fp8(tmp_path: Path, kind: str) -> None:
    writer, settings = FP8[kind]
    checkpoint = assert_taken(tmp_path, packers.write_checkpoint(tmp_path, writer, settings))
    assert any("quantises activations as well" in note for note in checkpoint.notes)


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    def write(rng: Any, n: int, k: int) -> Any:
        parts, values = packers.float8("tensor", "weight_scale")(rng, n, k)
        return parts | {"input_scale": torch.ones(())}, values

    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    assert_taken(tmp_path, packers.write_checkpoint(tmp_path, write, settings))


WRITERS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (packers.gptq(act_order=True), packers.gptq_settings(act_order=True)),
    "awq": (packers.awq(), packers.awq_settings()),
    "compressed": COMPRESSED["W4A16 asymmetric"],
    "fp8": FP8["short blocks"],
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_stacked_as_in_a_plain_checkpoint(
    tmp_path: Path, kind: str, model_type: str
) -> None:
    """The same values stored plainly in float32 give the same parameters."""
    writer, settings = WRITERS[kind]
    extra = {"num_local_experts": 3, "num_experts": 3, "moe_intermediate_size": 64, "head_dim": 32}
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    values = packers.write_checkpoint(
        packed, writer, settings, model_type, lambda m: "lm_head" not in m, **extra
    )
    assert any("experts.2." in name for name in values)
    assert _loaded(packed) == _loaded(_stored_plainly(packed, plain, values))


def _stored_plainly(packed: Path, plain: Path, values: Mapping[str, torch.Tensor]) -> Path:
    plain.mkdir()
    (plain / "config.json").write_text((packed / "config.json").read_text())
    packers.edit_config(plain, quantization_config=None)
    packers.save_file({n: v.contiguous() for n, v in values.items()}, plain / "model.safetensors")
    return plain


def _loaded(directory: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(directory)
    return {name: checkpoint.load(name).float().numpy().tobytes() for name in checkpoint.parameters}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    "chosen",
    [lambda _: True, lambda m: ".0." in m, lambda m: "lm_head" in m, lambda m: "v_proj" not in m],
    ids=["head too", "first layer", "head only", "not v"],
)
def test_what_is_stored_decides_what_is_packed(
    tmp_path: Path, kind: str, chosen: Callable[[str], bool]
) -> None:
    writer, settings = WRITERS[kind]
    values = packers.write_checkpoint(tmp_path, writer, settings, chosen=chosen)
    assert_taken(tmp_path, values)


def test_parts_of_one_weight_in_two_shards(tmp_path: Path) -> None:
    """A writer that splits by size doesn't know what belongs together."""
    writer, settings = WRITERS["gptq"]
    values = packers.write_checkpoint(tmp_path, writer, settings)
    path = tmp_path / "model.safetensors"
    tensors = packers.load_file(path)
    path.unlink()
    home = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(home.values()):
        packers.save_file({n: t for n, t in tensors.items() if home[n] == file}, tmp_path / file)
    index = json.dumps({"weight_map": home})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert_taken(tmp_path, values)


def test_the_hash_covers_settings_in_the_old_file(tmp_path: Path) -> None:
    packers.write_checkpoint(tmp_path, packers.gptq(8), {})
    found = []
    for version in ("gptq", "gptq_v2"):
        old = {"bits": 8, "group_size": 32, "sym": False, "checkpoint_format": version}
        (tmp_path / "quantize_config.json").write_text(json.dumps(old))
        found.append(Checkpoint.open(tmp_path).source_hash())
    assert found[0] != found[1]


def test_leftover_settings_of_plain_weights(tmp_path: Path) -> None:
    settings = packers.gptq_settings()
    values = packers.write_checkpoint(tmp_path, packers.gptq(), settings, chosen=lambda _: False)
    checkpoint = assert_taken(tmp_path, values)
    assert any("all weights are stored plainly" in note for note in checkpoint.notes)


def test_the_model_is_traced_without_the_settings(tmp_path: Path) -> None:
    packers.write_checkpoint(tmp_path, packers.awq(), packers.awq_settings())
    checkpoint = Checkpoint.open(tmp_path)
    assert not hasattr(checkpoint.config, "quantization_config")
    assert type(checkpoint.meta_model().model.layers[0].mlp.up_proj) is torch.nn.Linear
