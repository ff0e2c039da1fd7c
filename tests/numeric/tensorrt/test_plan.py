"""The plan as data: deterministic, complete, and refused where the network API has no words."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from spikeinfer.compiler.backends.tensorrt import Int4Matrix, Target, memory_report, plan_network
from spikeinfer.compiler.backends.tensorrt.constants import rounded, widened
from spikeinfer.compiler.ir import DType
from spikeinfer.errors import SpikeError

from .tiny_model import CAPACITY, TARGET, VOCAB, constants, graph


def document(**options: Any) -> dict[str, Any]:
    tiny = graph(**options)
    return json.loads(plan_network(tiny, TARGET).to_json(constants(tiny)))


def test_a_plan_is_the_same_every_time() -> None:
    assert document() == document()
    assert plan_network(graph(), TARGET).to_json() == plan_network(graph(), TARGET).to_json()


def test_a_plan_states_the_interface() -> None:
    plan = document()
    caches = [f"layers.{i}.{part}" for i in (0, 1) for part in ("key", "value")]
    step = ["tokens", "positions", "write_indices", "kv_lens", "logit_rows"]
    assert [t["name"] for t in plan["inputs"]] == [*step, *(f"{c}.past" for c in caches)]
    assert [t["name"] for t in plan["outputs"]] == ["logits", *(f"{c}.present" for c in caches)]
    assert plan["outputs"][0] == {"name": "logits", "dtype": "f32", "shape": ["B", "R", VOCAB]}
    assert plan["inputs"][5]["shape"] == ["B", 1, CAPACITY, 32]
    assert [p["name"] for p in plan["profiles"]] == ["prefill", "decode"]


def test_constants_are_named_by_the_hash_of_their_bytes() -> None:
    tiny = graph()
    stored = {c["name"]: c for c in document()["constants"]}
    head = rounded(constants(tiny)("head"), "f16")
    assert stored["@head"]["sha256"] == hashlib.sha256(head.tobytes()).hexdigest()
    matrix = constants(tiny)("q1")
    assert stored["@q1"]["dtype"] == "int4"
    assert stored["@q1"]["sha256"] == hashlib.sha256(matrix.packed.tobytes()).hexdigest()
    assert stored["@q1.scales"]["sha256"] == hashlib.sha256(matrix.scales.tobytes()).hexdigest()


def test_without_weights_a_plan_has_no_hashes() -> None:
    plan = json.loads(plan_network(graph(), TARGET).to_json())
    assert not any("sha256" in c for c in plan["constants"])


def test_memory_is_counted_from_the_plan() -> None:
    report = memory_report(plan_network(graph(), TARGET))
    assert report.caches == 2 * 2 * 2 * CAPACITY * 32 * 2  # sequences, layers, k and v, f16
    assert report.cache_per_token == 2 * 2 * 32 * 2
    assert report.by_type["int4"] == 2 * (5 * 64 * 64 + 2 * 32 * 64) // 2
    assert report.logits == {"prefill": 8 * VOCAB * 4, "decode": 2 * VOCAB * 4}
    assert report.total > report.weights + report.caches


@pytest.mark.parametrize(
    ("attn", "message"),
    [(", causal=false", "SPK526 .*later tokens")],
)
def test_an_attention_without_words_is_refused(attn: str, message: str) -> None:
    with pytest.raises(SpikeError, match=message):
        plan_network(graph(attn=(attn, "")), TARGET)


def test_an_asymmetric_format_is_refused() -> None:
    tiny = graph()
    tiny.constants["up1"].format = "q4_k"
    with pytest.raises(SpikeError, match=r"SPK525 .*@up1 is stored as q4_k, not int4_sym"):
        plan_network(tiny, TARGET)


def test_int4_needs_an_architecture_that_has_it() -> None:
    with pytest.raises(SpikeError, match=r"SPK522 .*int4 .*sm75"):
        plan_network(graph(), Target(("sm75",), capacity=CAPACITY, max_num_tokens=8))


def test_rounding_is_to_nearest_even_in_both_types() -> None:
    exact = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-9, -3.14159, 6e-8, 0.0], np.float32)
    import torch

    for dtype, kind in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        judged = torch.from_numpy(exact).to(kind).float().numpy()
        assert np.array_equal(widened(rounded(exact, dtype), dtype), judged)


def test_what_a_type_does_not_hold_is_refused() -> None:
    big = np.array([1.0, 7e4], np.float32)
    with pytest.raises(SpikeError, match=r"SPK531 .*w holds 70000, which f16 does not.*bfloat16"):
        rounded(big, "f16", "w")
    assert rounded(big, "bf16", "w").dtype == np.uint16


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_must_be_above_zero(scale: float) -> None:
    tiny = graph()
    plan = plan_network(tiny, TARGET)
    true = constants(tiny)
    scales = true("q1").scales.copy()
    scales[2, 1] = scale
    wrong = Int4Matrix(true("q1").packed, scales)
    with pytest.raises(SpikeError, match=r"SPK531 .*q1 has a block whose scale"):
        plan.to_json(lambda name: wrong if name == "q1" else true(name))


def test_bf16_values_make_a_bf16_network() -> None:
    tiny = graph()
    for value in tiny.values():
        value.precision = DType.BF16 if value.precision else None
    target = Target(("sm89",), DType.BF16, capacity=CAPACITY, max_num_tokens=8)
    assert plan_network(tiny, target).weight_types() == {"int4", "bf16", "f32"}
