"""Blocks against GGUF's own decoder; the packed layout against its specification."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from spikeinfer import kernels
from spikeinfer.kernels import FORMATS, Format

GGUF_TYPES: dict[Format, GGMLQuantizationType] = {
    fmt: GGMLQuantizationType[fmt.upper()] for fmt in FORMATS if fmt != "f32"
}
BLOCKS = tuple(fmt for fmt in FORMATS if kernels.block_elements(fmt) > 1)
ROWS = (1, 2, 15, 16, 17, 33)


def random_rows(fmt: Format, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Logical rows of random bytes: every code and scale, NaN and infinite scales among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, kernels.row_bytes(fmt, k)), np.uint8)


def widths(fmt: Format) -> tuple[int, ...]:
    block = kernels.block_elements(fmt)
    return (block, 3 * block, 7 * block) if block > 1 else (1, 5, 130)


@pytest.mark.parametrize("fmt", GGUF_TYPES)
@pytest.mark.parametrize("fill", ["random", 0x00, 0xFF, 0x7F, 0x80])
def test_dequantize_is_ggufs(fmt: Format, fill: str | int) -> None:
    k = 1024
    rows = random_rows(fmt, 40, k)
    if isinstance(fill, int):
        rows[:] = fill
    assert_as_ggufs(rows, fmt, k)


@pytest.mark.parametrize("fmt", GGUF_TYPES)
@pytest.mark.parametrize("half", [0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF])
def test_dequantize_is_ggufs_at_the_ends_of_fp16(fmt: Format, half: int) -> None:
    """Smallest and largest denormal, smallest and largest normal scale; codes of every kind."""
    k = 1024
    rows = random_rows(fmt, 40, k)
    for first in range(0, rows.shape[1] - 1, 2):  # every 16-bit field of the blocks in turn
        rows[first % 40, first : first + 2] = half & 255, half >> 8
    assert_as_ggufs(rows, fmt, k)
    rows.view(np.uint16)[:] = half
    assert_as_ggufs(rows, fmt, k)


def assert_as_ggufs(rows: np.ndarray, fmt: Format, k: int) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        expected = quants.dequantize(rows, GGUF_TYPES[fmt]).reshape(len(rows), k)
    found = kernels.dequantize(rows, fmt, k)
    numbers = ~(np.isnan(found) & np.isnan(expected))  # bits, as zeros have a sign; NaN is NaN
    np.testing.assert_array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


@pytest.mark.parametrize("fmt", GGUF_TYPES)
def test_row_bytes_are_ggufs(fmt: Format) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[GGUF_TYPES[fmt]]
    assert kernels.block_elements(fmt) == elements
    assert kernels.row_bytes(fmt, 6 * elements) == 6 * size


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("n", ROWS)
def test_pack_round_trip(fmt: Format, n: int) -> None:
    for k in widths(fmt):
        rows = random_rows(fmt, n, k)
        packed = kernels.pack(rows, fmt, n, k)
        assert packed.nbytes == -(-n // 16) * 16 * kernels.row_bytes(fmt, k)
        assert packed.ctypes.data % 64 == 0
        np.testing.assert_array_equal(kernels.unpack(packed, fmt, n, k), rows)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_a_packed_matrix(fmt: Format) -> None:
    n, k = 37, widths(fmt)[-1]
    rng = np.random.default_rng(1)
    rows = kernels.quantize(rng.standard_normal((n, k), np.float32), fmt)
    packed = kernels.pack(rows, fmt, n, k)
    picked = np.array([36, 0, 15, 16, 36])
    np.testing.assert_array_equal(
        kernels.dequantize_rows(packed, fmt, n, k, picked), kernels.dequantize(rows, fmt, k)[picked]
    )


# docs/storage-formats.md, read by somebody who has only that page: 16 rows of one tile.


def halves(data: np.ndarray) -> np.ndarray:
    return data.view(np.float16).astype(np.float32)


def lines(data: np.ndarray) -> np.ndarray:
    """Lines [..., 64] -> [..., 16 rows, 4 k]."""
    return data.reshape(*data.shape[:-1], 16, 4)


def by_row(codes: np.ndarray) -> np.ndarray:
    """[lines, 16, 4] -> [16, 4 * lines] in order of k."""
    return codes.transpose(1, 0, 2).reshape(16, -1)


def read_q8_0(tile: np.ndarray) -> np.ndarray:
    codes = by_row(lines(tile[32:].reshape(8, 64))).astype(np.float32) - 128
    return halves(tile[:32])[:, None] * codes


def read_q5_0(tile: np.ndarray) -> np.ndarray:
    codes = nibble_codes(tile[96:]) + 16 * fifth_bits(tile[32:96].view(np.uint64))
    return halves(tile[:32])[:, None] * (by_row(codes).astype(np.float32) - 16)


def fifth_bits(words: np.ndarray) -> np.ndarray:
    """64-bit words [lines] -> one bit each [lines, 16, 4]."""
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return lines(bits.astype(np.uint8))


def nibble_codes(data: np.ndarray) -> np.ndarray:
    nibbles = lines(data.reshape(4, 64))
    return np.concatenate([nibbles & 15, nibbles >> 4])


def read_q5_1(tile: np.ndarray) -> np.ndarray:
    codes = nibble_codes(tile[128:]) + 16 * fifth_bits(tile[64:128].view(np.uint64))
    d, m = halves(tile[:32]), halves(tile[32:64])
    return d[:, None] * by_row(codes).astype(np.float32) + m[:, None]


def read_q4_0(tile: np.ndarray) -> np.ndarray:
    return halves(tile[:32])[:, None] * (by_row(nibble_codes(tile[32:])).astype(np.float32) - 8)


def read_q4_1(tile: np.ndarray) -> np.ndarray:
    d, m = halves(tile[:32]), halves(tile[32:64])
    return d[:, None] * by_row(nibble_codes(tile[64:])).astype(np.float32) + m[:, None]


def read_q2_k(tile: np.ndarray) -> np.ndarray:
    d, dmin, out = halves(tile[:32]), halves(tile[32:64]), []
    for group in tile[64:].reshape(4, 320):
        scales, pairs = group[:64].reshape(4, 16), lines(group[64:].reshape(4, 64))
        for q in range(4):
            codes = by_row(pairs >> (2 * q) & 3).astype(np.float32)
            scale, minimum = d * (scales[q] & 15), dmin * (scales[q] >> 4)
            out.append(scale[:, None] * codes - minimum[:, None])
    return np.concatenate(out, axis=1)


def read_q3_k(tile: np.ndarray) -> np.ndarray:
    d, out = halves(tile[:32]), []
    for group in tile[32:].reshape(4, 432):
        low, high = group[:32].reshape(2, 16), group[32:48]
        words = group[48:176].view(np.uint64).reshape(4, 4)
        pairs = lines(group[176:].reshape(4, 64))
        for q in range(4):
            scale = (low[q // 2] >> (4 * (q % 2)) & 15) | (high >> (2 * q) & 3) << 4
            codes = by_row((pairs >> (2 * q) & 3) + 4 * fifth_bits(words[q])).astype(np.float32)
            out.append((d * (scale.astype(np.float32) - 32))[:, None] * (codes - 4))
    return np.concatenate(out, axis=1)


def read_q5_k(tile: np.ndarray) -> np.ndarray:
    d, dmin, out = halves(tile[:32]), halves(tile[32:64]), []
    for group in tile[64:].reshape(4, 688):
        scale_low, min_low, high = group[:48].reshape(3, 16)
        words = group[48:176].view(np.uint64).reshape(2, 8)
        nibbles = lines(group[176:].reshape(8, 64))
        for b in range(2):
            scale = (scale_low >> (4 * b) & 15) | (high >> (2 * b) & 3) << 4
            minimum = (min_low >> (4 * b) & 15) | (high >> (4 + 2 * b) & 3) << 4
            codes = by_row((nibbles >> (4 * b) & 15) + 16 * fifth_bits(words[b]))
            part = (d * scale)[:, None] * codes.astype(np.float32)
            out.append(part - (dmin * minimum)[:, None])
    return np.concatenate(out, axis=1)


def read_q4_k(tile: np.ndarray) -> np.ndarray:
    d, dmin = halves(tile[:32]), halves(tile[32:64])
    scale_low, min_low, high = tile[64:256].reshape(3, 4, 16)
    nibbles = lines(tile[256:].reshape(4, 8, 64))
    out = []
    for s in range(8):
        p, odd = divmod(s, 2)
        scale = (scale_low[p] >> (4 * odd) & 15) | (high[p] >> (2 * odd) & 3) << 4
        minimum = (min_low[p] >> (4 * odd) & 15) | (high[p] >> (4 + 2 * odd) & 3) << 4
        codes = by_row(nibbles[p] >> (4 * odd) & 15).astype(np.float32)
        out.append((d * scale)[:, None] * codes - (dmin * minimum)[:, None])
    return np.concatenate(out, axis=1)


def read_q6_k(tile: np.ndarray) -> np.ndarray:
    d, out = halves(tile[:32]), []
    for group in tile[32:].reshape(4, 832):
        scales = group[:64].view(np.int8).reshape(4, 16).astype(np.float32)
        nibbles = lines(group[64:576].reshape(2, 4, 64))
        pairs = lines(group[576:].reshape(4, 64))
        for q, shift in enumerate((4, 2, 6, 0)):
            nibble, pair = nibbles[q // 2] >> (4 * (q % 2)) & 15, pairs >> shift & 3
            code = nibble | pair << 4 if q % 2 == 0 else nibble << 2 | pair
            out.append((d * scales[q])[:, None] * (by_row(code).astype(np.float32) - 32))
    return np.concatenate(out, axis=1)


READERS = {
    "q8_0": read_q8_0, "q5_0": read_q5_0, "q5_1": read_q5_1, "q4_0": read_q4_0, "q4_1": read_q4_1,
    "q2_k": read_q2_k, "q3_k": read_q3_k, "q4_k": read_q4_k, "q5_k": read_q5_k, "q6_k": read_q6_k,
}  # fmt: skip


@pytest.mark.parametrize("fmt", BLOCKS)
def test_packed_layout_as_documented(fmt: Format) -> None:
    block = kernels.block_elements(fmt)
    n, k = 32, 2 * block
    rng = np.random.default_rng(2)
    rows = kernels.quantize(rng.standard_normal((n, k), np.float32), fmt)
    tiles = kernels.pack(rows, fmt, n, k).reshape(2, 2, -1)  # row group, block, bytes
    read = np.block([[READERS[fmt](tile) for tile in group] for group in tiles])
    np.testing.assert_array_equal(read, kernels.dequantize(rows, fmt, k))


@pytest.mark.parametrize(("fmt", "dtype"), [("f32", np.uint32), ("f16", np.uint16)])
def test_packed_values_as_documented(fmt: Format, dtype: type) -> None:
    rows = random_rows(fmt, 32, 7)
    packed = kernels.pack(rows, fmt, 32, 7).view(dtype).reshape(2, 7, 16)
    np.testing.assert_array_equal(packed.transpose(0, 2, 1).reshape(32, 7), rows.view(dtype))


# Short last blocks: k in 64s, read as docs/storage-formats.md says.

SHORT = tuple(fmt for fmt in BLOCKS if kernels.block_elements(fmt) == 256)
HEADS = {"q2_k": 4, "q3_k": 2, "q4_k": 4, "q5_k": 4, "q6_k": 2}
BITS = {"q2_k": (8, 4, 2), "q3_k": (4, 6, 3), "q4_k": (4, 6, 4), "q5_k": (4, 6, 5),
        "q6_k": (4, 8, 6)}  # fmt: skip
"""Numbers per group, bits of each, bits of a code."""


def numbers(bits: np.ndarray, width: int) -> np.ndarray:
    """A string of bits [count * width], lowest first -> integers [count]."""
    return bits.reshape(-1, width) @ (1 << np.arange(width))


def read_short(fmt: str, block: np.ndarray) -> np.ndarray:
    head, (count, width, code_width) = HEADS[fmt], BITS[fmt]
    scales = halves(block[:head].copy())
    group_bits = count * width + 64 * code_width
    out = []
    for group in np.unpackbits(block[head:], bitorder="little").reshape(-1, group_bits):
        stored = numbers(group[: count * width], width).astype(np.float32)
        codes = numbers(group[count * width :], code_width).astype(np.float32)
        if head == 4:
            scale, minimum = np.split(stored, 2)
            codes = codes.reshape(len(scale), -1)
            part = (scales[0] * scale)[:, None] * codes - (scales[1] * minimum)[:, None]
        else:
            stored = stored - 32 if fmt == "q3_k" else stored - 256 * (stored > 127)
            codes = codes.reshape(4, 16) - (4 if fmt == "q3_k" else 32)
            part = (scales[0] * stored)[:, None] * codes
        out.append(part.ravel())
    return np.concatenate(out)


@pytest.mark.parametrize("fmt", SHORT)
@pytest.mark.parametrize("k", [64, 128, 192, 576, 640])
def test_short_blocks_as_documented(fmt: Format, k: int) -> None:
    whole, groups = divmod(k, 256)
    head, (count, width, code_width) = HEADS[fmt], BITS[fmt]
    size = head + groups // 64 * (count * width + 64 * code_width) // 8
    block_bytes = kernels.row_bytes(fmt, 256)
    assert kernels.row_multiple(fmt) == 64
    assert kernels.row_bytes(fmt, k) == whole * block_bytes + size
    x = np.random.default_rng(3).standard_normal((5, k), np.float32)
    rows = kernels.quantize(x, fmt)
    back = kernels.dequantize(rows, fmt, k)
    for row, values in zip(rows, back, strict=True):
        np.testing.assert_array_equal(read_short(fmt, row[-size:]), values[256 * whole :])
    if whole:
        first = kernels.quantize(np.ascontiguousarray(x[:, : 256 * whole]), fmt)
        np.testing.assert_array_equal(rows[:, :-size], first)


@pytest.mark.parametrize("fmt", SHORT)
def test_a_short_block_is_as_exact_as_a_whole_one(fmt: Format) -> None:
    x = np.random.default_rng(4).standard_normal((64, 64), np.float32)
    wide = x.reshape(16, 256)

    def error(values: np.ndarray) -> float:
        back = kernels.dequantize(kernels.quantize(values, fmt), fmt, values.shape[1])
        return float(((back - values) ** 2).mean())

    assert error(x) < 1.05 * error(wide)


@pytest.mark.parametrize("fmt", SHORT)
@pytest.mark.parametrize("n", ROWS)
def test_short_blocks_pack_without_loss(fmt: Format, n: int) -> None:
    for k in (64, 192, 576, 640):
        rows = random_rows(fmt, n, k)
        packed = kernels.pack(rows, fmt, n, k)
        np.testing.assert_array_equal(kernels.unpack(packed, fmt, n, k), rows)
        picked = np.arange(n)
        np.testing.assert_array_equal(
            kernels.dequantize_rows(packed, fmt, n, k, picked), kernels.dequantize(rows, fmt, k)
        )


def test_wrong_shapes_say_what_is_wrong() -> None:
    rows = np.zeros((3, 144), np.uint8)
    with pytest.raises(ValueError, match=r"q4_k needs rows that are a positive multiple of 64"):
        kernels.row_bytes("q4_k", 100)
    with pytest.raises(ValueError, match="unknown storage format 'q9'"):
        kernels.row_bytes("q9", 256)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"uint8 \[N, 288\] for q4_k rows of 512"):
        kernels.dequantize(rows, "q4_k", 512)
    with pytest.raises(ValueError, match="blocks has 3 rows, expected n = 4"):
        kernels.pack(rows, "q4_k", 4, 256)
    with pytest.raises(ValueError, match=r"packed must be uint8 \[2304\]"):
        kernels.unpack(np.zeros(100, np.uint8), "q4_k", 3, 256)
    with pytest.raises(ValueError, match=r"rows must be one axis of indices in \[0, 3\)"):
        kernels.dequantize_rows(kernels.pack(rows, "q4_k", 3, 256), "q4_k", 3, 256, np.array([3]))
