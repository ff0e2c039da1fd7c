"""Linear layers and gated MLPs over packed weights, against float64 on the same numbers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from spikeinfer import kernels
from spikeinfer.kernels import FORMATS, Activation, Format, PackedMatrix

BLOCKS = tuple(fmt for fmt in FORMATS if kernels.block_elements(fmt) > 1)
VALUES: tuple[Format, ...] = ("f32", "f16", "bf16")
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33, 64, 65, 131)
TIERS = ("scalar", "avx2", "avx512", "avx512_bf16")


def int8_tokens(x: np.ndarray) -> np.ndarray:
    """x as the kernels see it under block formats: int8 per 32 elements, in float64."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest >= 1e-30, np.float32(127) / largest, np.float32(0))
    scale = (largest / np.float32(127)).astype(np.float64)
    return (np.rint(blocks * inverse) * scale).reshape(x.shape)


def problem(fmt: Format, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Packed weights and their exact values [n, k]."""
    rng = np.random.default_rng(seed)
    rows = kernels.quantize(rng.standard_normal((n, k), np.float32) * np.float32(0.02), fmt)
    return kernels.pack(rows, fmt, n, k), kernels.dequantize(rows, fmt, k).astype(np.float64)


def tokens(t: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((t, k), np.float32)


def assert_product(y: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """y = x w^T within fp32 rounding: 3e-7 of the sum of magnitudes (5 ulp; 1e-7 is typical)."""
    assert (np.abs(y - x @ w.T) <= 3e-7 * (np.abs(x) @ np.abs(w).T) + 1e-30).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 48, 100])
def test_linear(fmt: Format, n: int) -> None:
    block = kernels.block_elements(fmt)
    for k in (block, 2 * block, 9 * block) if block > 1 else (1, 3, 255, 256, 257, 700):
        packed, w = problem(fmt, n, k)
        x = tokens(33, k)
        seen = int8_tokens(x) if fmt in BLOCKS else x.astype(np.float64)
        assert_product(kernels.linear(x, packed, fmt, n), seen, w)


SHORT = tuple(fmt for fmt in FORMATS if kernels.block_elements(fmt) == 256)


@pytest.mark.parametrize("fmt", SHORT)
@pytest.mark.parametrize("n", [1, 17, 48])
def test_linear_over_short_blocks(fmt: Format, n: int) -> None:
    for k in (64, 128, 192, 320, 576, 640):
        packed, w = problem(fmt, n, k)
        x = tokens(33, k)
        y = kernels.linear(x, packed, fmt, n)
        assert_product(y, int8_tokens(x), w)
        for t in (1, 2, 8, 9):
            np.testing.assert_array_equal(kernels.linear(x[:t], packed, fmt, n), y[:t])


@pytest.mark.parametrize("fmt", VALUES)
def test_float_weights_agree_with_torch(fmt: Format) -> None:
    packed, w = problem(fmt, 70, 1500)
    x = tokens(20, 1500)
    expected = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(w).float()).numpy()
    np.testing.assert_allclose(
        kernels.linear(x, packed, fmt, 70), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize("fmt", BLOCKS)
def test_int8_tokens_cost_little(fmt: Format) -> None:
    """Against fp32 tokens: 0.55% measured for normal ones; 1% is a broken scale."""
    packed, w = problem(fmt, 64, 2048)
    x = tokens(16, 2048)
    exact = x.astype(np.float64) @ w.T
    error = np.linalg.norm(kernels.linear(x, packed, fmt, 64) - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.008


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_its_batch(fmt: Format) -> None:
    n, k = 100, 768
    packed, _ = problem(fmt, n, k)
    x = tokens(140, k)
    whole = kernels.linear(x, packed, fmt, n, threads=1)
    for t in TOKENS:
        np.testing.assert_array_equal(kernels.linear(x[:t], packed, fmt, n, threads=1), whole[:t])
    np.testing.assert_array_equal(kernels.linear(x[70:77], packed, fmt, n), whole[70:77])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("t", [1, 5, 130])
def test_same_bits_for_any_number_of_threads(fmt: Format, t: int) -> None:
    n, k = 1000, 512
    packed, _ = problem(fmt, n, k)
    x = tokens(t, k)
    single = kernels.linear(x, packed, fmt, n, threads=1)
    for threads in (2, 3, 7):
        np.testing.assert_array_equal(kernels.linear(x, packed, fmt, n, threads=threads), single)


def digest() -> str:
    """Of every kind of result, to compare processes that run different instruction sets."""
    found = hashlib.sha256()
    for fmt, n, t in product(FORMATS, (17, 80), (1, 3, 7, 20)):
        packed, _ = problem(fmt, n, 768)
        found.update(kernels.linear(tokens(t, 768), packed, fmt, n).tobytes())
    for fmt, t in product(SHORT, (1, 20)):
        packed, _ = problem(fmt, 17, 576)
        found.update(kernels.linear(tokens(t, 576), packed, fmt, 17).tobytes())
    mlp = [PackedMatrix.quantized(tokens(256, 256, seed), "q6_k") for seed in range(3)]
    for activation in ("silu", "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu2"):
        found.update(kernels.gated_mlp(tokens(9, 256) / 8, *mlp, activation).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_gives_the_same_bits(tier: str, tiers: tuple[str, ...]) -> None:
    if tier == kernels.cpu_tier() or tier not in tiers:
        pytest.skip(f"{tier} is the tier of this run already, or more than this CPU has")
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('t', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); "
        "print(m.kernels.cpu_tier(), m.digest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, __file__],
        env=os.environ | {"SPIKE_CPU": tier},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == [tier, digest()], result.stderr


def test_the_peak_yardstick_counts_its_operations() -> None:
    """Rounds x 16 sums x 64 bytes x 2 on each thread; none where the tier has no VNNI."""
    each = 16 * 64 * 2 if kernels.cpu_tier().startswith("avx512") else 0
    assert kernels.vnni_run(8, threads=1) == 8 * each
    assert kernels.vnni_run(80, threads=2) == 2 * 80 * each
    with pytest.raises(ValueError, match="at least 8"):
        kernels.vnni_run(7)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("t", [1, 11])
def test_bias_and_residual_are_added_in_that_order(fmt: Format, t: int) -> None:
    n, k = 50, 256
    packed, _ = problem(fmt, n, k)
    x, residual, bias = tokens(t, k), tokens(t, n, 2), tokens(1, n, 3)[0]
    plain = kernels.linear(x, packed, fmt, n)
    biased = kernels.linear(x, packed, fmt, n, bias=bias)
    np.testing.assert_array_equal(biased, plain + bias)
    both = kernels.linear(x, packed, fmt, n, bias=bias, residual=residual)
    np.testing.assert_array_equal(both, (plain + bias) + residual)


@pytest.mark.parametrize("fmt", FORMATS)
def test_awkward_tokens(fmt: Format) -> None:
    """Zeros give zeros, tiny and huge ones stay exact; NaN and infinity stay visible, alone."""
    n, k = 20, 512
    packed, w = problem(fmt, n, k)
    x = tokens(6, k)
    x[0] = 0
    x[1] *= np.float32(1e-20)
    x[2] *= np.float32(1e20)
    x[3, 77] = np.nan
    x[4, 300] = np.inf
    y = kernels.linear(x, packed, fmt, n)
    assert (y[0] == 0).all()
    assert not np.isfinite(y[3:5]).any()
    fine = [1, 2, 5]
    seen = int8_tokens(x[fine]) if fmt in BLOCKS else x[fine].astype(np.float64)
    assert_product(y[fine], seen, w)


# First byte of each fp16 number in a block, and the block's bytes.
HALVES: dict[Format, tuple[tuple[int, ...], int]] = {
    "q8_0": ((0,), 34),
    "q5_0": ((0,), 22),
    "q5_1": ((0, 2), 24),
    "q4_0": ((0,), 18),
    "q4_1": ((0, 2), 20),
    "q2_k": ((80, 82), 84),
    "q3_k": ((108,), 110),
    "q4_k": ((0, 2), 144),
    "q5_k": ((0, 2), 176),
    "q6_k": ((208,), 210),
}


@pytest.mark.parametrize("fmt", HALVES)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_the_largest_codes_do_not_overflow(fmt: Format, byte: int) -> None:
    """Blocks of one byte throughout, so codes at an end of their range, meet tokens of +-127."""
    n, k = 16, 256
    at, size = HALVES[fmt]
    blocks = np.full((n, k // kernels.block_elements(fmt), size), byte, np.uint8)
    for first in at:
        blocks[:, :, first : first + 2] = np.array([1.5], np.float16).view(np.uint8)
    rows = blocks.reshape(n, -1)
    w = kernels.dequantize(rows, fmt, k).astype(np.float64)
    x = np.ones((20, k), np.float32)
    x[1::2] = -1
    x[2::4, ::2] = -1
    for t in (1, 4, 8, 20):
        assert_product(kernels.linear(x[:t], kernels.pack(rows, fmt, n, k), fmt, n), x[:t], w)


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("t", [1, 3, 70])
def test_gated_mlp(activation: Activation, t: int) -> None:
    k, m, n = 96, 41, 33
    rng = np.random.default_rng(4)
    gate, up, down = (
        rng.standard_normal(shape, np.float32) * np.float32(0.2)
        for shape in ((m, k), (m, k), (n, m))
    )
    x, residual = 4 * tokens(t, k), tokens(t, n, 2)
    packed = [PackedMatrix.quantized(w, "f32") for w in (gate, up, down)]
    y = kernels.gated_mlp(x, *packed, activation, residual)
    wide = torch.from_numpy(x).double()
    g, u, d = (torch.from_numpy(w).double() for w in (gate, up, down))
    expected = (ACTIVATIONS[activation](wide @ g.T) * (wide @ u.T)) @ d.T
    expected += torch.from_numpy(residual)
    # fp32 through two products, e^x within 2 ulp: 1e-6 of the largest measured
    bound = 5e-6 * float(expected.abs().max())
    assert np.abs(y - expected.numpy()).max() <= bound


@pytest.mark.parametrize("gate", FORMATS)
@pytest.mark.parametrize("up", ["f16", "q4_k", "q6_k"])
def test_gated_mlp_is_its_three_linears(gate: Format, up: Format) -> None:
    """Bit for bit, also with formats mixed; relu, so that the middle is exact in numpy."""
    k, m, n, t = 256, 272, 40, 5
    g = PackedMatrix.quantized(tokens(m, k, 5), gate)
    u = PackedMatrix.quantized(tokens(m, k, 6), up)
    d = PackedMatrix.quantized(tokens(n, m, 7), "bf16")
    x = tokens(t, k)
    middle = np.maximum(kernels.linear(x, g.data, gate, m), 0) * kernels.linear(x, u.data, up, m)
    np.testing.assert_array_equal(
        kernels.gated_mlp(x, g, u, d, "relu"), kernels.linear(middle, d.data, "bf16", n)
    )


def test_gated_mlp_shows_nan() -> None:
    x = tokens(2, 64)
    x[1, 5] = np.nan
    packed = [PackedMatrix.quantized(tokens(64, 64, i), "q8_0") for i in range(3)]
    for activation in ACTIVATIONS:
        y = kernels.gated_mlp(x, *packed, activation)
        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_tokens(fmt: Format) -> None:
    packed, _ = problem(fmt, 20, 256)
    assert kernels.linear(tokens(0, 256), packed, fmt, 20).shape == (0, 20)


def test_wrong_shapes_say_what_is_wrong() -> None:
    packed, _ = problem("q8_0", 20, 64)
    x = tokens(3, 64)
    with pytest.raises(ValueError, match=r"packed must be uint8 \[1088\]"):
        kernels.linear(x[:, :32].copy(), packed, "q8_0", 20)
    with pytest.raises(ValueError, match=r"bias must be float32 \(20,\), not float32 \(19,\)"):
        kernels.linear(x, packed, "q8_0", 20, bias=np.zeros(19, np.float32))
    with pytest.raises(ValueError, match=r"residual must be float32 \(3, 20\)"):
        kernels.linear(x, packed, "q8_0", 20, residual=np.zeros((1, 20), np.float32))
    w = PackedMatrix.quantized(tokens(20, 64), "f32")
    with pytest.raises(ValueError, match="do not make a gated MLP"):
        kernels.gated_mlp(x, w, w, w, "silu")
    with pytest.raises(ValueError, match="packed must be uint8"):
        PackedMatrix(packed, "q8_0", 40, 64)
