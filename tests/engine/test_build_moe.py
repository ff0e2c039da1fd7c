"""Whole builds of small random models with experts, compared with transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spikeinfer import SpikeEngine
from spikeinfer.compiler.ir import parse_graph
from spikeinfer.driver import BuildRequest, BuildResult, build
from transformers import AutoConfig, AutoModelForCausalLM

# Logits of an unquantised engine differ by the order of sums only; a choice of experts that
# flipped would show as 0.1 and more. 2e-5 is the worst measured.
LOGIT_TOLERANCE = 1e-3
LENGTH = 40

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
LOCAL, PLAIN = {"num_local_experts": 4}, {"num_experts": 4}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": LOCAL,
    "qwen2_moe": PLAIN | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": PLAIN | {"norm_topk_prob": True},
    "olmoe": PLAIN,
    "gpt_oss": LOCAL | {"sliding_window": 8},
    "granitemoe": LOCAL,
    "minimax_m2": LOCAL | {"rotary_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": PLAIN | {"moe_topk": 2},
    "dots1": GROUPED,
    "deepseek_v3": GROUPED | LATENT,
}
VALIDATED = ("mixtral", "gpt_oss", "dots1", "deepseek_v3")
FUNCTIONAL = ("deepseek_v3",)  # its latent attention reads the whole cache


def source(name: str, folder: Path, **changes: Any) -> Any:
    """A random model whose attention and routing are far from uniform, saved to a folder."""
    config = AutoConfig.for_model(name, **(BASE | MODELS[name] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in (*model.parameters(), *_corrections(model)):
            matrix = parameter.dim() > 1
            start = 0 if matrix else parameter
            parameter.copy_(start + torch.randn_like(parameter) * (0.15 if matrix else 0.1))
    model.save_pretrained(folder)
    return model


def _corrections(model: Any) -> list[Any]:
    return [b for name, b in model.named_buffers() if "correction" in name]


def built(folder: Path, **options: Any) -> BuildResult:
    given = {"dtype": "float32", "golden": "off"} | options
    return build(BuildRequest(folder / "model", folder / "engine", **given))


def fired(result: BuildResult) -> dict[str, int]:
    return {r.name: len(r.fired) for r in result.reports}


@pytest.mark.parametrize("name", MODELS)
def test_engines_with_experts_equal_the_source(name: str, tmp_path: Path) -> None:
    """Prefill, chunks, and all tokens one by one; four validate every pass on the way."""
    model = source(name, tmp_path / "model")
    streaming, validated = name not in FUNCTIONAL, name in VALIDATED
    result = built(tmp_path, enable_streaming=streaming, verify_passes=validated)
    layers = 1 if name in ("dots1", "deepseek_v3") else 2
    assert fired(result)["raise-moe"] == fired(result)["raise-route"] == layers
    ids = np.random.default_rng(0).integers(5, 96, LENGTH).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    with SpikeEngine(tmp_path / "engine") as engine:
        for options in ({}, {"chunk_tokens": 7}, {"chunk_tokens": 1}):
            assert np.abs(engine.score(ids, **options) - want).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["dots1", "qwen2_moe"])
def test_unraised_routers_stream_too(name: str, tmp_path: Path) -> None:
    model = source(name, tmp_path / "model")
    built(tmp_path, enable_streaming=True, without=("raise-route",))
    ids = np.random.default_rng(1).integers(5, 96, LENGTH).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    with SpikeEngine(tmp_path / "engine") as engine:
        assert np.abs(engine.score(ids) - want).max() <= LOGIT_TOLERANCE


def test_nothing_of_the_router_is_left_in_primitives(tmp_path: Path) -> None:
    source("dots1", tmp_path / "model")
    built(tmp_path, enable_streaming=True, dump_ir=tmp_path / "ir")
    last = max((tmp_path / "ir").glob("*.ir"), key=lambda p: int(p.name.split("-")[0]))
    ops = {n.op for n in parse_graph(last.read_text()).nodes if ".mlp" in n.scope}
    assert {"linear", "route", "moe"} <= ops <= {"linear", "route", "moe", "gated_mlp", "add"}


def test_q4_k_m_of_experts(tmp_path: Path) -> None:
    """Experts get k-quants, routers stay f32; a token alone has the bits it has in a batch."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 256}
    source("mixtral", tmp_path / "model", **sizes)
    result = built(tmp_path, enable_streaming=True, quantization="q4_k_m")
    formats: dict[str, set[str]] = {}
    for choice in result.plan.choices:
        formats.setdefault(choice.role, set()).add(choice.format)
    assert formats["ffn_gate"] == formats["ffn_up"] == {"q4_k"}
    assert formats["ffn_down"] <= {"q4_k", "q6_k"}
    assert formats["ffn_gate_inp"] == {"f32"}
    ids = np.random.default_rng(2).integers(5, 256, LENGTH).tolist()
    with SpikeEngine(tmp_path / "engine") as engine:
        whole = engine.score(ids)
        assert np.isfinite(whole).all()
        np.testing.assert_array_equal(engine.score(ids, chunk_tokens=1), whole)
        prompts = [ids[:5], ids[5:18], ids[18:19]]
        alone = [engine.complete(p, max_tokens=8).token_ids for p in prompts]
        together = [c.token_ids for c in engine.generate_batch(prompts, max_tokens=8)]
    assert together == alone


def test_a_budget_for_experts(tmp_path: Path) -> None:
    """Gradients reach stacked experts; the gate reads random ids, as there is no tokenizer."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 256}
    source("mixtral", tmp_path / "model", **sizes)
    loose = {"mean_kl": 9.0, "p99_kl": 30.0, "top1": 0.0, "perplexity_ratio": 99.0}
    result = built(
        tmp_path, enable_streaming=True, max_bpw=5.0, golden="auto", thresholds=loose
    )  # fmt: skip
    assert 4.8 < result.plan.bits_per_weight <= 5.0
    experts = {c.format for c in result.plan.choices if len(c.shape) == 3}
    assert experts
    assert "f32" not in experts
    assert result.config is not None
    shares = result.config.spike.report["share of KL"]
    assert isinstance(shares, dict)
    assert all(shares[c.name] > 0 for c in result.plan.choices if len(c.shape) == 3)


def test_half_precision_that_flips_a_near_tie_is_no_wrong_pass(tmp_path: Path) -> None:
    """Rounding moves two experts' scores past each other: validation goes on from the choice."""
    source("qwen2_moe", tmp_path / "model")
    result = built(tmp_path, enable_streaming=True, dtype="float16", verify_passes=True)
    (report,) = (r for r in result.reports if r.name == "assign-precision")
    validated = report.facts["validated"]
    assert isinstance(validated, dict)
    assert validated["scenarios with another choice"] == ["long cache"]
    assert validated["largest relative difference"] <= validated["limit"] == 0.03
