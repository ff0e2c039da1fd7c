"""A million blocks of every format against GGUF's decoder; quantisers against llama.cpp's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from spikeinfer import kernels
from spikeinfer.kernels import FORMATS, Format

BLOCKS = tuple(fmt for fmt in FORMATS if kernels.block_elements(fmt) > 1)
PEER = Path(__file__).resolve().parents[2] / ".cache" / "peers" / "llama_cpp" / "venv"


@pytest.mark.parametrize("fmt", BLOCKS)
def test_a_million_random_blocks_dequantise_as_ggufs(fmt: Format) -> None:
    rng = np.random.default_rng(5)
    block = kernels.block_elements(fmt)
    for _ in range(20):
        rows = rng.integers(0, 256, (50_000, kernels.row_bytes(fmt, block)), np.uint8)
        with np.errstate(invalid="ignore", over="ignore"):
            theirs = quants.dequantize(rows, GGMLQuantizationType[fmt.upper()])
        ours = kernels.dequantize(rows, fmt, block)
        same = (ours.view(np.uint32) == theirs.view(np.uint32)) | np.isnan(ours) & np.isnan(theirs)
        assert same.all()


def peer_rows(x: np.ndarray, fmt: Format, importance: np.ndarray | None) -> np.ndarray:
    """What llama.cpp writes, as built for benchmarks."""
    libraries = sorted(PEER.glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.so"))
    if not libraries:
        pytest.skip("llama.cpp is not built: python benchmarks/peers_llama_cpp.py")
    quantize = ctypes.CDLL(str(libraries[0])).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    n, k = x.shape
    out = np.empty((n, kernels.row_bytes(fmt, k)), np.uint8)
    pointer = ctypes.c_void_p
    written = quantize(
        ctypes.c_int(GGMLQuantizationType[fmt.upper()].value), x.ctypes.data_as(pointer),
        out.ctypes.data_as(pointer), ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_int64(k),
        None if importance is None else importance.ctypes.data_as(pointer),
    )  # fmt: skip
    assert written == out.nbytes
    return out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fmt", BLOCKS)
def test_bytes_are_those_of_a_real_build(fmt: Format, weighted: bool) -> None:
    """libggml-base is compiled for the plain instruction set, so nothing is fused there either."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((512, 1024), np.float32) * np.float32(0.02)
    importance = rng.random(1024, np.float32) ** 4 if weighted else None
    ours = kernels.quantize(x, fmt, importance=importance)
    np.testing.assert_array_equal(ours, peer_rows(x, fmt, importance))
