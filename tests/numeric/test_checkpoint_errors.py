"""What is wrong with a checkpoint is said before any work: code, words and remedy of each error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.errors import ExitCode, SpikeError
from transformers import AutoConfig, AutoModelForCausalLM

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 123456\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied llama, as `single/` and as `sharded/`."""
    root = tmp_path_factory.mktemp("source")
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=97,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "sharded", max_shard_size="20KB")
    return root


@pytest.fixture
def single(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source / "single", tmp_path / "model"))


@pytest.fixture
def sharded(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source / "sharded", tmp_path / "model"))


def refused(directory: Path, code: str, *words: str, **options: Any) -> SpikeError:
    """Opening fails with `code`; the message holds all `words` and a remedy."""
    with pytest.raises(SpikeError) as caught:
        Checkpoint.open(directory, **options)
    error = caught.value
    message = str(error)
    assert error.code == code, message
    assert error.exit_code == ExitCode.BAD_INPUT
    assert error.where == "checkpoint"
    for word in words:
        assert word in message
    assert error.what.endswith(".")
    assert error.remedy[0].isupper()
    assert error.remedy.endswith((".", ").")), error.remedy
    assert "{" not in message, "a forgotten f-string"
    assert "  " not in message
    return error


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def set_config(directory: Path, **values: Any) -> None:
    edit_json(directory / "config.json", lambda config: config.update(values))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def first_shard(directory: Path) -> Path:
    return min(directory.glob("model-00001-of-*.safetensors"))


# the path and config.json


def test_path_missing(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "SPK101", str(tmp_path / "absent"), "doesn't exist")


def test_hub_name_instead_of_a_path() -> None:
    refused(Path("some-org/some-model"), "SPK101", "hf download some-org/some-model")


def test_path_is_a_file(single: Path) -> None:
    refused(single / SINGLE, "SPK102", "is a file")


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "SPK103", "holds no config.json", str(single))


def test_hub_cache_entry_instead_of_a_snapshot(single: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    shutil.copytree(single, snapshot)
    refused(tmp_path / "models--a--b", "SPK103", f"give {snapshot} instead")


def test_original_llama_files(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    refused(tmp_path, "SPK103", "original (not Hugging Face) files")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model_type": "llama"', "isn't valid JSON"),
        (b"\xff\xfe", "isn't valid JSON"),
        (b"", "isn't valid JSON"),
        (b"[1]", "holds a JSON list"),
        (b"[" * 100_000, "isn't valid JSON"),
    ],
)
def test_invalid_config_json(single: Path, content: bytes, words: str) -> None:
    (single / "config.json").write_bytes(content)
    refused(single, "SPK105", "config.json", words)


def test_config_is_a_directory(single: Path) -> None:
    (single / "config.json").unlink()
    (single / "config.json").mkdir()
    refused(single, "SPK126", "config.json", "can't be read")


def test_config_is_a_named_pipe(single: Path) -> None:
    (single / "config.json").unlink()
    os.mkfifo(single / "config.json")
    refused(single, "SPK105", "config.json", "named pipe")


@pytest.mark.parametrize("name", ["config.json", SINGLE, "tokenizer.json"])
def test_lfs_pointer(single: Path, name: str) -> None:
    (single / name).write_bytes(LFS)
    refused(single, "SPK107", name, f"{len(LFS)} bytes", "git lfs pull")


def test_lfs_pointer_among_shards(sharded: Path) -> None:
    first_shard(sharded).write_bytes(LFS)
    refused(sharded, "SPK107", first_shard(sharded).name)


def test_unknown_model_type(single: Path) -> None:
    set_config(single, model_type="lama")
    refused(single, "SPK116", "'lama'", "Did you mean llama")


def test_unknown_model_type_with_its_own_code(single: Path) -> None:
    set_config(single, model_type="zzz9", auto_map={"AutoConfig": "configuration_x.Config"})
    (single / "configuration_x.py").write_text("raise SystemExit('code of a checkpoint was run')")
    error = refused(single, "SPK116", "its own Python code, which SpikeInfer never runs")
    assert "Did you mean" not in str(error)


def test_known_model_type_with_its_own_code_uses_ours(single: Path) -> None:
    set_config(single, auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    (single / "modeling_x.py").write_text("raise SystemExit('code of a checkpoint was run')")
    assert Checkpoint.open(single).architecture == "LlamaForCausalLM"


def test_no_model_type(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.pop("model_type"))
    refused(single, "SPK116", "names no `model_type`", "--model-type")
    assert Checkpoint.open(single, model_type="llama").model_type == "llama"


def test_contradicting_model_type(single: Path) -> None:
    refused(single, "SPK127", "'gpt2'", "'llama'", model_type="gpt2")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "bart"}, "encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "it is an encoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "sequence classification"),
    ],
)
def test_not_a_causal_lm(single: Path, config: dict[str, Any], words: str) -> None:
    set_config(single, **config)
    refused(single, "SPK117", "isn't a causal language model", words)


def test_unknown_rope_type(single: Path) -> None:
    set_config(single, rope_parameters={"rope_type": "lama3", "rope_theta": 1e4, "factor": 2.0})
    refused(single, "SPK118", "'lama3'", "default", "yarn", "Did you mean llama3?")


def test_unknown_rope_type_in_the_older_spelling(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.pop("rope_parameters", None))
    set_config(single, rope_scaling={"type": "liner", "factor": 2.0}, rope_theta=1e4)
    refused(single, "SPK118", "'liner'", "Did you mean linear?")


def test_unknown_rope_type_of_one_layer_type(single: Path) -> None:
    set_config(
        single,
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        rope_parameters={
            "full_attention": {"rope_type": "yarnn", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["sliding_attention", "full_attention"],
    )
    refused(single, "SPK118", "'yarnn'", "Did you mean yarn?")


@pytest.mark.parametrize(
    "values",
    [{"hidden_size": "32"}, {"hidden_size": 33}, {"hidden_act": "gleu"}],
    ids=["type", "divisibility", "activation"],
)
def test_invalid_values(single: Path, values: dict[str, Any]) -> None:
    set_config(single, **values)
    refused(single, "SPK122", "isn't a valid llama configuration", str(next(iter(values.values()))))


def test_quantised_by_config(single: Path) -> None:
    set_config(single, quantization_config={"quant_method": "aqlm"})
    refused(single, "SPK120", "aqlm", "already quantised")


def test_quantised_by_file(single: Path) -> None:
    (single / "hf_quant_config.json").write_text("{}")
    refused(single, "SPK120", "hf_quant_config.json")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_by_stored_dtype(single: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(single, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(single, "SPK120", name, "I8" if dtype == torch.int8 else "F8_E4M3")


def test_quantised_by_names(single: Path) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    edit_tensors(single, lambda tensors: tensors.update({name: torch.zeros(4, dtype=torch.int32)}))
    refused(single, "SPK120", name)


def test_float64(single: Path) -> None:
    name = "model.norm.weight"
    edit_tensors(single, lambda tensors: tensors.update({name: tensors[name].double()}))
    refused(single, "SPK121", name, "F64", "not in this version")


# which files


def test_missing_shard(sharded: Path) -> None:
    shard = first_shard(sharded)
    index = json.loads((sharded / INDEX).read_text())
    needs = [name for name, file in index["weight_map"].items() if file == shard.name]
    shard.unlink()
    noun = "tensor" if len(needs) == 1 else "tensors"
    refused(
        sharded,
        "SPK104",
        f"shard {shard.name} is named by the index but missing from {sharded}",
        f"{len(needs)} {noun} need it, first: {needs[0]}",
        f"remove it from {INDEX}",
    )


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_dangling_link(kind: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(kind)
    file = directory / SINGLE if kind == "single" else first_shard(directory)
    file.unlink()
    file.symlink_to("../blobs/abc")
    refused(directory, "SPK104", file.name, "a link to ../blobs/abc, which doesn't exist")


def test_index_names_absent_tensor(sharded: Path) -> None:
    shard = first_shard(sharded).name
    name = "model.layers.0.mlp.extra_proj.weight"
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({name: shard}))
    refused(sharded, "SPK108", "1 tensor that", f"first: {name} in {shard}")


def test_index_names_the_wrong_shard(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    home = weight_map["model.norm.weight"]
    other = next(file for file in weight_map.values() if file != home)
    moved = {"model.norm.weight": other}
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(moved))
    refused(sharded, "SPK108", f"model.norm.weight in {other}; it is in {home}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "isn't valid JSON"),
        ("{}", "has no `weight_map`"),
        ('{"weight_map": {}}', "has no `weight_map`"),
        ('{"weight_map": {"a": 1}}', "the entry of a"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "the entry of a"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "the entry of a"),
    ],
)
def test_invalid_index(sharded: Path, content: str, words: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, "SPK123", INDEX, words)


def test_tensor_in_two_shards_that_the_index_leaves_out(sharded: Path) -> None:
    for shard in sorted(sharded.glob("model-*.safetensors"))[:2]:
        tensors = load_file(shard) | {"model.extra": torch.zeros(1)}
        save_file(tensors, shard, metadata={"format": "pt"})
    refused(sharded, "SPK123", "doesn't say whether model.extra is in")


def test_index_of_pickle_shards(sharded: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}}
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "SPK114", "pytorch_model-00001-of-00002.bin")


@pytest.mark.parametrize("name", ["../model.safetensors", 3])
def test_named_weights_outside_the_directory(single: Path, name: object) -> None:
    set_config(single, transformers_weights=name)
    refused(single, "SPK123", "`transformers_weights` in config.json", repr(name))


def test_named_weights_missing(single: Path) -> None:
    set_config(single, transformers_weights="other.safetensors")
    refused(single, "SPK104", "other.safetensors", "`transformers_weights` in config.json")


def test_two_weight_sets_with_different_values(source: Path, sharded: Path) -> None:
    shutil.copy(source / "single" / SINGLE, sharded)
    edit_tensors(sharded, lambda tensors: tensors["model.norm.weight"].add_(1))
    refused(sharded, "SPK112", "two different weight sets", "in 1 tensor, first: model.norm.weight")


def test_two_weight_sets_with_different_names(source: Path, sharded: Path) -> None:
    shutil.copy(source / "single" / SINGLE, sharded)
    edit_tensors(sharded, lambda tensors: tensors.pop("lm_head.weight"))
    refused(sharded, "SPK112", "1 tensor in one of them only, first: lm_head.weight")


def test_adapter_only(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "SPK113", "only an adapter", "merge_and_unload")


def test_adapter_beside_a_config(single: Path) -> None:
    (single / SINGLE).rename(single / "adapter_model.safetensors")
    (single / "adapter_config.json").write_text("{}")
    refused(single, "SPK113", "only an adapter")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_only(single: Path, name: str) -> None:
    (single / SINGLE).unlink()
    (single / name).write_bytes(b"cos\nsystem\n(S'touch unpickled'\ntR.")
    refused(single, "SPK114", name, "never opens them")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "neither model.safetensors nor"),
        ("model-00001-of-00002.safetensors", "it has model-00001-of-00002.safetensors but"),
        ("model.gguf", "model.gguf can't be used as a source"),
    ],
)
def test_no_weights(single: Path, name: str, words: str) -> None:
    (single / SINGLE).unlink()
    if name:
        (single / name).touch()
    refused(single, "SPK115", "holds no weights", words)


def test_truncated_shard(sharded: Path) -> None:
    shard = first_shard(sharded)
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    refused(sharded, "SPK106", shard.name, f"has {size - 1:,} bytes but needs {size:,}")


@pytest.mark.parametrize("size", [0, 5, 100])
def test_truncated_within_the_header(single: Path, size: int) -> None:
    os.truncate(single / SINGLE, size)
    refused(single, "SPK106", SINGLE, f"it has {size} bytes")


def test_web_page_instead_of_weights(single: Path) -> None:
    (single / SINGLE).write_text("<!DOCTYPE html><html>Sign in to continue</html>")
    refused(single, "SPK119", SINGLE, "it claims a header of")


# tensors against the model


def test_wrong_shape(single: Path) -> None:
    set_config(single, intermediate_size=64)
    refused(
        single,
        "SPK109",
        f"(from model.layers.0.mlp.down_proj.weight in {SINGLE}) has shape [32, 48]",
        "asks for [32, 64]",
        "6 parameters differ",
    )


def test_missing_parameter(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    error = refused(single, "SPK110", "1 of the model's 21 parameters are missing")
    assert "model.layers.1.mlp.up_proj.weight" in error.what


def test_weights_of_another_model(single: Path) -> None:
    set_config(single, model_type="gpt_neox", architectures=["GPTNeoXForCausalLM"])
    refused(single, "SPK110", "stored tensors fit nowhere, first: model.embed_tokens.weight")


def test_missing_head_of_an_untied_model(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
    refused(single, "SPK111", "lm_head.weight [97, 32]", '"tie_word_embeddings": true')
    set_config(single, tie_word_embeddings=True)
    assert Checkpoint.open(single).canonical("lm_head.weight") == "model.embed_tokens.weight"


def test_missing_embedding_of_a_tied_model(single: Path) -> None:
    set_config(single, tie_word_embeddings=True)
    edit_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
    edit_tensors(single, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    refused(single, "SPK110", "2 of the model's 21 parameters")


def test_one_parameter_stored_twice_with_different_values(single: Path) -> None:
    edit_tensors(single, lambda tensors: tensors.update({"norm.weight": torch.zeros(32)}))
    refused(single, "SPK125", "model.norm.weight more than once", "norm.weight")


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=3,
        vocab_size=97,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


EXPERT = "model.layers.0.block_sparse_moe.experts.1"


def test_missing_expert(experts: Path) -> None:
    edit_tensors(experts, lambda tensors: tensors.pop(f"{EXPERT}.w2.weight"))
    refused(experts, "SPK109", "made from 2 tensors", "[2, 32, 48]", "asks for [3, 32, 48]")


def test_expert_of_another_shape(experts: Path) -> None:
    edit_tensors(experts, lambda tensors: tensors.update({f"{EXPERT}.w2.weight": torch.ones(2, 2)}))
    refused(experts, "SPK124", "experts.down_proj can't be made from its 3 stored tensors")


def test_stacked_and_separate_experts(experts: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    edit_tensors(experts, lambda tensors: tensors.update({name: torch.ones(3, 32, 48)}))
    refused(experts, "SPK125", f"{name} more than once")
