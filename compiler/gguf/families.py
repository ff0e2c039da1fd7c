"""The architectures whose metadata we understand: GGUF's keys beside the fields of config.json.

One table serves both directions: metadata become a config (`config.py`), an engine's config
becomes metadata (`metadata.py`). A key that isn't in the table is never skipped: it may change what
the model computes. Source of the meanings: llama.cpp's src/models/*.cpp and conversion/*.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
HEAD = {"attention.key_length": "head_dim"}
EXPERTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
DENSE = {**SIZES, **RMS, **HEAD}


@dataclass(frozen=True)
class Family:
    """One `general.architecture`.

    Attributes:
        model_type: transformers' name.
        fields: key (after the architecture) -> field of config.json.
        implied: config fields that llama.cpp has no key for, with the value that it computes with.
        biases: config field that says so -> the tensor of layer 0 that is there if it is true.
        rope: has rotary embeddings.
        sliding_pattern: every n-th layer attends to everything; 0 without a sliding window.
        permuted: rows of q and k are interleaved for llama.cpp's rotation of pairs.
        norm_shift: what is added to norms' weights in the file.
        transposed: suffixes of tensors that transformers stores the other way round.
    """

    model_type: str
    fields: Mapping[str, str]
    implied: Mapping[str, Any] = default(default_factory=dict)
    biases: Mapping[str, str] = default(default_factory=dict)
    rope: bool = True
    sliding_pattern: int = 0
    permuted: bool = False
    norm_shift: float = 0.0
    transposed: tuple[str, ...] = ()


LLAMA_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
SILU = {"hidden_act": "silu"}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", DENSE, SILU, LLAMA_BIASES, permuted=True),
    "qwen2": Family("qwen2", {**SIZES, **RMS}, {**SILU, "use_sliding_window": False}),
    "qwen3": Family("qwen3", DENSE, {**SILU, "use_sliding_window": False},
                    {"attention_bias": "blk.0.attn_q.bias"}),
    "qwen2moe": Family(
        "qwen2_moe",
        {**SIZES, **RMS, **EXPERTS, "expert_count": "num_experts",
         "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {**SILU, "norm_topk_prob": False, "use_sliding_window": False},
    ),
    "qwen3moe": Family(
        "qwen3_moe", {**DENSE, **EXPERTS, "expert_count": "num_experts"},
        {**SILU, "norm_topk_prob": True, "use_sliding_window": False},
        {"attention_bias": "blk.0.attn_q.bias"},
    ),
    "gemma2": Family(
        "gemma2",
        {**DENSE, "attention.sliding_window": "sliding_window",
         "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "sliding_window": 4096},
        sliding_pattern=2, norm_shift=1.0,
    ),
    "gemma3": Family(
        "gemma3_text",
        {**DENSE, "attention.sliding_window": "sliding_window",
         "final_logit_softcapping": "final_logit_softcapping"},
        {**GEMMA, "final_logit_softcapping": None},
        sliding_pattern=6, norm_shift=1.0,
    ),
    "gpt2": Family(
        "gpt2",
        {"context_length": "n_positions", "block_count": "n_layer", "embedding_length": "n_embd",
         "feed_forward_length": "n_inner", "attention.head_count": "n_head",
         "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        {"activation_function": "gelu_new"}, rope=False,
        transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
    ),
    "starcoder2": Family(
        "starcoder2",
        {**SIZES, "attention.layer_norm_epsilon": "norm_epsilon"},
        {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
        {"use_bias": "blk.0.attn_q.bias"},
    ),
}  # fmt: skip
"""By `general.architecture`."""

HARMLESS = (
    "vocab_size",  # the embedding says it
    "attention.value_length",  # as long as keys, which is checked
    "attention.causal",
    "rope.dimension_count",  # the whole head, which is checked
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "attention.sliding_window_pattern",
)
"""Keys that are understood although no field of config.json is their equal."""


def interleaved_heads(family: Family, tensor: str, config: Mapping[str, Any]) -> int:
    """Heads of a tensor whose rows llama.cpp interleaves, 0 of any other."""
    fields = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    field = next((field for part, field in fields.items() if part in tensor), None)
    return int(config[field]) if family.permuted and field else 0
