"""int4_sym: what TensorRT's dequantise layer gets is what was quantised, by ONNX's own reference of
that operator (output = q * scale, signed nibbles, one scale per 32 of K)."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from spikeinfer import kernels
from spikeinfer.compiler.quantize.int4 import has_positive_scales, signed_nibbles

Floats = NDArray[np.float32]


def weights(n: int = 48, k: int = 576, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, k)) * rng.lognormal(0, 1, (n, 1)) * 0.05).astype(np.float32)


def awkward() -> Floats:
    """Blocks of zeros, of one sign, of one value, tiny and huge."""
    x = weights(12, 96)
    x[0] = 0
    x[1] = np.abs(x[1])
    x[2] = -np.abs(x[2])
    x[3] = 0.25
    x[4] *= np.float32(1e-9)
    x[5] *= np.float32(1e6)
    x[6, :32] = 0
    x[7, 1:] = 0
    x[8] = -3.0
    return x


def onnx_dequantised(packed: NDArray[np.uint8], scales: NDArray[np.float16]) -> Floats:
    n, k = packed.shape[0], 2 * packed.shape[1]
    codes = helper.make_tensor("q", TensorProto.INT4, (n, k), packed.tobytes(), raw=True)
    scale = helper.make_tensor("s", TensorProto.FLOAT16, scales.shape, scales.tobytes(), raw=True)
    node = helper.make_node("DequantizeLinear", ["q", "s"], ["y"], axis=1, block_size=32)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT16, (n, k))
    graph = helper.make_graph([node], "g", [], [out], [codes, scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    onnx.checker.check_model(model)
    return np.asarray(ReferenceEvaluator(model).run(None, {})[0]).astype(np.float32)


@pytest.mark.parametrize("x", [weights(), awkward()], ids=["normal", "awkward"])
@pytest.mark.parametrize("weighted", [False, True])
def test_tensorrts_values_are_ours(x: Floats, weighted: bool) -> None:
    importance = np.linspace(0, 4, x.shape[1], dtype=np.float32) if weighted else None
    rows = kernels.quantize(x, "int4_sym", importance=importance)
    packed, scales = signed_nibbles(rows)
    assert (scales > 0).all()
    assert np.isfinite(scales).all()
    ours = kernels.dequantize(rows, "int4_sym", x.shape[1])
    # Theirs is rounded to fp16, the type of the layer's output.
    np.testing.assert_array_equal(onnx_dequantised(packed, scales), ours.astype(np.float16))


def test_error_feedback_keeps_scales_above_zero() -> None:
    """Codes that make up for earlier errors may want the other sign."""
    x = awkward()
    x[9:] = 0
    x[9:, 0] = 1e-3
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((300, 12)) @ rng.standard_normal((12, 96))
    moment = inputs.T @ inputs / 300 + 0.01 * np.eye(96)
    factor = np.linalg.cholesky(moment[::-1, ::-1])[::-1, ::-1].astype(np.float32)
    rows, errors = kernels.quantize_with_feedback(x, factor, "int4_sym")
    packed, scales = signed_nibbles(rows)
    assert (scales > 0).all()
    error = (x - onnx_dequantised(packed, scales)).astype(np.float64)
    real = ((error @ moment) * error).sum(1)
    # Rounding to fp16 comes on top of the quantiser's error: half a unit of 2^-11 of each value.
    slack = np.trace(moment) * (x.astype(np.float64) ** 2).sum(1) * 2.0**-20
    assert (real <= 1.05 * errors.min(1) + slack).all()
    assert errors[:, 2].sum() < errors[:, 0].sum()


def test_a_search_not_a_range() -> None:
    """Less error than the scale that just reaches both ends of each block."""
    x = weights()
    rows = kernels.quantize(x, "int4_sym")
    error = np.square(kernels.dequantize(rows, "int4_sym", 576) - x).sum()
    blocks = x.reshape(-1, 32)
    scale = np.maximum(blocks.max(1) / 7, -blocks.min(1) / 8)[:, None]
    plain = np.square(np.clip(np.round(blocks / scale), -8, 7) * scale - blocks).sum()
    assert error < 0.93 * plain
    assert (
        error
        < 1.05 * np.square(kernels.dequantize(kernels.quantize(x, "q4_0"), "q4_0", 576) - x).sum()
    )  # whose scale may have either sign


def test_same_bytes_for_any_number_of_threads_and_grouping() -> None:
    x = weights(13)
    rows = kernels.quantize(x, "int4_sym", 1)
    np.testing.assert_array_equal(rows, kernels.quantize(x, "int4_sym", 3))
    np.testing.assert_array_equal(rows[4:5], kernels.quantize(x[4:5], "int4_sym"))


@pytest.mark.parametrize("value", [np.nan, np.inf, 5e5])
def test_unstorable_values_are_refused_by_place(value: float) -> None:
    x = weights()
    x[3, 40] = value
    with pytest.raises(ValueError, match="row 3, column 40"):
        kernels.quantize(x, "int4_sym")


def test_q4_0_is_taken_over_where_its_scales_allow_it() -> None:
    rows = kernels.quantize(weights(), "q4_0")
    assert not has_positive_scales(rows)
    with pytest.raises(ValueError, match="not above zero"):
        signed_nibbles(rows)
    own = kernels.quantize(weights(), "int4_sym")
    assert has_positive_scales(own)
    np.testing.assert_array_equal(
        kernels.dequantize(own, "q4_0", 576), kernels.dequantize(own, "int4_sym", 576)
    )


def test_the_kernels_read_it() -> None:
    """A packed matrix gives the products of q4_0's kernels with the same blocks."""
    rows = kernels.quantize(weights(), "int4_sym")
    x = np.random.default_rng(1).standard_normal((3, 576)).astype(np.float32)
    formats: tuple[kernels.Format, ...] = ("q4_0", "int4_sym")
    results = [kernels.linear(x, kernels.pack(rows, fmt, 48, 576), fmt, 48) for fmt in formats]
    np.testing.assert_array_equal(results[0], results[1])
