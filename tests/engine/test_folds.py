"""Engines whose kernels compute norms, rotations and the choice on the way have the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from spikeinfer import SpikeEngine
from spikeinfer.compiler.backends import onnx_backend
from spikeinfer.compiler.backends.folds import Folds, find_folds
from spikeinfer.compiler.ir import Graph, Users, parse_graph
from spikeinfer.driver import BuildRequest, build
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    Olmo2Config,
    PreTrainedConfig,
)

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
FEWER_HEADS = {name: size for name, size in SIZES.items() if name != "head_dim"}
# Configuration, and what of `COUNTED` its graph has.
MODELS: dict[str, tuple[PreTrainedConfig, dict[str, int]]] = {
    # Norms of single heads. Norms behind a block add the stream.
    "gemma3": (Gemma3TextConfig(**SIZES), {"Qkv": 2, "RmsNorm": 4, "Head": 1}),
    # The logits are capped behind the product.
    "gemma2": (Gemma2Config(**SIZES), {"Qkv": 2, "RmsNorm": 4, "Choose": 1}),
    # Norms of all heads at once, no norm in front of the products.
    "olmo2": (Olmo2Config(**FEWER_HEADS), {"Qkv": 2, "RmsNorm": 4, "Head": 1}),
    # One add of embeddings, of tokens and of positions.
    "gpt2": (
        GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        {"Qkv": 2, "Head": 1, "Add": 1},
    ),
}
COUNTED = ("Qkv", "RmsNorm", "Rope", "Head", "Choose", "Add")


def built(source: Path, target: Path, **options: object) -> Path:
    build(BuildRequest(source, target, enable_streaming=True, golden="off", **options))  # type: ignore[arg-type]
    return target


def nodes_of(engine: Path) -> Counter[str]:
    model = onnx.load(engine / "rank0.engine", load_external_data=False)
    chains = [node for node in model.graph.node if node.op_type == "Chain"]
    texts = [attribute.s.decode() for node in chains for attribute in node.attribute]
    links = [line.split(" = ")[1].split()[0] for text in texts for line in text.splitlines()[:-1]]
    return Counter([*(node.op_type for node in model.graph.node), *links])


@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_separate_nodes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, expected = MODELS[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    folded = built(tmp_path / "source", tmp_path / "folded", quantization="q8_0")
    monkeypatch.setattr(onnx_backend, "find_folds", lambda graph: Folds(Users(graph)))
    apart = built(tmp_path / "source", tmp_path / "apart", quantization="q8_0")
    found, separate = nodes_of(folded), nodes_of(apart)
    assert {op: found[op] for op in COUNTED if found[op]} == expected
    assert found.total() < separate.total()
    tokens = [3, 141, 59, 26, 5, 35, 89, 79]
    with SpikeEngine(folded, threads=2) as one, SpikeEngine(apart, threads=2) as other:
        for chunk in (None, 3, 1):
            np.testing.assert_array_equal(
                one.score(tokens, chunk_tokens=chunk), other.score(tokens)
            )
        greedy = one.complete(tokens, max_tokens=12, ignore_eos=True).token_ids
        assert greedy == other.complete(tokens, max_tokens=12, ignore_eos=True).token_ids
        # A penalty of nothing: the same choice, from logits in Python.
        slow = one.complete(tokens, max_tokens=12, ignore_eos=True, repetition_penalty=1 + 1e-12)
        assert greedy == slow.token_ids


STEP = """graph step fused {{
  input %x : f32[T, 8]
  input %slots : i32[T]
  input %seq_starts : i32[B1]
  input %kv_lens : i32[B]
  input %block_tables : i32[B, M]
  input %cos : f32[T, 1, 4]
  input %sin : f32[T, 1, 4]
  const @n : f32[8] = parameter "norm.weight"
  const @q : f32[8, 8] = parameter "q_proj.weight"
  const @k : f32[4, 8] = parameter "k_proj.weight"
  const @v : f32[4, 8] = parameter "v_proj.weight"
  const @qn : f32[4] = parameter "q_norm.weight"
  state key : f32[N, 1, 4] axis=0 kind=kv
  state value : f32[N, 1, 4] axis=0 kind=kv
  %h = rms_norm(%x, @n, eps=1e-05) : f32[T, 8]
  %ql, %kl, %vl = qkv(%h, @q, @k, @v) : f32[T, 8], f32[T, 4], f32[T, 4]
  %qh = reshape(%ql, shape=[T, 2, 4]) : f32[T, 2, 4]
  %kh = reshape(%kl, shape=[T, 1, 4]) : f32[T, 1, 4]
  %vh = reshape(%vl, shape=[T, 1, 4]) : f32[T, 1, 4]
{way}
  %y = paged_attention({read}, %slots, %seq_starts, %kv_lens, %block_tables, key="key", value="value", scale=0.5) : f32[T, 2, 4]
  output %y{more}
}}
"""  # noqa: E501
TURN_Q = "  %qr = rope(%qh, %cos, %sin) : f32[T, 2, 4]\n"
TURN_K = "  %kr = rope(%kh, %cos, %sin) : f32[T, 1, 4]\n"
BACK = "  %kr = rope(%kh, %sin, %cos) : f32[T, 1, 4]\n"
NORM_V = "  %vn = rms_norm(%vh, @qn, eps=1e-05) : f32[T, 1, 4]\n"
TURNED = "%qr, %kr, %vh"


def folds_of(way: str, read: str, more: str = "") -> tuple[Graph, Folds]:
    graph = parse_graph(STEP.format(way=way, read=read, more=more))
    return graph, find_folds(graph)


@pytest.mark.parametrize(
    ("way", "read"),
    [
        (TURN_Q + TURN_K, TURNED),
        ("", "%qh, %kh, %vh"),
        ("  %qn = rms_norm(%qh, @qn, eps=1e-05) : f32[T, 2, 4]\n", "%qn, %kh, %vh"),
    ],
)
def test_ways_that_are_folded(way: str, read: str) -> None:
    graph, folds = folds_of(way, read)
    assert len(folds.rotated) == 1
    left = [node.op for node in graph.nodes if id(node) not in folds.inside]
    assert left == ["paged_attention"]


@pytest.mark.parametrize(
    ("way", "read", "more"),
    [
        pytest.param(TURN_Q + BACK, TURNED, "", id="other angles for keys"),
        pytest.param(TURN_Q, "%qr, %kh, %vh", "", id="queries alone turn"),
        pytest.param(TURN_Q + TURN_K, TURNED, "\n  output %kr", id="keys leave the graph"),
        pytest.param(TURN_Q + TURN_K, TURNED, "\n  output %kl", id="products leave the graph"),
        pytest.param(NORM_V, "%qh, %kh, %vn", "", id="values are normalised"),
        pytest.param("  %qa = neg(%qh) : f32[T, 2, 4]\n", "%qa, %kh, %vh", "", id="another op"),
        pytest.param("", "%qh, %vh, %kh", "", id="keys and values swapped"),
        pytest.param(
            TURN_Q + "  %qn = rms_norm(%qr, @qn, eps=1e-05) : f32[T, 2, 4]\n" + TURN_K,
            "%qn, %kr, %vh",
            "",
            id="a norm behind the rotation",
        ),
    ],
)  # fmt: skip
def test_ways_that_stay_apart(way: str, read: str, more: str) -> None:
    graph, folds = folds_of(way, read, more)
    assert not folds.rotated
    left = [node.op for node in graph.nodes if id(node) not in folds.inside]
    assert "qkv" in left
    assert "reshape" in left


def test_a_norm_with_two_readers_stays() -> None:
    _, folds = folds_of("", "%qh, %kh, %vh", "\n  output %h")
    assert not folds.norms
