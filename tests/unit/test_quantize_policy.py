"""Storage formats chosen for whole models, tensor by tensor against llama.cpp's own choice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spikeinfer import SpikeError
from spikeinfer.compiler.quantize import (
    Given,
    ModelFacts,
    Quantization,
    Role,
    StoragePlan,
    TensorSpec,
    plan,
)
from spikeinfer.kernels import Format, block_elements

LLAMA_CPP = Path(__file__).with_name("quantize_policy_llama_cpp.txt")


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; `key` is its name in the file of llama.cpp's answers."""

    key: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool = True
    experts: int = 0
    fused_qkv: bool = False

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(self.layers, self.heads, self.kv_heads, self.experts, self.tied)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor, named as in GGUF but for the suffix."""
        yield TensorSpec("token_embd", Role.TOKEN_EMBD, (self.vocab, self.hidden))
        if not self.tied:
            yield TensorSpec("output", Role.OUTPUT, (self.vocab, self.hidden))
        for layer in range(self.layers):
            for role, shape in self.layer_shapes():
                stack = "_exps" if len(shape) == 3 else ""
                yield TensorSpec(f"blk.{layer}.{role}{stack}", role, shape, layer)
            yield TensorSpec(f"blk.{layer}.attn_norm", Role.NORM, (self.hidden,), layer)

    def layer_shapes(self) -> Iterator[tuple[Role, tuple[int, ...]]]:
        q, kv, hidden = self.heads * self.head, self.kv_heads * self.head, self.hidden
        if self.fused_qkv:
            yield Role.ATTN_QKV, (q + 2 * kv, hidden)
        else:
            yield from ((Role.ATTN_Q, (q, hidden)), (Role.ATTN_K, (kv, hidden)))
            yield Role.ATTN_V, (kv, hidden)
        yield Role.ATTN_OUTPUT, (hidden, q)
        stack = (self.experts,) if self.experts else ()
        if self.experts:
            yield Role.ROUTER, (self.experts, hidden)
        yield Role.FFN_GATE, (*stack, self.feed_forward, hidden)
        yield Role.FFN_UP, (*stack, self.feed_forward, hidden)
        yield Role.FFN_DOWN, (*stack, hidden, self.feed_forward)


SHAPES = (
    Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152),
    Shape("gemma3-270m", 18, 640, 2048, 4, 1, 256, 262144),
    Shape("llama-1b", 16, 2048, 8192, 32, 8, 64, 128256),
    Shape("llama-8b", 32, 4096, 14336, 32, 8, 128, 128256, tied=False),
    Shape("llama-70b", 80, 8192, 28672, 64, 8, 128, 128256, tied=False),
    Shape("llama-65b", 80, 8192, 22016, 64, 64, 128, 32000, tied=False),
    Shape("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, tied=False, experts=8),
    Shape("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 128, 151936, tied=False, experts=128),
    Shape("fused-qkv", 26, 1152, 6912, 4, 1, 256, 32064, tied=False, fused_qkv=True),
    Shape("odd-width", 5, 100, 352, 5, 5, 20, 1000, tied=False),
)


def shape_named(key: str) -> Shape:
    return next(shape for shape in SHAPES if shape.key == key)


def planned(key: str, quantization: str) -> StoragePlan:
    shape = shape_named(key)
    return plan(Quantization(quantization), list(shape.tensors()), shape.facts)


def llama_cpp_formats(key: str, quantization: str) -> dict[str, str]:
    """Tensor name to llama.cpp's format, from lines such as ``key q4_k_m attn_v q6_k 0-3,7``."""
    formats = {}
    for line in LLAMA_CPP.read_text().splitlines():
        if not line.startswith(f"{key} {quantization} "):
            continue
        _, _, role, form, *layers = line.split()
        if not layers:
            formats[role] = form
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", layers[0] if layers else ""):
            for layer in range(int(first), int(last or first) + 1):
                formats[f"blk.{layer}.{role}"] = form
    return formats


@pytest.mark.parametrize(
    "quantization",
    [
        "q2_k",
        "q3_k_m",
        "q4_0",
        "q4_1",
        "q4_k_s",
        "q4_k_m",
        "q5_0",
        "q5_1",
        "q5_k_m",
        "q6_k",
        "q8_0",
        "f16",
    ],
)
@pytest.mark.parametrize("key", [shape.key for shape in SHAPES])
def test_every_tensor_gets_llama_cpps_format(key: str, quantization: str) -> None:
    theirs = llama_cpp_formats(key, quantization)
    ours = planned(key, quantization).formats
    assert ours.keys() == theirs.keys()
    assert ours == theirs


@pytest.mark.parametrize(
    ("key", "file_mib"), [("smollm2-135m", 101), ("gemma3-270m", 241), ("llama-1b", 766)]
)
def test_sizes_are_those_of_llama_cpps_files(key: str, file_mib: int) -> None:
    # Measured sizes of the GGUF files; each also holds its vocabulary, which takes 2 to 6 MiB.
    rest = file_mib - planned(key, "q4_k_m").bytes / 2**20
    assert 1.5 < rest < 7


def test_the_plan_says_why_and_what_did_not_fit() -> None:
    choices = {c.name: c for c in planned("smollm2-135m", "q4_k_m").choices}
    query = choices["blk.5.attn_q"]
    assert (query.format, query.why) == ("q5_0", "base format")
    assert query.fallback == "K = 576 is not a multiple of 256, which q4_k needs"
    assert choices["blk.0.attn_norm"].format == "f32"
    assert choices["blk.0.ffn_down"].fallback == ""
    assert choices["token_embd"].why == "output head, K not in 256s"
    seventy = {c.name: c for c in planned("llama-70b", "q4_k_m").choices}
    assert seventy["blk.11.attn_v"].format == "q5_k"
    assert seventy["blk.11.attn_v"].why == "values shared by many heads, 80 layers"


def test_short_last_blocks_are_stored_when_asked_for() -> None:
    """Smaller than llama.cpp's fallback, named in the plan and counted in its bits."""
    specs = [TensorSpec(f"{k}", Role.ATTN_Q, (32, k), 0) for k in (576, 640, 512, 96)]
    given = {s.name: Given("q4_k_short", "recipe") for s in specs}
    result = plan(Quantization.Q4_K_M, specs, ModelFacts(1, 4, 4), given)
    choices = {c.name: c for c in result.choices}
    assert [(c.format, c.why, c.bytes // 32) for c in result.choices] == [
        ("q4_k", "recipe, last block of 64", 2 * 144 + 39),
        ("q4_k", "recipe, last block of 128", 2 * 144 + 74),
        ("q4_k", "recipe", 2 * 144),
        ("q5_0", "recipe", 3 * 22),
    ]
    assert choices["96"].fallback == "K = 96 is not a multiple of 256, which q4_k needs"
    mixed = plan(Quantization.Q4_K_M, specs[:2], ModelFacts(1, 4, 4))
    asked = plan(Quantization.Q4_K_M, specs[:2], ModelFacts(1, 4, 4), given)
    assert [c.format for c in mixed.choices] == ["q5_0", "q5_0"]
    assert asked.bits_per_weight == pytest.approx(4.533, abs=1e-3)
    assert mixed.bits_per_weight == 5.5


def test_report_table_and_bits_per_weight() -> None:
    result = planned("llama-8b", "q4_k_m")
    assert result.bits_per_weight == pytest.approx(4.9, abs=0.05)  # llama.cpp reports 4.89 BPW
    rows = result.table()
    assert sum(int(str(row["tensors"])) for row in rows) == len(result.choices)
    sizes = [float(str(row["megabytes"])) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == pytest.approx(result.bytes / 1e6, abs=0.01)


def test_a_plan_does_not_depend_on_names_or_on_the_order_of_layers() -> None:
    shape = shape_named("llama-8b")
    specs = list(shape.tensors())
    renamed = [TensorSpec(f"t{i}", s.role, s.shape, s.layer) for i, s in enumerate(specs)]
    forward = plan(Quantization.Q4_K_M, renamed, shape.facts).formats
    backward = plan(Quantization.Q4_K_M, renamed[::-1], shape.facts).formats
    assert forward == backward
    assert list(forward.values()) == list(planned("llama-8b", "q4_k_m").formats.values())


@given(
    st.sampled_from(list(Quantization)),
    st.sampled_from(list(Role)),
    st.integers(1, 4096),
    st.integers(0, 79),
    st.booleans(),
)
def test_every_format_fits_its_rows(
    quantization: Quantization, role: Role, k: int, layer: int, tied: bool
) -> None:
    facts = ModelFacts(80, 64, 8, experts=8, tied=tied)
    result = plan(quantization, [TensorSpec("w", role, (32, k), layer)], facts)
    (choice,) = result.choices
    assert k % block_elements(cast(Format, choice.format)) == 0
    assert choice.bytes > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Q4_K_M", "q4_k_m"), ("q4-k-m", "q4_k_m"), ("q4_k", "q4_k_m"), ("q5_k", "q5_k_m"),
     ("Q3_K", "q3_k_m"), ("q2_k", "q2_k"), ("q4_k_s", "q4_k_s"), ("fp16", "f16"),
     ("float16", "f16"), ("bfloat16", "bf16"), ("float32", "f32"), ("none", "bf16"),
     ("q8_0", "q8_0")],
)  # fmt: skip
def test_names_and_aliases(name: str, expected: str) -> None:
    assert Quantization.parse(name) == expected


@pytest.mark.parametrize(
    ("quantization", "guard"),
    [("q4_0", "q4_1"), ("q5_0", "q5_1"), ("q4_1", "q4_1"), ("q4_k_m", "")],
)
def test_importances_guard_the_first_down_projections(quantization: str, guard: str) -> None:
    """llama.cpp's rule for q4_0 and q5_0 with an imatrix: an eighth of the layers, no others."""
    shape = shape_named("llama-8b")
    name, specs = Quantization(quantization), list(shape.tensors())
    plain = plan(name, specs, shape.facts).formats
    weighed = plan(name, specs, replace(shape.facts, weighed=True)).formats
    first = [f"blk.{layer}.ffn_down" for layer in range(4)] if guard else []
    assert weighed == plain | dict.fromkeys(first, guard)


def test_none_keeps_the_dtype() -> None:
    assert Quantization.parse("none", "float32") is Quantization.F32
    assert Quantization.parse("auto", "torch.float16") is Quantization.F16


@pytest.mark.parametrize("name", ["q5_k_s", "q3_k_l", "int4_awq", "fp8", "iq4_xs"])
def test_known_names_that_are_not_in_this_version(name: str) -> None:
    with pytest.raises(SpikeError, match=r"SPK402.*not in this version") as caught:
        Quantization.parse(name)
    assert "nearest" in caught.value.remedy


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(SpikeError, match=r"SPK401.*Did you mean q4_k_m\?"):
        Quantization.parse("q4_km")
    with pytest.raises(SpikeError, match=r"SPK401.*Known: q2_k, q3_k_m, .*, f16, bf16, f32"):
        Quantization.parse("zzz")


def test_shared_experts_do_not_shift_the_layers_of_stacked_ones() -> None:
    """With and without known layers, both down projections of a layer get the same format."""
    specs = [
        TensorSpec(f"{i}.{len(shape)}", Role.FFN_DOWN, shape, i)
        for i in range(16)
        for shape in ((4, 256, 256), (256, 256))
    ]
    facts = ModelFacts(layers=16, heads=4, kv_heads=4, experts=4)
    known = plan(Quantization.Q4_K_M, specs, facts).formats
    unknown = [TensorSpec(s.name, s.role, s.shape) for s in specs]
    assert plan(Quantization.Q4_K_M, unknown, facts).formats == known
    assert [known[f"{i}.3"] == "q6_k" for i in (0, 1, 2, 4, 14)] == [True, True, False, True, True]
