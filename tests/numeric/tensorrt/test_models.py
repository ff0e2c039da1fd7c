"""Traced tiny models as TensorRT networks: every structure is stated, and equal to its graph.

Windows and positions are shrunk, so that masks are crossed. What can't be stated is refused by its
own name, before anything is built.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from spikeinfer.compiler.assembly.pipeline import NOT_FOR_TENSORRT
from spikeinfer.compiler.backends.tensorrt import Target, check_network, plan_network
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import Graph, constant_tensor
from spikeinfer.errors import SpikeError
from spikeinfer.passes.assign_precision import AssignPrecision
from spikeinfer.passes.base import Pass
from spikeinfer.passes.manager import Phase, run_pipeline
from spikeinfer.passes.pipeline import configure, default_pipeline
from transformers import AutoConfig, AutoModelForCausalLM

trt = pytest.importorskip("tensorrt_rtx")

LONGEST = 24
TARGET = Target(("sm89",), capacity=LONGEST, max_batch_size=2, max_num_tokens=8)
BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16},
    "gemma3_text": {"hidden_size": 96, "sliding_window": 8, "head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 8},
    "gpt_neox": {"rotary_pct": 0.25},
    "bloom": {"n_layer": 2, "n_head": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
                    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
                    "first_k_dense_replace": 2},
}  # fmt: skip


@cache
def placed(name: str, **more: Any) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph of a random tiny model after this backend's passes, and its weights."""
    config = AutoConfig.for_model(name, **copy.deepcopy({**BASE, **MODELS.get(name, {}), **more}))
    with torch.device("meta"):
        meta = _model(config)
    graph = lower(trace(meta, max_positions=LONGEST), str, name)
    torch.manual_seed(0)
    weights = _model(config).state_dict()
    for tensor in weights.values():
        tensor.copy_((tensor if tensor.dim() < 2 else 0) + 0.15 * torch.randn_like(tensor))

    def with_options(step: Pass) -> Pass:
        if isinstance(step, AssignPrecision):
            options = {"dtype": "float16", "longest": LONGEST, "round_outputs": True}
            return replace(step, parameters=weights.__getitem__, **options)
        return step

    phases = configure(default_pipeline(), without=NOT_FOR_TENSORRT)
    run_pipeline(graph, [Phase(p.name, tuple(map(with_options, p.passes))) for p in phases])
    for const in graph.constants.values():
        const.format = "f16" if const.format == "f32" and const.data is None else const.format
    return graph, weights


def _model(config: Any) -> Any:
    kept = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(
        kept, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("name", MODELS)
def test_the_network_of_a_model_equals_its_graph(name: str) -> None:
    from spikeinfer.compiler.backends.tensorrt.network import define

    graph, weights = placed(name)

    def constants(const: str) -> Any:
        return constant_tensor(graph.constants[const], weights.__getitem__).numpy()

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    plan = plan_network(graph, TARGET)
    network = define(trt, builder.create_network(0), plan, constants)
    assert check_network(network.definition, graph, constants, TARGET) == []
    used = {layer.kind for layer in plan.layers}
    assert "kv_cache_update" in used
    assert ("attention" in used) == (name not in ("gemma2", "bloom", "deepseek_v3"))
    rotates = name not in ("gpt2", "bloom")
    assert ("rotary_embedding" in used) == rotates
    widened = next(layer for layer in plan.layers if "logits" in layer.outputs)
    assert widened.kind == "cast"
    assert plan.tensors[widened.inputs[0]].dtype == "f16"  # so the head reads an f16 matrix


def test_experts_are_refused_by_name() -> None:
    graph, _ = placed("mixtral", num_local_experts=4)
    with pytest.raises(SpikeError, match=r"SPK525 .*route.*no layers for route.*ONNX Runtime"):
        plan_network(graph, TARGET)
