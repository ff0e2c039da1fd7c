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
from spikeinfer.kernels import Format

BLOCKS: tuple[Format, ...] = ("q8_0", "q5_0", "q4_k", "q6_k")

# First 16 hex digits of sha256 over what quantize_row_{q8_0,q5_0,q4_K,q6_K}_ref of llama.cpp (the
# copy in llama-cpp-python 0.3.36, ggml-quants.c built with gcc 12 -O2 -ffp-contract=off) write for
# the arrays that `weights` returns.
REFERENCE_DIGESTS: dict[str, dict[Format, str]] = {
    "normal": {
        "q8_0": "c6b0a56b16a50003",
        "q5_0": "3261a42881b60e92",
        "q4_k": "2ef6670b8460d313",
        "q6_k": "d183531fe53f3a57",
    },
    "sparse": {
        "q8_0": "30bd5ed8651a0b75",
        "q5_0": "31ef391a5e714a02",
        "q4_k": "7ac9ed99fd0be93f",
        "q6_k": "872991fe549beaa6",
    },
    "shifted": {
        "q8_0": "aee04e5456668e8e",
        "q5_0": "eba68ac40c3852f5",
        "q4_k": "f8a5e53bc5cf195c",
        "q6_k": "772e2bdf13211ed6",
    },
    "grid": {
        "q8_0": "9389646a1917e4a9",
        "q5_0": "6a104258c7739a97",
        "q4_k": "9650cf1b6bcbfa15",
        "q6_k": "b74d2f91ef955f1a",
    },
}


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


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("kind", ["normal", "sparse", "shifted", "grid"])
def test_bytes_are_the_references(fmt: Format, kind: str) -> None:
    rows = kernels.quantize(weights(kind), fmt)
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == REFERENCE_DIGESTS[kind][fmt]


@pytest.mark.parametrize("fmt", ["q8_0", "q5_0", "bf16", "f16"])
def test_bytes_are_the_gguf_packages(fmt: Format) -> None:
    """The package quantises these formats itself: a second oracle."""
    x = weights("normal")
    expected = quants.quantize(x, GGMLQuantizationType[fmt.upper()])
    np.testing.assert_array_equal(kernels.quantize(x, fmt), expected.view(np.uint8))


@pytest.mark.parametrize("fmt", BLOCKS)
def test_same_bytes_for_any_number_of_threads(fmt: Format) -> None:
    x = weights("normal")[:13]
    rows = kernels.quantize(x, fmt, threads=1)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(kernels.quantize(x, fmt, threads=threads), rows)


# Largest error per weight of a group, in units of its largest magnitude (q4_k: of its range, which
# includes zero): half a step of the grid, and as much again for the rounded scales and the fit.
STEP = {"q8_0": 1 / 127, "q5_0": 1 / 16, "q4_k": 1 / 15, "q6_k": 1 / 32}


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
    "value", [0.0, -0.0, 1e-45, 1e-38, -1e-30, 1e-16, 6e-8, 1e-5, 1.0, -1.0, 1e6]
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
    limits = {"f16": 65504, "bf16": 3.3e38, "q8_0": 8e6, "q5_0": 1e6, "q4_k": 4e6, "q6_k": 1.3e8}
    x = np.sign(weights("normal")) * np.float32(limits[fmt])
    assert np.isfinite(kernels.dequantize(kernels.quantize(x, fmt), fmt, x.shape[1])).all()


def test_wrong_input_says_what_is_wrong() -> None:
    with pytest.raises(
        ValueError, match=r"x must be float32 with two axes, not float64 \(2, 256\)"
    ):
        kernels.quantize(np.zeros((2, 256)), "q4_k")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32, not 33"):
        kernels.quantize(np.zeros((2, 33), np.float32), "q8_0")


def test_strided_input_is_read_as_it_looks() -> None:
    x = weights("normal")
    np.testing.assert_array_equal(
        kernels.quantize(x[:, ::2], "q4_k"), kernels.quantize(x[:, ::2].copy(), "q4_k")
    )


def test_quantising_needs_no_other_package() -> None:
    """The runtime and the kernels import neither torch nor onnx."""
    code = "import sys, spikeinfer.kernels as k; assert not {'torch', 'onnx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
