"""Checkpoint.load against transformers' own from_pretrained: every parameter, every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Twelve experts: in plain text order expert 10 would come before expert 2.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 12},
    "qwen3_moe": {"num_experts": 12, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "gemma3_text": {"head_dim": 8},
    "phi3": {},
    "falcon": {},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 12,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, **extra: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(TINY | MODELS[model_type] | extra))
    return AutoModelForCausalLM.from_config(config).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def assert_equals_transformers(directory: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(directory)
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"]
    state = model.state_dict()
    assert list(checkpoint.parameters) == list(state)
    assert checkpoint.architecture == type(model).__name__
    for name, reference in state.items():
        loaded = checkpoint.load(name)
        assert checkpoint.parameters[name].shape == tuple(loaded.shape) == tuple(reference.shape)
        assert checkpoint.parameters[name].dtype == loaded.dtype
        # transformers keeps a few parameters in float32 whatever is stored; the cast is exact
        assert torch.equal(bits(loaded.to(reference.dtype)), bits(reference)), name
    return checkpoint


@pytest.mark.parametrize("shards", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("model_type", MODELS)
def test_every_parameter_equals_transformers(tmp_path: Path, model_type: str, shards: bool) -> None:
    tiny_model(model_type, torch.bfloat16).save_pretrained(
        tmp_path, max_shard_size="20KB" if shards else "1GB"
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.notes == ()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "falcon", "gemma3_text"])
def test_tied_and_untied_heads(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = tiny_model(model_type, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    checkpoint = assert_equals_transformers(tmp_path)
    embedding = next(
        name for name, module in model.named_modules() if module is model.get_input_embeddings()
    )
    shared = checkpoint.canonical("lm_head.weight") == checkpoint.canonical(f"{embedding}.weight")
    assert shared == tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_model("llama", dtype).save_pretrained(tmp_path)
    checkpoint = assert_equals_transformers(tmp_path)
    assert {info.dtype for info in checkpoint.parameters.values()} == {dtype}


def test_gpt_neox_head_is_stored_as_embed_out(tmp_path: Path) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in assert_equals_transformers(tmp_path).parameters


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_checkpoint_saved_from_the_base_model(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True)
    model.base_model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith(f"{model.base_model_prefix}.") for name in stored)
    assert_equals_transformers(tmp_path)


def test_names_with_a_prefix_that_the_class_lacks(tmp_path: Path) -> None:
    # the reverse: "transformer.lm_head" has one prefix too many
    tiny_model("gpt2", tie_word_embeddings=False).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda name: f"transformer.{name}" if name == "lm_head.weight" else name)
    assert_equals_transformers(tmp_path)


def rewrite(directory: Path, rename: Any = str, **extra: torch.Tensor) -> None:
    """Rename the tensors of model.safetensors and add or replace some (`__` stands for a dot)."""
    path = directory / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in extra.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_old_buffers_are_ignored_and_listed(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    rewrite(tmp_path, **{name: torch.ones(4)})
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.unused == (name.replace("__", "."),)
    assert checkpoint.notes == ()  # harmless by the model class's own list


def test_masks_of_dtypes_that_we_dont_load_are_ignored(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    rewrite(tmp_path, h__0__attn__bias=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert len(assert_equals_transformers(tmp_path).unused) == 1


def test_unexpected_weights_get_a_note(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.notes == (
        "stored tensors that the model doesn't have: 1, "
        "first: model.layers.0.self_attn.q_proj.bias",
    )


def test_tied_by_config_but_stored_apart_and_different(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lm_head__weight=torch.randn(97, 32))
    checkpoint = assert_equals_transformers(tmp_path)  # transformers uses the stored head, too
    assert checkpoint.canonical("lm_head.weight") == "lm_head.weight"
    assert "lm_head.weight is tied to model.embed_tokens.weight" in checkpoint.notes[0]
    model = checkpoint.meta_model()
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_tied_by_config_and_stored_twice(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lm_head__weight=model.lm_head.weight.detach().clone())
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.canonical("lm_head.weight") == "model.embed_tokens.weight"
    tied = checkpoint.meta_model()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_untied_by_config_but_equal_needs_one_tensor(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lm_head__weight=model.lm_head.weight.detach().clone())
    set_config(tmp_path, tie_word_embeddings=False)
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.canonical("lm_head.weight") == "model.embed_tokens.weight"


def test_tied_weight_stored_under_the_heads_name_only(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(
        tmp_path, lambda name: "lm_head.weight" if name == "model.embed_tokens.weight" else name
    )
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.canonical("model.embed_tokens.weight") == "lm_head.weight"


def test_one_parameter_under_two_names_with_equal_values(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    norm = load_file(tmp_path / "model.safetensors")["model.norm.weight"].clone()
    rewrite(tmp_path, norm__weight=norm)
    checkpoint = assert_equals_transformers(tmp_path)
    assert checkpoint.notes == ("model.norm.weight is stored 2 times with equal values",)


def test_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    tiny_model("llama").save_pretrained(blobs, max_shard_size="20KB")
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert_equals_transformers(snapshot)


def test_weights_file_named_in_config(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    set_config(tmp_path, transformers_weights="other.safetensors")
    assert Checkpoint.open(tmp_path).weight_files() == [tmp_path / "other.safetensors"]


def test_same_weights_as_single_file_and_as_shards(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    model.save_pretrained(tmp_path / "single")
    (tmp_path / "single" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert len(Checkpoint.open(tmp_path).weight_files()) > 1


def test_a_lone_shard_named_like_the_single_file(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equals_transformers(tmp_path)


def test_meta_model_is_eager_float32_without_storage(tmp_path: Path) -> None:
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    model = checkpoint.meta_model()
    assert model.config._attn_implementation == "eager"
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    assert model is not checkpoint.meta_model()
    assert checkpoint.meta_model(torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    assert checkpoint.config.dtype == torch.bfloat16  # building a model leaves it as it was


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    Checkpoint.open(tmp_path).load("model.norm.weight").fill_(7)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_unknown_parameter_is_a_key_error(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(KeyError):
        Checkpoint.open(tmp_path).load("model.nrom.weight")


def test_base_model_of_an_untied_type_reads_nothing_else(tmp_path: Path) -> None:
    # AutoModel and AutoModelForCausalLM agree on the shared parameters
    tiny_model("llama").save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in AutoModel.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(checkpoint.load(f"model.{name}"), tensor)
