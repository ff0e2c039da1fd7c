"""Small configs of any model type that transformers knows: every size shrunk, every feature kept.

Sizes are found by the names that configs share; lists with one entry per layer keep one layer of
each kind. Only types whose sizes depend on each other in their own way are in `OVERRIDES`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_blocks",
)  # fmt: skip
MOST_LAYERS = 4
VOCAB = 128

# Beyond the length of the prompt, except for what has to be crossed (windows). Index heads are
# many: with few, many keys score 0, and which of equals are chosen is up to the kernel.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB, "decoder_vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "unpadded_vocab_size": VOCAB - 4,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embedding_size": 64,
    "emb_dim": 64, "embedding_dim": 64, "word_embed_proj_dim": 64, "lru_width": 64,
    "attention_hidden_size": 64, "backbone_hidden_size": 64, "embed_dim": 64,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4, "swa_num_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "kv_n_heads": 2, "swa_num_key_value_heads": 2,
    "num_global_key_value_heads": 2, "num_query_groups": 4,
    "head_dim": 16, "kv_channels": 16, "swa_head_dim": 16, "dim_head": 16, "d_head": 16,
    "attention_head_size": 16, "global_head_dim": 32, "query_pre_attn_scalar": 24,
    "rotary_dim": 8,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "ffn_hidden_size": 96, "dff": 96, "d_inner": 96, "dim_ff": 96, "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96, "feed_forward_size": 96, "n_inner": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "moe_top_k": 2, "n_group": 2, "topk_group": 1, "num_expert_group": 2,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "o_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 16, "o_groups": 2,
    "index_head_dim": 16, "index_n_heads": 16, "index_topk": 8, "index_block_size": 4,
    "index_topk_blocks": 3,
    "sliding_window": 8, "sliding_window_size": 8, "attention_chunk_size": 8, "window_size": 8,
    "local_attention": 8, "attention_window_size": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64,
    "max_target_positions": 64, "max_source_positions": 64, "context_length": 64,
    "model_max_length": 64, "seq_length": 64, "original_max_position_embeddings": 16,
    "mamba_d_state": 8, "state_size": 8, "ssm_state_size": 8, "time_step_rank": 4,
    "mamba_dt_rank": 4, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16,
    "mamba_head_dim": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_n_groups": 2,
    "mamba_ngroups": 2, "n_groups": 2, "mamba_d_ssm": 128, "chunk_size": 4, "mamba_chunk_size": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4, "block_size": 4,
    "hidden_size_per_layer_input": 8, "laurel_rank": 8, "gated_norm_rank": 8,
    "router_hidden_size": 16, "adapter_rank": 8, "loop_gate_rank": 8, "hc_lowrank": 8, "d_rel": 8,
    "adapter_in_dim": 64, "adapter_out_dim": 64, "adapter_input_size": 64,
    "rel_extent": 32, "num_centroids": 8, "centroid_intermediate_top_k": 2,
}  # fmt: skip
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3}

QWEN4_INDEXER = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    "recurrent_gemma": {
        "num_hidden_layers": 2, "block_types": ["recurrent", "attention"], "conv1d_width": 4,
    },
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni", "mem_len": None},  # by default it sees later tokens
    "xlstm": {"chunk_size": 8, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
        "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_config(model_type: str) -> PretrainedConfig:
    """The type's config with every size shrunk. Raises what the config class raises."""
    changes = OVERRIDES.get(model_type, {})
    default = CONFIG_MAPPING[model_type](**_needed(model_type))
    return type(default)(**_merged(_shrunk(default), changes))


def _needed(model_type: str) -> dict[str, Any]:
    """What a default config cannot do without."""
    return {"text_config": {}} if model_type == "gemma4_assistant" else {}


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(inner, dict) and isinstance(value, Mapping)
        merged[name] = _merged(inner, value) if both else value
    return merged


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of the config class: its own values, shrunk."""
    given = _own_values(config)
    inner = {
        name: _shrunk(value)
        for name, value in vars(config).items()
        if isinstance(value, PretrainedConfig) and name in given
    }
    values = {k: v for k, v in given.items() if k not in inner and k != "model_type"}
    layers = next((values[n] for n in LAYERS if isinstance(values.get(n), int)), 0)
    kept = _kinds_of_layers(values, layers)
    shrunk = {name: _value(name, value, layers, kept) for name, value in values.items()}
    if isinstance(values.get("is_decoder"), bool):
        shrunk["is_decoder"] = True  # encoders with a causal class
    shrunk |= {name: max(2, len(kept)) for name in LAYERS if isinstance(values.get(name), int)}
    _equal_heads_stay_equal(values, shrunk)
    return shrunk | inner


def _own_values(config: PretrainedConfig) -> dict[str, Any]:
    common = PretrainedConfig().to_dict().keys() - TOKEN_IDS.keys()
    return {
        name: copy.deepcopy(value)
        for name, value in config.to_dict().items()
        if name not in common or name in ("is_encoder_decoder", "tie_word_embeddings")
    }


def _kinds_of_layers(values: Mapping[str, Any], layers: int) -> list[int]:
    """Indices of layers, one for each combination of entries in the lists over layers."""
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == layers > 0]
    seen: dict[str, int] = {}
    for index in range(layers if lists else 0):
        seen.setdefault(repr([entries[index] for entries in lists]), index)
    kept = sorted(seen.values())[:MOST_LAYERS]
    return kept if len(kept) > 1 or not lists else [0, 0]


def _value(name: str, value: Any, layers: int, kept: list[int]) -> Any:
    if isinstance(value, list) and len(value) == layers > 0:
        return [_value(name, value[index], 0, []) for index in kept]
    if name == "per_layer_config" and isinstance(value, dict):
        return _per_layer(value, kept)
    if name == "rope_parameters" and isinstance(value, dict):
        return _rope(value)
    if name in TOKEN_IDS:
        return TOKEN_IDS[name] if isinstance(value, int) else value
    if name.endswith("_token_id") and isinstance(value, int) and value >= VOCAB:
        return VOCAB - 1
    if name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return SIZES[name]
    return value


def _per_layer(value: dict[Any, Any], kept: list[int]) -> dict[int, Any]:
    """Exceptions of the kept layers; a head of another width stays of another width."""
    by_index = {int(layer): changes for layer, changes in value.items()}
    shrunk: dict[int, Any] = {}
    for new, old in enumerate(kept):
        for name, entry in by_index.get(old, {}).items():
            size = 32 if name == "head_dim" else _value(name, entry, 0, [])
            shrunk.setdefault(new, {})[name] = size
        _equal_heads_stay_equal(by_index.get(old, {}), shrunk.get(new, {}))
    return shrunk


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Original lengths below the prompt's, so that it crosses them."""
    shrunk = {k: _rope(v) if isinstance(v, dict) else v for k, v in value.items()}
    if "original_max_position_embeddings" in shrunk:
        shrunk["original_max_position_embeddings"] = 16
    return shrunk


def _equal_heads_stay_equal(values: Mapping[str, Any], shrunk: dict[str, Any]) -> None:
    """Multi-head attention stays multi-head, multi-query stays multi-query."""
    kv, heads = "num_key_value_heads", "num_attention_heads"
    if isinstance(values.get(kv), int) and values[kv] in (values.get(heads), 1):
        shrunk[kv] = shrunk[heads] if values[kv] == values.get(heads) else 1
    if values.get("head_dim") and values["head_dim"] == values.get("qk_rope_head_dim"):
        shrunk["head_dim"] = shrunk["qk_rope_head_dim"]  # latent attention
