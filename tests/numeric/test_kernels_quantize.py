"""Quantisers: the bytes of llama.cpp's reference, any number of threads, awkward values."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from spikeinfer import kernels
from spikeinfer.kernels import FORMATS, Format

BLOCKS = tuple(fmt for fmt in FORMATS if kernels.block_elements(fmt) > 1)
WEIGHTED = tuple(fmt for fmt in BLOCKS if fmt != "q8_0")

# First 16 hex digits of sha256 over what llama.cpp's quantize_row_*_ref (the copy in
# llama-cpp-python 0.3.36, ggml-quants.c built with gcc 12 -O2 -ffp-contract=off) write for the
# arrays that `weights` returns.
REFERENCE_DIGESTS: dict[str, dict[Format, str]] = {
    "normal": {
        "q8_0": "c6b0a56b16a50003", "q5_0": "3261a42881b60e92", "q5_1": "5258df9304386df7",
        "q4_0": "272312d9a0850927", "q4_1": "92d7cc624b06d351", "q2_k": "472ea1731eb345df",
        "q3_k": "e6983d955bbcfeb5", "q4_k": "2ef6670b8460d313", "q5_k": "51074348ddbfad07",
        "q6_k": "d183531fe53f3a57",
    },
    "sparse": {
        "q8_0": "30bd5ed8651a0b75", "q5_0": "31ef391a5e714a02", "q5_1": "cd12c6919f51ad6f",
        "q4_0": "23bc9c291ccde319", "q4_1": "f8b85a55dfe5766e", "q2_k": "7308774f05ee39b3",
        "q3_k": "b2375c1975a2f4cf", "q4_k": "7ac9ed99fd0be93f", "q5_k": "30b640dd429bdc29",
        "q6_k": "872991fe549beaa6",
    },
    "shifted": {
        "q8_0": "aee04e5456668e8e", "q5_0": "eba68ac40c3852f5", "q5_1": "5d2ae92e3d8e3716",
        "q4_0": "35e0001377eafc71", "q4_1": "3184e7a20e82577b", "q2_k": "7d43dd260ffe23ed",
        "q3_k": "82cdadba0972e78a", "q4_k": "f8a5e53bc5cf195c", "q5_k": "b25322e563fca757",
        "q6_k": "772e2bdf13211ed6",
    },
    "grid": {
        "q8_0": "9389646a1917e4a9", "q5_0": "6a104258c7739a97", "q5_1": "9e3c2b44e280192b",
        "q4_0": "be34800c0ad10027", "q4_1": "f08cbc38ea96fa61", "q2_k": "91005757de013c7b",
        "q3_k": "a27ce162344f55d1", "q4_k": "9650cf1b6bcbfa15", "q5_k": "a0080e6af72a4f8c",
        "q6_k": "b74d2f91ef955f1a",
    },
}  # fmt: skip

# The same of its quantize_* with `importance()` as importance matrix.
WEIGHTED_DIGESTS: dict[str, dict[Format, str]] = {
    "normal": {
        "q5_0": "bfb228a7fed0ee30", "q5_1": "c619df8bf36951bd", "q4_0": "60865f8bfeaa1e98",
        "q4_1": "e8963261f9c41268", "q2_k": "920beef6ca2c81c8", "q3_k": "2bbcc9c92e6fe26e",
        "q4_k": "43a2dee7b15fd541", "q5_k": "c8facc53d5a85dd8", "q6_k": "09e840d31980dee0",
    },
    "sparse": {
        "q5_0": "dfa83830bb53b82d", "q5_1": "9e287b71e160f9b7", "q4_0": "6ecce8e0443277ae",
        "q4_1": "94a8b6141dd7c6d5", "q2_k": "c5d64f4ee7afdf39", "q3_k": "1f662b42a7f2a7d1",
        "q4_k": "cd826a7d727fc3fe", "q5_k": "f58ce4656e0986b2", "q6_k": "26b459a84ad964c2",
    },
    "shifted": {
        "q5_0": "bb2647c159257474", "q5_1": "8d5c61cb84eb3c2d", "q4_0": "59b7b01ab73b9d0b",
        "q4_1": "d43abd9b3e9dee1d", "q2_k": "37ad806f938e9be3", "q3_k": "adf7bea00c7f91cc",
        "q4_k": "43384c05085502c6", "q5_k": "a3eddc1acf284765", "q6_k": "ab3cc8209d575bb4",
    },
    "grid": {
        "q5_0": "b279bdd33388b391", "q5_1": "07fb65cf3bc26831", "q4_0": "68de744e1716b320",
        "q4_1": "f1c77a4048f45658", "q2_k": "f567850d564d78f4", "q3_k": "08cacecd0bfaa595",
        "q4_k": "925b45197a5ce846", "q5_k": "953b5cd7d29217d6", "q6_k": "d2a8ebae3bcb4f51",
    },
}  # fmt: skip


def weights(kind: str) -> np.ndarray:
    """[64, 1024] floats made of raw generator bits and exact arithmetic: the same everywhere."""
    bits = np.random.PCG64(7).random_raw(4 * 64 * 1024).astype(np.uint64)
    uniform = (bits >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    normal = uniform.reshape(4, 64, 1024).sum(0)  # nearly
    if kind == "sparse":
        normal = normal * (uniform[: 64 * 1024].reshape(64, 1024) > 0.4)
    if kind == "shifted":
        normal = normal * 2.0**-7 + 1
    if kind == "grid":
        normal = np.round(normal * 4) * 0.0131
    return np.ascontiguousarray(normal * 2.0**-5, np.float32)


def importance() -> np.ndarray:
    """[1024] floats over several orders of magnitude: the same everywhere."""
    bits = np.random.PCG64(11).random_raw(1024).astype(np.uint64)
    uniform = (bits >> np.uint64(40)).astype(np.float64) / 2**24
    return np.ascontiguousarray(uniform**4 * 3, np.float32)


@pytest.mark.parametrize("fmt", WEIGHTED)
@pytest.mark.parametrize("kind", ["normal", "sparse", "shifted", "grid"])
def test_weighted_bytes_are_llama_cpps(fmt: Format, kind: str) -> None:
    rows = kernels.quantize(weights(kind), fmt, importance=importance())
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == WEIGHTED_DIGESTS[kind][fmt]


@pytest.mark.parametrize("fmt", WEIGHTED)
def test_importance_lowers_the_weighted_error(fmt: Format) -> None:
    x, counts = weights("normal"), importance()

    def error(rows: np.ndarray) -> float:
        return float((counts * (kernels.dequantize(rows, fmt, 1024) - x) ** 2).sum())

    weighted = error(kernels.quantize(x, fmt, importance=counts))
    assert weighted < 0.97 * error(kernels.quantize(x, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_without_a_search_ignore_importance(fmt: Format) -> None:
    x = weights("normal")
    same = np.array_equal(
        kernels.quantize(x, fmt, importance=importance()), kernels.quantize(x, fmt)
    )
    assert same == (fmt not in WEIGHTED)


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("where", [slice(None), slice(0, 256), slice(10, 300)])
def test_channels_without_importance_stay_finite(fmt: Format, where: slice) -> None:
    counts = importance()
    counts[where] = 0
    for kind in ("normal", "sparse", "shifted"):
        for scale in (0, 1e-38, 1e-16, 1, 1e4):
            x = weights(kind) * np.float32(scale)
            rows = kernels.quantize(x, fmt, importance=counts)
            assert np.isfinite(kernels.dequantize(rows, fmt, 1024)).all()


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("kind", ["normal", "sparse", "shifted", "grid"])
def test_bytes_are_the_references(fmt: Format, kind: str) -> None:
    rows = kernels.quantize(weights(kind), fmt)
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == REFERENCE_DIGESTS[kind][fmt]


@pytest.mark.parametrize("fmt", ["q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "bf16", "f16"])
def test_bytes_are_the_gguf_packages(fmt: Format) -> None:
    """The package quantises these formats itself: a second oracle."""
    x = weights("normal")
    expected = quants.quantize(x, GGMLQuantizationType[fmt.upper()])
    np.testing.assert_array_equal(kernels.quantize(x, fmt), expected.view(np.uint8))


@pytest.mark.parametrize("fmt", BLOCKS)
def test_same_bytes_for_any_number_of_threads(fmt: Format) -> None:
    x = weights("normal")[:13]
    rows = kernels.quantize(x, fmt, threads=1)
    weighted = kernels.quantize(x, fmt, 1, importance())
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(kernels.quantize(x, fmt, threads=threads), rows)
        np.testing.assert_array_equal(kernels.quantize(x, fmt, threads, importance()), weighted)


# Largest error per weight of a group, in units of its largest magnitude (of its range, which
# includes zero, for formats with a min): half a step of the grid, and as much again for the rounded
# scales and the fit. q2_k minimises the sum of magnitudes, at the cost of single values.
STEP = {"q8_0": 1 / 127, "q5_0": 1 / 16, "q5_1": 1 / 31, "q4_0": 1 / 8, "q4_1": 1 / 15,
        "q2_k": 1 / 2, "q3_k": 1 / 2, "q4_k": 1 / 15, "q5_k": 1 / 31, "q6_k": 1 / 32}  # fmt: skip


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_error_stays_within_a_step(fmt: Format, scale: float) -> None:
    x = weights("normal") * np.float32(scale)
    error = np.abs(kernels.dequantize(kernels.quantize(x, fmt), fmt, x.shape[1]) - x)
    blocks = x.reshape(-1, kernels.block_elements(fmt))
    span = blocks.max(1).clip(0) - blocks.min(1).clip(max=0)
    assert (error.reshape(blocks.shape).max(1) <= span * STEP[fmt]).all()


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-45, 1e-38, -1e-30, 1e-16, 6e-8, 1e-5, 1.0, -1.0, 6e4]
)
def test_constant_and_lonely_values(fmt: Format, value: float) -> None:
    """Blocks all of one value, and with that value once among zeros, stay finite and near."""
    x = np.zeros((2, 512), np.float32)
    x[0] = value
    x[1, 300] = value
    back = kernels.dequantize(kernels.quantize(x, fmt), fmt, 512)
    assert np.isfinite(back).all()
    # fp16 scales vanish below 6e-8; above 1e-4 they are normal numbers
    tolerance = abs(value) * STEP[fmt] if abs(value) >= 1e-4 else abs(value) + 2e-5
    assert (np.abs(back - x) <= tolerance).all()


@pytest.mark.parametrize("fmt", BLOCKS)
def test_tiny_noise_on_a_large_offset(fmt: Format) -> None:
    x = weights("normal") * np.float32(1e-6) + np.float32(-100)
    back = kernels.dequantize(kernels.quantize(x, fmt), fmt, x.shape[1])
    assert (np.abs(back - x) <= 100 * STEP[fmt]).all()


@pytest.mark.parametrize("fmt", ["f16", "bf16", *BLOCKS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_unstorable_values_are_refused_by_place(fmt: Format, value: float) -> None:
    if fmt == "bf16" and value == 3e38:
        value = 3.4e38  # would round to infinity
    x = weights("normal").copy()
    x[40, 1000] = x[17, 3] = x[17, 900] = value
    with pytest.raises(ValueError, match=rf"row 17, column 3 is .*: {fmt} holds finite values"):
        kernels.quantize(x, fmt, threads=3)


@pytest.mark.parametrize("fmt", ["f16", "bf16", *BLOCKS])
def test_largest_values_stay_finite(fmt: Format) -> None:
    limits = {"f16": 65504, "bf16": 3.3e38, "q8_0": 8e6, "q5_0": 1e6, "q5_1": 65504, "q4_0": 5e5,
              "q4_1": 65504, "q2_k": 9e5, "q3_k": 4e6, "q4_k": 4e6, "q5_k": 4e6,
              "q6_k": 1.3e8}  # fmt: skip
    x = np.sign(weights("normal")) * np.float32(limits[fmt])
    for counts in (None, importance()):
        rows = kernels.quantize(x, fmt, importance=counts)
        assert np.isfinite(kernels.dequantize(rows, fmt, x.shape[1])).all()


def test_wrong_input_says_what_is_wrong() -> None:
    with pytest.raises(
        ValueError, match=r"x must be float32 with two axes, not float64 \(2, 256\)"
    ):
        kernels.quantize(np.zeros((2, 256)), "q4_k")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32, not 33"):
        kernels.quantize(np.zeros((2, 33), np.float32), "q8_0")
    x = np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"importance must be float32 \(64,\), not .* \(32,\)"):
        kernels.quantize(x, "q8_0", importance=np.ones(32, np.float32))
    for value in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="importance must be finite and not negative"):
            kernels.quantize(x, "q8_0", importance=np.full(64, value, np.float32))


def test_strided_input_is_read_as_it_looks() -> None:
    x = weights("normal")
    np.testing.assert_array_equal(
        kernels.quantize(x[:, ::2], "q4_k"), kernels.quantize(x[:, ::2].copy(), "q4_k")
    )


def test_quantising_needs_no_other_package() -> None:
    """The runtime and the kernels import neither torch nor onnx."""
    code = "import sys, spikeinfer.kernels as k; assert not {'torch', 'onnx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
