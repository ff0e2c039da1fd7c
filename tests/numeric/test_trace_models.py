"""Traced graphs of tiny random models against transformers in fp32: prefill, chunks, decode.

Windows and original lengths are shrunk below the prompt's length, so that it crosses them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import Graph, Interpreter, parse_graph, print_graph, verify
from spikeinfer.errors import SpikeError
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig

LENGTH = 24
# fp32 rounding over a few layers with logits of size about 1: batched and stepwise products add
# up in another order.
TOLERANCE = 1e-5

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
ALTERNATE = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama-bias-head-dim": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 8, "head_dim": 16, "layer_types": ALTERNATE},
    ),
    "phi3": ("phi3", {"sliding_window": 8}),
    "phi3-longrope-long": (
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 16,
        },
    ),
    "phi3-longrope-short": (
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 64,
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "no_rope_layers": [1, 0]}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mixtral": ("mixtral", {**EXPERTS}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "gpt_oss-sinks": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
        },
    ),
    "deepseek_v3-mla": (
        "deepseek_v3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
        },
    ),
}


def _config(name: str) -> PretrainedConfig:
    model_type, changes = MODELS[name]
    return AutoConfig.for_model(model_type, **copy.deepcopy({**BASE, **changes}))


def _reference(config: PretrainedConfig) -> torch.nn.Module:
    """A random model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            start = 0 if matrix else parameter  # norms keep their centre: 1, or 0 where 1 is added
            parameter.copy_(start + torch.randn_like(parameter) * (0.15 if matrix else 0.1))
    return model


def _traced(config: PretrainedConfig, max_positions: int | None = None) -> Graph:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
        ).eval()
    return lower(trace(model, max_positions=max_positions))


def _steps(graph: Graph, weights: dict[str, torch.Tensor], tokens: torch.Tensor, sizes: list[int]):
    """Logits [B, sum(sizes), V] of the graph, fed in chunks of the given sizes."""
    batch = tokens.shape[0]
    empty = {
        name: torch.zeros(batch, int(state.type.shape[1]), 0, int(state.type.shape[3]))
        for name, state in graph.states.items()
    }
    interpreter = Interpreter(graph, weights.__getitem__, dict(empty))
    logits, done = [], 0
    for size in sizes:
        positions = torch.arange(done, done + size).expand(batch, size)
        step = {"tokens": tokens[:, done : done + size], "positions": positions}
        logits += interpreter.run(step)
        done += size
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", MODELS)
def test_graph_equals_transformers(name: str) -> None:
    config = _config(name)
    model = _reference(config)
    graph = _traced(config)
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text
    verify(graph)

    tokens = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(input_ids=tokens, use_cache=False).logits
        weights = model.state_dict()
        schedules = {
            "prefill": [LENGTH],
            "chunks": [7, 1, 10, 6],
            "decode": [5] + [1] * (LENGTH - 5),
            "decode from nothing": [1] * LENGTH,
        }
        worst = {}
        for schedule, sizes in schedules.items():
            got = _steps(graph, weights, tokens, sizes)
            worst[schedule] = (got - want).abs().max().item()
    print(name, {k: f"{v:.1e}" for k, v in worst.items()}, f"logits {want.abs().max():.1f}")
    assert max(worst.values()) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral-window"])
def test_graph_equals_transformers_with_its_own_cache(name: str) -> None:
    config = _config(name)
    model = _reference(config)
    tokens = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    sizes = [9] + [1] * (LENGTH - 9)
    with torch.no_grad():
        got = _steps(_traced(config), model.state_dict(), tokens, sizes)
        cache, want = DynamicCache(config=config), []
        for chunk in tokens.split(sizes, 1):
            want.append(model(input_ids=chunk, past_key_values=cache, use_cache=True).logits)
    assert (got - torch.cat(want, 1)).abs().max().item() <= TOLERANCE


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def _dynamic_rope() -> PretrainedConfig:
    return AutoConfig.for_model("llama", **{**BASE, "rope_parameters": DYNAMIC_ROPE})


def test_dynamic_ntk_is_frozen_within_the_original_length() -> None:
    config = _dynamic_rope()
    model = _reference(config)
    tokens = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        got = _steps(_traced(config, 64), model.state_dict(), tokens, [LENGTH])
        want = model(input_ids=tokens, use_cache=False).logits
    assert (got - want).abs().max().item() <= TOLERANCE


def test_dynamic_ntk_beyond_the_original_length_is_refused() -> None:
    with pytest.raises(SpikeError, match=r"SPK204 .*beyond 64 positions.*--max-seq-len 64"):
        _traced(_dynamic_rope(), 65)


def test_longrope_follows_the_length_that_is_asked_for() -> None:
    """The same model served short takes the short table."""
    config = _config("phi3-longrope-long")
    short, long = (_traced(config, n).constants["model.rotary_emb.inv_freq"] for n in (16, 17))
    rope = config.rope_parameters
    assert short.data is not None
    assert long.data is not None
    ratio = short.data / long.data
    expected = torch.tensor(rope["long_factor"]) / torch.tensor(rope["short_factor"])
    torch.testing.assert_close(torch.from_numpy(ratio), expected, atol=0, rtol=1e-6)


def test_nodes_know_their_module() -> None:
    graph = _traced(_config("gemma3_text"))
    scopes = {node.scope for node in graph.nodes}
    assert {"model.layers.1.self_attn", "model.layers.0.mlp.gate_proj", "lm_head"} <= scopes
    assert {n.scope for n in graph.nodes if n.op == "softmax"} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }
