"""Stacked experts over packed weights, against the op's reference on the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from spikeinfer import kernels
from spikeinfer.compiler.ir import OPS
from spikeinfer.kernels import FORMATS, ExpertBiases, Format, PackedExperts

# Two products in a row: fp32 rounding for plain formats (1e-6 measured); block formats round
# tokens to int8 per 32 elements, twice: 1-3.5% of the norm measured, most where it has one element.
# Their exact meaning is tested against gated_mlp, to the bit.
ERROR = {fmt: 0.05 if kernels.block_elements(fmt) > 1 else 2e-6 for fmt in FORMATS}

# tokens, experts, chosen, K, M, N; K and M in units of the format's block (at least 8)
SHAPES = [
    (1, 4, 2, 1, 1, 16),
    (1, 1, 1, 2, 1, 1),
    (2, 3, 3, 1, 2, 17),
    (9, 2, 1, 1, 1, 48),
    (70, 8, 2, 2, 3, 33),
    (130, 5, 4, 1, 1, 100),
]


class Problem:
    """Random experts, tokens and choices; `values` are the stored weights in fp32."""

    def __init__(self, fmt: Format, shape: tuple[int, ...], seed: int = 0) -> None:
        t, experts, top, k, m, n = shape
        unit = max(8, kernels.block_elements(fmt))
        if kernels.row_multiple(fmt) < unit == 256:
            unit += 64  # rows end in a short block
        k, m = k * unit, m * unit
        rng = np.random.default_rng(seed)
        self.packed, self.values = [], []
        for rows, columns in ((m, k), (m, k), (n, m)):
            w = rng.standard_normal((experts, rows, columns), np.float32) / np.float32(columns**0.5)
            self.packed.append(PackedExperts.quantized(w, fmt))
            logical = [kernels.quantize(e, fmt) for e in w]
            self.values.append(np.stack([kernels.dequantize(b, fmt, columns) for b in logical]))
        self.x = rng.standard_normal((t, k), np.float32)
        self.ids = np.stack([rng.permutation(experts)[:top] for _ in range(t)])
        self.weights = rng.random((t, top), np.float32)
        self.biases = ExpertBiases(
            *(rng.standard_normal((experts, r), np.float32) for r in (m, m, n))
        )

    def run(self, biased: bool = False, **options: object) -> np.ndarray:
        biases = self.biases if biased else None
        return kernels.moe(self.x, self.weights, self.ids, *self.packed, "silu", biases, **options)  # type: ignore[arg-type]

    def expected(self, biased: bool = False, **attrs: float) -> np.ndarray:
        operands = [self.x, self.weights, self.ids, *self.values]
        if biased:
            operands += [self.biases.gate, self.biases.up, self.biases.down]
        given = {"activation": "silu", "limit": 0.0, "alpha": 1.0} | attrs
        tensors = [torch.from_numpy(np.ascontiguousarray(o)) for o in operands]
        return OPS["moe"].reference(*tensors, **given).numpy()


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moe_equals_its_reference(fmt: Format, shape: tuple[int, ...]) -> None:
    problem = Problem(fmt, shape)
    assert error(problem.run(), problem.expected()) <= ERROR[fmt]


@pytest.mark.parametrize("fmt", FORMATS)
def test_clamped_product_with_biases(fmt: Format) -> None:
    problem = Problem(fmt, (20, 4, 2, 2, 2, 40))
    options = {"limit": 0.5, "alpha": 1.702}
    got, want = problem.run(True, **options), problem.expected(True, **options)
    assert error(got, want) <= ERROR[fmt]
    assert error(problem.run(True), want) > 0.2


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_token_has_the_same_bits_alone_and_for_any_number_of_threads(fmt: Format) -> None:
    problem = Problem(fmt, (70, 8, 2, 2, 3, 33))
    whole = problem.run(threads=1)
    np.testing.assert_array_equal(problem.run(threads=3), whole)
    x, weights, ids = problem.x, problem.weights, problem.ids
    for i in range(70):
        one = slice(i, i + 1)
        alone = kernels.moe(x[one], weights[one], ids[one], *problem.packed)
        np.testing.assert_array_equal(alone, whole[one])


def of_expert(packed: PackedExperts, expert: int) -> kernels.PackedMatrix:
    size = kernels.packed_bytes(packed.format, packed.n, packed.k)
    data = packed.data[expert * size : (expert + 1) * size]
    return kernels.PackedMatrix(data, packed.format, packed.n, packed.k)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moe_has_the_bits_of_its_experts_gated_mlps(fmt: Format, shape: tuple[int, ...]) -> None:
    problem = Problem(fmt, shape)
    every = [
        kernels.gated_mlp(problem.x, *(of_expert(w, e) for w in problem.packed), "silu")
        for e in range(shape[1])
    ]
    expected = np.zeros_like(every[0])
    for slot in range(shape[2]):
        chosen = np.stack([every[e][t] for t, e in enumerate(problem.ids[:, slot])])
        expected += problem.weights[:, slot, None] * chosen
    np.testing.assert_array_equal(problem.run(), expected)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_an_expert_may_be_chosen_twice(fmt: Format, tokens: int) -> None:
    problem = Problem(fmt, (tokens, 3, 3, 1, 1, 16))
    problem.ids[:] = [2, 0, 2]
    apart = np.zeros((tokens, 16), np.float32)
    for slot in range(3):
        one = slice(slot, slot + 1)
        ids = np.ascontiguousarray(problem.ids[:, one])
        apart += kernels.moe(problem.x, problem.weights[:, one], ids, *problem.packed)
    np.testing.assert_array_equal(problem.run(), apart)


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_tokens_may_choose_one_expert(fmt: Format) -> None:
    problem = Problem(fmt, (70, 3, 1, 1, 2, 48))
    problem.ids[:], problem.weights[:] = 2, 1
    expected = kernels.gated_mlp(problem.x, *(of_expert(w, 2) for w in problem.packed), "silu")
    np.testing.assert_array_equal(problem.run(), expected)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_that_are_not_chosen_are_not_read(fmt: Format, tokens: int) -> None:
    """Their bytes become NaN in every format: 0xFF in scales, or in the values themselves."""
    problem = Problem(fmt, (tokens, 6, 2, 1, 1, 20))
    problem.ids[:] = [4, 1]
    expected = problem.run()
    for w in problem.packed:
        size = kernels.packed_bytes(w.format, w.n, w.k)
        for expert in (0, 2, 3, 5):
            w.data[expert * size : (expert + 1) * size] = 0xFF
    np.testing.assert_array_equal(problem.run(), expected)
    assert np.isfinite(expected).all()
    problem.ids[0, 0] = 3
    assert np.isnan(problem.run()[0]).all()


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [("q4_k", "q4_k", "q6_k"), ("f16", "q8_0", "f32"), ("q8_0", "f32", "q4_k")],
)
def test_formats_may_differ(gate: Format, up: Format, down: Format) -> None:
    """Tokens are quantised once for gate and up, and only where a block format asks for it."""
    problem = Problem("f32", (12, 4, 2, 32, 32, 20))
    formats = (gate, up, down)
    problem.packed = [
        PackedExperts.quantized(v, f) for v, f in zip(problem.values, formats, strict=True)
    ]
    problem.values = [
        np.stack([kernels.dequantize(kernels.quantize(e, f), f, v.shape[2]) for e in v])
        for v, f in zip(problem.values, formats, strict=True)
    ]
    assert error(problem.run(), problem.expected()) <= ERROR["q4_k"]
    one = kernels.moe(problem.x[3:4], problem.weights[3:4], problem.ids[3:4], *problem.packed)
    np.testing.assert_array_equal(one, problem.run()[3:4])


def test_not_a_number_stays_visible() -> None:
    problem = Problem("q8_0", (3, 2, 1, 1, 1, 16))
    problem.x[1, 5] = np.nan
    for options in ({}, {"limit": 7.0}):
        result = problem.run(**options)
        assert np.isnan(result[1]).all()
        assert np.isfinite(result[[0, 2]]).all()


def test_no_tokens() -> None:
    problem = Problem("q8_0", (1, 2, 1, 1, 1, 16))
    result = kernels.moe(problem.x[:0], problem.weights[:0], problem.ids[:0], *problem.packed)
    assert result.shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.full((3, 1), 2)}, r"ids must be in \[0, 2\)"),
        ({"ids": np.full((3, 1), -1)}, r"ids must be in \[0, 2\)"),
        ({"ids": np.zeros((3, 2), np.int64)}, "ids int64"),
        ({"x": np.zeros((3, 64), np.float32)}, "do not make experts"),
    ],
)
def test_wrong_operands_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    problem = Problem("q8_0", (3, 2, 1, 1, 1, 16))
    for name, value in change.items():
        setattr(problem, name, value)
    with pytest.raises(ValueError, match=message):
        problem.run()


HASH = """
import hashlib, numpy as np
from spikeinfer import kernels
rng = np.random.default_rng(7)
digest = hashlib.sha256()
for fmt in kernels.FORMATS:
    w = [rng.standard_normal(s, np.float32) for s in ((3, 256, 256), (3, 256, 256), (3, 33, 256))]
    w = [kernels.PackedExperts.quantized(e, fmt) for e in w]
    x, weights = rng.standard_normal((19, 256), np.float32), rng.random((19, 2), np.float32)
    ids = np.stack([rng.permutation(3)[:2] for _ in range(19)])
    for limit in (0.0, 7.0):
        digest.update(kernels.moe(x, weights, ids, *w, limit=limit, alpha=1.7).tobytes())
print(kernels.cpu_tier(), digest.hexdigest())
"""


def test_all_tiers_give_the_same_bits() -> None:
    seen = {}
    for tier in ("scalar", "avx2", "avx512", "avx512_bf16"):
        run = subprocess.run(
            [sys.executable, "-P", "-c", HASH],
            env=os.environ | {"SPIKE_CPU": tier},
            capture_output=True,
            text=True,
            check=True,
        )
        used, digest = run.stdout.split()
        seen[used] = digest
    assert "scalar" in seen
    assert len(set(seen.values())) == 1
