"""Tiny traced models with random weights, for tests that plant faults or look for false alarms.

Windows are shorter than the prompts. Norm weights, biases and sinks are random, so that a lost or
swapped one shows.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import print_graph
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

LONGEST = 64
BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATE = ["sliding_attention", "full_attention"]
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "mha": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral": {"sliding_window": 8},
    "qwen3": {"head_dim": 32},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "layer_types": ALTERNATE},
    "phi3": {"sliding_window": 8},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "gpt2": GPT,
    "gpt_neox": {"rotary_pct": 0.25},
    "glm": {"head_dim": 16},
    "cohere": {"use_qk_norm": True},
    "gpt_oss": {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def _model(name: str) -> torch.nn.Module:
    options = copy.deepcopy({**BASE, **MODELS[name]})
    config: PretrainedConfig = AutoConfig.for_model(options.pop("model_type", name), **options)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()


@cache
def traced(name: str) -> str:
    """IR text of a tiny model."""
    with torch.device("meta"):
        model = _model(name)
    return print_graph(lower(trace(model, max_positions=LONGEST), str, name))


@cache
def _state(name: str) -> dict[str, torch.Tensor]:
    return _model(name).state_dict()


def weights(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random parameters of a tiny model: around 1 for norms, around 0 for everything else."""
    generator = torch.Generator().manual_seed(seed)
    found, tensors = {}, {}
    for parameter, tensor in _state(name).items():
        noise = 0.15 * torch.randn(tensor.shape, generator=generator)
        value = noise if tensor.dim() > 1 else tensor + noise
        found[parameter] = tensors.setdefault(tensor.data_ptr(), value)  # tied ones stay tied
    return found
