"""The raising passes on traced tiny models: each keeps the logits, and nothing stays unraised.

Windows are shrunk below the prompt's length, so that masks are crossed; norm weights and biases
are random, so that a lost offset or a swapped operand shows.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache

import pytest
import torch
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import Graph, attribute, parse_graph, print_graph
from spikeinfer.passes.base import PassReport
from spikeinfer.passes.manager import run_pipeline
from spikeinfer.passes.pipeline import default_pipeline
from spikeinfer.passes.validate import ValidatePasses
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

LONGEST = 64
LAYERS = 2
BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATE = ["sliding_attention", "full_attention"]
GPT = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": LONGEST}
MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama with biases": {"mlp_bias": True, "attention_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "layer_types": ALTERNATE},
    "phi3": {"sliding_window": 8},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 2, "no_rope_layers": [1, 0]},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": LAYERS,
    },
    "gpt2": GPT,
    "gpt_neox": {"rotary_pct": 0.25},
    "gptj": {**GPT, "rotary_dim": 8},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "phi": {"partial_rotary_factor": 0.5},
    "glm": {"head_dim": 16},
    "cohere": {"use_qk_norm": True},
    "gpt_oss": {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
PRIMITIVES = {
    *("softmax", "exp", "amax", "rsqrt", "sqrt", "pow", "mean", "neg", "tanh", "erf", "sigmoid"),
    *("cos", "sin", "matmul", "silu", "gelu", "relu"),
}
ROUTED = {"gpt_oss", "mixtral", "qwen3_moe"}
"""Models with experts in place of MLPs."""
PLAIN_MLP = {"gpt2", "gpt_neox", "gptj", "falcon", "bloom", "phi"}
"""Models whose activation stands between two linears: no gate, nothing to fuse it with."""


@cache
def _traced(name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """IR text of a tiny model and its random parameters."""
    kind = name.split(" ")[0]
    config = AutoConfig.for_model(kind, **copy.deepcopy({**BASE, **MODELS[name]}))
    with torch.device("meta"):
        model = _model(config)
    text = print_graph(lower(trace(model, max_positions=LONGEST), str, kind))
    torch.manual_seed(0)
    weights = _model(config).state_dict()
    for tensor in weights.values():
        start = 0 if tensor.dim() > 1 else tensor
        tensor.copy_(start + 0.15 * torch.randn_like(tensor))
    return text, weights


def _model(config: PretrainedConfig) -> torch.nn.Module:
    kept = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(
        kept, attn_implementation="eager", dtype=torch.float32
    ).eval()


@cache
def _raised(name: str) -> tuple[Graph, list[PassReport]]:
    text, weights = _traced(name)
    graph = parse_graph(text)
    phases = [p for p in default_pipeline() if p.name in ("clean", "raise")]
    watch = ValidatePasses(weights.__getitem__, LONGEST)
    return graph, run_pipeline(graph, phases, watch)


@cache
def _placed(name: str) -> tuple[Graph, list[PassReport]]:
    """The whole pipeline, each pass validated."""
    graph = parse_graph(print_graph(_raised(name)[0]))
    phases = [p for p in default_pipeline() if p.name not in ("clean", "raise")]
    return graph, run_pipeline(graph, phases, ValidatePasses(_traced(name)[1].__getitem__, LONGEST))


def _inside_layers(graph: Graph) -> Counter[str]:
    inside = [n for n in graph.nodes if ".layers." in n.scope or ".h." in n.scope]
    return Counter(n.op for n in inside)


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_keeps_the_logits(name: str) -> None:
    _, reports = _raised(name)
    worst = max(
        r.facts["validated"]["largest relative difference"]  # type: ignore[index]
        for r in reports
        if r.modified
    )
    assert worst <= 2e-5  # fp32: other orders of sums, relative to the largest logit


@pytest.mark.parametrize("name", MODELS)
def test_no_primitive_is_left_inside_the_layers(name: str) -> None:
    graph, reports = _raised(name)
    ops = _inside_layers(graph)
    left = {op: n for op, n in ops.items() if op in PRIMITIVES}
    assert left == ({"gelu": LAYERS} if name in PLAIN_MLP else {})
    assert ops["attention"] == LAYERS
    assert not [m for r in reports for m in r.missed if r.name == "raise-attention"]


@pytest.mark.parametrize("name", MODELS)
def test_the_streaming_abi_is_available(name: str) -> None:
    """One token a row, attention on paged caches, and the same logits in ragged batches."""
    graph, reports = _placed(name)
    fired = {r.name: len(r.fired) for r in reports}
    assert fired["alias-kv"] == 2 * LAYERS
    assert fired["flatten-tokens"] == fired["select-logit-rows"] == 1
    ops = _inside_layers(graph)
    assert ops["paged_attention"] == LAYERS
    assert not [op for op in ("attention", "kv_append", "transpose") if ops[op]]


def test_mla_caches_heads_of_different_widths() -> None:
    """The latent rows are expanded when they are new, not at every step."""
    graph, _ = _placed("deepseek_v3")
    assert {s.type.shape[1:] for s in graph.states.values()} == {(4, 24), (4, 12)}


def test_alibi_is_a_slope_per_head() -> None:
    graph, _ = _placed("bloom")
    slopes = [attribute(n, "slopes") for n in graph.nodes if n.op == "paged_attention"]
    assert slopes == [pytest.approx([0.25, 0.0625, 0.015625, 0.00390625])] * LAYERS


@pytest.mark.parametrize("name", sorted(set(MODELS) - PLAIN_MLP - ROUTED))
def test_gated_mlps_are_one_node(name: str) -> None:
    graph, _ = _raised(name)
    ops = _inside_layers(graph)
    assert ops["gated_mlp"] == LAYERS
    assert not ops["silu"]
    assert not ops["gelu"]


@pytest.mark.parametrize(
    ("name", "scales", "windows", "softcap"),
    [
        ("llama", 0.25, [0, 0], 0.0),
        ("mistral", 0.25, [8, 8], 0.0),
        ("gemma2", 24**-0.5, [8, 0], 50.0),
        ("gemma3_text", 256**-0.5, [8, 0], 0.0),
        ("phi3", 0.25, [8, 8], 0.0),
        ("granite", 0.3, [0, 0], 0.0),
        ("gpt2", 0.25, [0, 0], 0.0),
        ("gpt_oss", 0.25, [8, 0], 0.0),
    ],
)
def test_attention_attributes(name: str, scales: float, windows: list[int], softcap: float) -> None:
    graph, _ = _raised(name)
    found = [n for n in graph.nodes if n.op == "attention"]
    assert [attribute(n, "scale") for n in found] == pytest.approx([scales] * LAYERS)
    assert [attribute(n, "window") for n in found] == windows
    assert {attribute(n, "softcap") for n in found} == {softcap}
    assert all(attribute(n, "causal") for n in found)
    assert {len(n.operands) for n in found} == {4 if name == "gpt_oss" else 3}


@pytest.mark.parametrize(
    ("name", "ropes", "style", "width"),
    [
        ("llama", 2 * LAYERS, "half", 16),
        ("smollm3", 2, "half", 16),
        ("gpt_neox", 2 * LAYERS, "half", 4),
        ("gptj", 2 * LAYERS, "interleaved", 8),
        ("glm", 2 * LAYERS, "interleaved", 8),
        ("cohere", 2 * LAYERS, "interleaved", 16),
        ("gpt_oss", 2 * LAYERS, "half", 16),
    ],
)
def test_rope_is_token_major(name: str, ropes: int, style: str, width: int) -> None:
    graph, _ = _raised(name)
    found = [n for n in graph.nodes if n.op == "rope"]
    assert len(found) == ropes
    assert {attribute(n, "style") for n in found} == {style}
    for node in found:
        batch, tokens, _, _ = node.result.shape
        assert (str(batch), str(tokens)) == ("B", "S")
        assert [t.shape[1:] for t in map(node.tensor, (1, 2))] == [(tokens, 1, width)] * 2


def test_no_transpose_is_left_but_around_attention() -> None:
    graph, _ = _raised("gemma3_text")
    users = {id(o) for n in graph.nodes if n.op in ("attention", "concat") for o in n.operands}
    stray = [
        n
        for n in graph.nodes
        if n.op == "transpose"
        and id(n.result) not in users
        and n.value(0).node not in [a for a in graph.nodes if a.op == "attention"]
    ]
    assert not stray
