"""Kernels touch no byte outside of their arrays: each array ends where a page that nobody may touch
begins, in every instruction-set tier. A process of its own runs each tier, for a wrong one dies."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray
from spikeinfer import kernels
from spikeinfer.kernels import FORMATS, Format, PackedExperts, PackedMatrix, _kernels

TIERS = ("scalar", "avx2", "avx512", "avx512_bf16")
CACHE_LINE = 64
PROT_NONE = 0


def guarded(array: NDArray[np.generic], align: int = 1) -> NDArray[np.generic]:
    """A copy of a [...] array that ends at an unreadable page, or within `align` bytes of it."""
    size = -(-array.nbytes // align) * align
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, PROT_NONE) == 0
    start = pages * mmap.PAGESIZE - size
    held = np.frombuffer(memory, np.uint8, array.nbytes, start)
    held[:] = array.reshape(-1).view(np.uint8)
    return held.view(array.dtype).reshape(array.shape)


def floats(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return guarded(rng.standard_normal(shape, np.float32))  # type: ignore[return-value]


def matrix(rng: np.random.Generator, fmt: Format, n: int, k: int) -> tuple[object, ...]:
    """As the C++ module takes it; the packed bytes start at a cache line."""
    weight = PackedMatrix.quantized(rng.standard_normal((n, k), np.float32), fmt)
    return (guarded(weight.data, CACHE_LINE), fmt, n, k)


def check_linear(rng: np.random.Generator, fmt: Format, n: int, k: int, t: int) -> None:
    w, x = matrix(rng, fmt, n, k), floats(rng, t, k)
    bias, residual, y = floats(rng, n), floats(rng, t, n), floats(rng, t, n)
    _kernels.linear(x, w, bias, residual, y, 1)  # type: ignore[arg-type]
    free = kernels.linear(x.copy(), np.array(w[0]), fmt, n, bias.copy(), residual.copy(), 1)
    np.testing.assert_array_equal(y, free)
    rows = guarded(np.array([n - 1, 0], np.int64))
    out = floats(rng, 2, k)
    _kernels.dequantize_rows(w, rows, out)  # type: ignore[arg-type]
    assert np.isfinite(out).all()


def check_gated_mlp(rng: np.random.Generator, fmt: Format, m: int, k: int, t: int) -> None:
    x, y = floats(rng, t, k), floats(rng, t, k)
    gate, up, down = (matrix(rng, fmt, *s) for s in ((m, k), (m, k), (k, m)))
    _kernels.gated_mlp(x, gate, up, down, "silu", floats(rng, t, k), y, 1)  # type: ignore[arg-type]
    assert np.isfinite(y).all()


def check_moe(rng: np.random.Generator, fmt: Format, m: int, k: int, t: int) -> None:
    experts = 3
    stacks = []
    for n, width in ((m, k), (m, k), (k, m)):
        weight = rng.standard_normal((experts, n, width), np.float32)
        data = guarded(PackedExperts.quantized(weight, fmt).data, CACHE_LINE)
        stacks.append((data, fmt, n, width))
    ids = guarded(np.array([[i % experts, (i + 1) % experts] for i in range(t)], np.int64))
    biases = [floats(rng, experts, n) for n in (m, m, k)]
    x, scores, y = floats(rng, t, k), floats(rng, t, 2), floats(rng, t, k)
    _kernels.moe(x, scores, ids, *stacks, "silu", 0.0, 1.0, *biases, y, 1)  # type: ignore[arg-type, call-arg]
    assert np.isfinite(y).all()


def check_blocks(rng: np.random.Generator, fmt: Format, n: int, k: int) -> None:
    x = floats(rng, n, k)
    rows = guarded(np.zeros((n, kernels.row_bytes(fmt, k)), np.uint8))
    _kernels.quantize(x, fmt, rows, guarded(np.ones(k, np.float32)), 1)  # type: ignore[arg-type]
    packed = guarded(np.zeros(kernels.packed_bytes(fmt, n, k), np.uint8))
    _kernels.pack(rows, fmt, n, k, packed)  # type: ignore[arg-type]
    again = guarded(np.zeros_like(rows))
    _kernels.unpack(packed, fmt, n, k, again)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again, rows)
    back = floats(rng, n, k)
    _kernels.dequantize(rows, fmt, back, 1)  # type: ignore[arg-type]
    np.testing.assert_array_equal(back, kernels.dequantize(np.array(rows), fmt, k))
    _kernels.stream_read(packed, 1)  # type: ignore[arg-type]


def check_all() -> None:
    """Random shapes and the smallest ones, of every format."""
    rng = np.random.default_rng(0)
    for fmt in FORMATS:
        multiple = kernels.row_multiple(fmt)
        shapes = [(1, multiple, 1), (16, 4 * multiple, 4), (33, 9 * multiple, 9)]
        for _ in range(3):
            n, blocks, t = (int(rng.integers(1, high)) for high in (70, 12, 40))
            shapes.append((n, blocks * multiple, t))
        for n, k, t in shapes:
            check_linear(rng, fmt, n, k, t)
            check_blocks(rng, fmt, n, k)
        for t in (1, 5, 19):
            check_gated_mlp(rng, fmt, 3 * multiple, 5 * multiple, t)
            check_moe(rng, fmt, 2 * multiple, 3 * multiple, t)


RUN = (
    "import importlib.util as u, sys; s = u.spec_from_file_location('t', sys.argv[1]); "
    "m = u.module_from_spec(s); s.loader.exec_module(m); {call}; print(m.kernels.cpu_tier())"
)


def in_tier(tier: str, call: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SPIKE_CPU": tier}
    words = [sys.executable, "-P", "-c", RUN.format(call=call), __file__]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("tier", TIERS)
def test_no_byte_outside_is_touched(tier: str, tiers: tuple[str, ...]) -> None:
    if tier not in tiers:
        pytest.skip(f"this CPU has no {tier}")
    done = in_tier(tier, "m.check_all()")
    assert (done.returncode, done.stdout.strip()) == (0, tier), done.stderr[-2000:]


def test_a_read_past_the_end_is_noticed() -> None:
    """The guard works: one byte more kills the process."""
    call = "m._kernels.stream_read(m.guarded(m.np.zeros(8, 'u1')), 1)"
    assert in_tier("scalar", call).returncode == 0
    past = "a = m.guarded(m.np.zeros(8, 'u1')); m.ctypes.string_at(a.ctypes.data, 9)"
    assert in_tier("scalar", past).returncode != 0
