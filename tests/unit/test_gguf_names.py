"""Parameters of transformers models and what llama.cpp calls them."""

from __future__ import annotations

from spikeinfer.compiler.gguf.names import ARCHITECTURES, architecture, tensor_names


def test_names_of_a_dense_layer() -> None:
    prefix = "model.layers.1."
    expected = {
        "model.embed_tokens.weight": ("token_embd.weight",),
        f"{prefix}self_attn.q_proj.weight": ("blk.1.attn_q.weight",),
        f"{prefix}self_attn.q_proj.bias": ("blk.1.attn_q.bias",),
        f"{prefix}self_attn.o_proj.weight": ("blk.1.attn_output.weight",),
        f"{prefix}mlp.down_proj.weight": ("blk.1.ffn_down.weight",),
        f"{prefix}input_layernorm.weight": ("blk.1.attn_norm.weight",),
        "model.norm.weight": ("output_norm.weight",),
        "lm_head.weight": ("output.weight",),
    }
    assert tensor_names("llama", 2, expected) == expected


def test_stacked_gate_and_up_are_two_tensors() -> None:
    expected = {
        "model.layers.0.mlp.experts.gate_up_proj": (
            "blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_up_exps.weight",
        ),
        "model.layers.0.mlp.experts.down_proj": ("blk.0.ffn_down_exps.weight",),
        "model.layers.0.mlp.gate.weight": ("blk.0.ffn_gate_inp.weight",),
    }
    assert tensor_names("qwen3_moe", 1, expected) == expected


def test_what_has_no_name_is_left_out() -> None:
    assert tensor_names("llama", 1, ["model.layers.1.self_attn.q_proj.weight", "x"]) == {}
    assert tensor_names("no-such-model", 1, ["model.norm.weight"]) == {}


def test_every_architecture_is_the_gguf_packages() -> None:
    assert all(architecture(model_type) for model_type in ARCHITECTURES)
