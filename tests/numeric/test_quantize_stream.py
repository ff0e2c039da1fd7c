"""Quantise and pack in chunks: the same bytes as in one piece, in bounded memory."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spikeinfer import SpikeError
from spikeinfer.compiler.quantize import store, stored_bytes
from spikeinfer.kernels import FORMATS, Format, dequantize, pack, quantize, unpack

Floats = npt.NDArray[np.float32]


def matrix(n: int, k: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)


def joined(tensors: Any, format: str, **options: Any) -> bytes:
    return b"".join(store(tensors, format, name="w", **options))


def whole(x: Floats, format: Format) -> bytes:
    """The reference: all rows at once."""
    return pack(quantize(x, format), format, *x.shape).tobytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_chunks_laid_end_to_end_are_the_packed_matrix(format: Format, n: int) -> None:
    x = matrix(n, 512)
    one_piece = whole(x, format)
    assert len(one_piece) == stored_bytes(format, x.shape)
    for chunk_elements in (1, 16 * 512, 48 * 512, 1 << 22):
        assert joined(x, format, chunk_elements=chunk_elements) == one_piece


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_rows_that_end_in_a_short_block_are_stored_in_chunks(format: Format) -> None:
    x = matrix(40, 576)
    one_piece = whole(x, format)
    assert len(one_piece) == stored_bytes(format, x.shape)
    assert joined(x, format, chunk_elements=1) == one_piece
    back = dequantize(unpack(np.frombuffer(one_piece, np.uint8), format, 40, 576), format, 576)
    assert np.abs(back - x).mean() < {"q2_k": 0.3, "q3_k": 0.2}.get(format, 0.08)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(FORMATS),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_several_matrices_are_stored_as_one(
    heights: list[int], format: Format, groups: int, threads: int
) -> None:
    x = matrix(sum(heights), 256, seed=groups)
    parts = np.split(x, np.cumsum(heights)[:-1])
    chunked = joined(parts, format, chunk_elements=groups * 16 * 256, threads=threads)
    assert chunked == whole(x, format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_tensors_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    x = torch.from_numpy(matrix(33, 64)).to(dtype)
    expected = whole(x.float().numpy(), "q8_0")
    assert joined(x, "q8_0") == expected
    transposed = x.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert joined(transposed, "q8_0", chunk_elements=1) == expected
    assert joined(torch.nn.Parameter(x), "q8_0") == expected


def test_stacked_experts_are_packed_one_by_one() -> None:
    x = matrix(3 * 20, 64).reshape(3, 20, 64)
    assert joined(x, "q5_0") == b"".join(whole(expert, "q5_0") for expert in x)
    assert len(joined(x, "q5_0")) == stored_bytes("q5_0", x.shape)


def test_importance_of_the_inputs_reaches_every_chunk_and_expert() -> None:
    x = matrix(3 * 40, 256).reshape(3, 40, 256)
    counts = np.abs(matrix(3, 256, seed=1))
    expected = b"".join(
        pack(quantize(x[i], "q4_k", importance=counts[i]), "q4_k", 40, 256).tobytes()
        for i in range(3)
    )
    assert joined(x, "q4_k", importance=counts, chunk_elements=1) == expected
    assert joined(x[1], "q4_k", importance=counts[1], chunk_elements=1) != whole(x[1], "q4_k")


def test_vectors_are_plain_f32() -> None:
    x = matrix(1, 7)[0]
    assert joined(torch.from_numpy(x).bfloat16(), "f32") == (
        torch.from_numpy(x).bfloat16().float().numpy().tobytes()
    )
    with pytest.raises(ValueError, match="one dimension"):
        joined(x, "q8_0")


def test_a_float_checkpoint_stored_as_it_is_loses_nothing() -> None:
    x = torch.from_numpy(matrix(20, 48)).bfloat16()
    packed = np.frombuffer(joined(x, "bf16"), np.uint8)
    back = dequantize(unpack(packed, "bf16", 20, 48), "bf16", 48)
    assert np.array_equal(back, x.float().numpy())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_named(format: Format, value: float) -> None:
    x = matrix(70, 256)
    x[37, 5] = value
    with pytest.raises(SpikeError, match=r"SPK403 .*w\[37, 5\] is .*not a finite number") as caught:
        joined(x, format, chunk_elements=1)
    assert "damaged" in caught.value.remedy


def test_the_place_is_right_in_experts_vectors_and_joined_matrices() -> None:
    x = matrix(60, 32)
    x[41, 3] = np.nan
    with pytest.raises(SpikeError, match=r"w\[2\]\[1, 3\]"):
        joined(x.reshape(3, 20, 32), "q8_0")
    with pytest.raises(SpikeError, match=r"w\[41, 3\]"):
        joined([x[:30], x[30:]], "q8_0")
    with pytest.raises(SpikeError, match=r"w\[3\]"):
        joined(x[41], "f32")


@pytest.mark.parametrize(("format", "value"), [("f16", 1e5), ("q8_0", 1e30), ("q4_k", 1e30)])
def test_a_value_out_of_range_is_named(format: str, value: float) -> None:
    x = matrix(20, 256)
    x[19, 255] = -value
    with pytest.raises(SpikeError, match=rf"SPK403 .*w\[19, 255\] is .*too large for {format}"):
        joined(x, format)


def test_matrices_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="different K"):
        joined([matrix(4, 32), matrix(4, 64)], "q8_0")


def test_the_bytes_do_not_change_from_release_to_release() -> None:
    """Engines are compared by hash: a change here is a new format version."""
    x = (np.arange(40 * 256, dtype=np.float32).reshape(40, 256) * 37 % 1001 - 500) / 512
    assert {f: hashlib.sha256(joined(x, f)).hexdigest()[:12] for f in FORMATS} == {
        "f32": "5c0bdff2d3fe",
        "f16": "8e07324d0689",
        "bf16": "26718d131153",
        "q8_0": "24511a4e2881",
        "q5_0": "15a0790213fa",
        "q5_1": "d6cb037c2f98",
        "q4_0": "420db31e9404",
        "q4_1": "af9abcf88919",
        "q2_k": "0b526d9be136",
        "q3_k": "419f4692b1ba",
        "q4_k": "03405a88684f",
        "q5_k": "ea08432b5ef6",
        "q6_k": "51526d0141b9",
    }


# Peak memory of storing a matrix of 512 MB (as f32) that lies in a file, as checkpoints do.
PEAK = """
import resource, sys, tempfile
import numpy as np
from spikeinfer.compiler.quantize import store
file = tempfile.TemporaryFile()
file.truncate(512 << 20)
x = np.memmap(file, np.float16, "r", shape=(1 << 17, 2048))
next(iter(store(x[:64], "q8_0", name="w")))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(len(chunk) for chunk in store(x, "q8_0", name="w"))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(total, before, after)
"""


def test_memory_does_not_grow_with_the_matrix() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total, before, after = map(int, done.stdout.split())
    assert total == (1 << 28) // 32 * 34
    # In KiB. The mapped file itself (512 MB of page cache) counts as resident; on top of it one
    # chunk (16 MB as f32, and its blocks) may be held, with room for the allocator.
    assert after - before < (512 << 10) + (100 << 10)
