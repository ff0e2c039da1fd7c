"""Storage formats and CPU kernels: quantise, pack, and multiply by packed weights.

Formats: ``f32 f16 bf16``, GGUF's ``q8_0 q5_0 q5_1 q4_0 q4_1 q2_k q3_k q4_k q5_k q6_k``, and
``int4_sym`` for TensorRT: q4_0's blocks with a scale above zero.
A matrix [N, K] exists as

- *logical rows*: uint8 [N, row_bytes], byte for byte what a GGUF file holds;
- *packed*: uint8 [packed_bytes], 16 rows interleaved for the kernels (docs/storage-formats.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ExitCode, SpikeError
from . import _kernels

__all__ = [
    "FORMATS",
    "Activation",
    "CpuFeature",
    "ExpertBiases",
    "Format",
    "PackedExperts",
    "PackedMatrix",
    "best_tier",
    "block_elements",
    "cpu_features",
    "cpu_tier",
    "dequantize",
    "dequantize_rows",
    "fma_burst",
    "gated_mlp",
    "linear",
    "moe",
    "ops_library",
    "pack",
    "packed_bytes",
    "quantize",
    "quantize_with_feedback",
    "row_bytes",
    "row_multiple",
    "stream_read",
    "unpack",
    "vnni_run",
]

Format = Literal[
    "f32", "f16", "bf16",
    "q8_0", "q5_0", "q5_1", "q4_0", "q4_1",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "int4_sym",
]  # fmt: skip
FORMATS: tuple[Format, ...] = tuple(name for name in get_args(Format) if name != "int4_sym")
"""The formats of engines for the CPU, all of which GGUF has; int4_sym is TensorRT's."""
Activation = Literal["silu", "gelu_tanh", "gelu_erf", "gelu_quick", "relu", "relu2"]


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix [n, k] in packed layout: uint8 [packed_bytes(format, n, k)]."""

    data: NDArray[np.uint8]
    format: Format
    n: int
    k: int

    def __post_init__(self) -> None:
        _packed_matrix(self.data, self.format, self.n, self.k)

    @classmethod
    def quantized(cls, weight: NDArray[np.float32], fmt: Format, threads: int = 0) -> PackedMatrix:
        """weight f32 [N, K], quantised to `fmt` and packed. ValueError as from `quantize`."""
        n, k = weight.shape
        return cls(pack(quantize(weight, fmt, threads), fmt, n, k), fmt, n, k)


@dataclass(frozen=True)
class PackedExperts:
    """Stacked matrices [experts, n, k], each packed by itself: uint8 [experts * packed_bytes]."""

    data: NDArray[np.uint8]
    format: Format
    experts: int
    n: int
    k: int

    def __post_init__(self) -> None:
        size = self.experts * packed_bytes(self.format, self.n, self.k)
        if self.data.dtype != np.uint8 or self.data.shape != (size,):
            raise ValueError(
                f"data must be uint8 [{size}], not {self.data.dtype} {self.data.shape}"
            )

    @classmethod
    def quantized(cls, weight: NDArray[np.float32], fmt: Format, threads: int = 0) -> PackedExperts:
        """weight f32 [E, N, K], quantised to `fmt` and packed. ValueError as from `quantize`."""
        experts, n, k = weight.shape
        size = packed_bytes(fmt, n, k)
        data = _kernels.cache_lines(experts * size)
        for i in range(experts):
            part = pack(quantize(weight[i], fmt, threads), fmt, n, k)
            data[i * size : (i + 1) * size] = part
        return cls(data, fmt, experts, n, k)


@dataclass(frozen=True)
class ExpertBiases:
    """Biases of stacked gated MLPs: gate and up f32 [E, M], down f32 [E, N]."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]


class CpuFeature(NamedTuple):
    """A CPU feature as /proc/cpuinfo spells it, the lowest tier that needs it, and whether this
    CPU and its system have it."""

    name: str
    tier: str
    present: bool


def cpu_tier() -> str:
    """Instruction-set tier in use: ``scalar``, ``avx2``, ``avx512`` or, if SPIKE_CPU asks for
    it, ``avx512_bf16``. SPIKE_CPU lowers it, too.

    SpikeError SPK801 if SPIKE_CPU is something else.
    """
    try:
        return _kernels.cpu_tier()
    except ValueError as error:
        remedy = "Set it to one of these to lower what is used, or unset it."
        raise SpikeError("SPK801", "kernels", f"{error}.", remedy, ExitCode.USAGE) from error


def cpu_features() -> tuple[CpuFeature, ...]:
    """Every feature that the kernels use, lowest tier first."""
    return tuple(CpuFeature(*feature) for feature in _kernels.cpu_features())


def best_tier(features: Iterable[str]) -> str:
    """The tier of a CPU with just these: a missing one costs its tier and those above."""
    return _kernels.best_tier(list(features))


def ops_library() -> Path:
    """Path of the ONNX Runtime custom-op library; FileNotFoundError if it was not built.

    SpikeError SPK801 as from `cpu_tier`: better now than from the first op of a session.
    """
    cpu_tier()
    path = Path(_kernels.__file__).with_name("libspike_ops.so")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: reinstall spikeinfer")
    return path


def block_elements(fmt: Format) -> int:
    """Elements that share one block: 1, 32 or 256."""
    return _kernels.block_elements(fmt)


def row_multiple(fmt: Format) -> int:
    """What K must be a multiple of: 1, 32, or 64 for blocks of 256.

    A row of such a format that is not whole blocks ends in a short one (docs/storage-formats.md),
    which GGUF does not have.
    """
    return _kernels.row_multiple(fmt)


def row_bytes(fmt: Format, k: int) -> int:
    """Bytes of one logical row of k elements."""
    _check_k(fmt, k)
    return _kernels.row_bytes(fmt, k)


def packed_bytes(fmt: Format, n: int, k: int) -> int:
    """Bytes of an [n, k] matrix in packed layout: n rounded up to 16 rows, nothing more."""
    _check_k(fmt, k)
    return _kernels.packed_bytes(fmt, n, k)


def quantize(
    x: NDArray[np.float32],
    fmt: Format,
    threads: int = 0,
    importance: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """x f32 [N, K] -> logical rows uint8 [N, row_bytes]; the same bytes for any `threads`.

    `threads` 0 means one per CPU. `importance` f32 [K] says how much the squared error of each
    input channel counts (finite, not negative; the channel's mean square on calibration text). The
    scale searches are llama.cpp's with and without an importance matrix; f32, f16, bf16 and q8_0
    have nothing to weigh. ValueError names row and column of a value that is NaN, infinite or too
    large for the format.
    """
    x = _float_matrix(x, "x")
    n, k = x.shape
    rows = np.empty((n, row_bytes(fmt, k)), np.uint8)
    _require_stored(_kernels.quantize(x, fmt, rows, _importance(importance, k), threads), fmt)
    return rows


def quantize_with_feedback(
    x: NDArray[np.float32], factor: NDArray[np.float32], fmt: Format, threads: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """x f32 [N, K] -> logical rows uint8 [N, row_bytes], errors f32 [N, 3].

    `factor` R f32 [K, K] is upper triangular with a positive diagonal; R R^T is the inputs' second
    moment H. A row's error is (x - q) H (x - q)^T, by how it was quantised: as `quantize` does
    without and with the importances diag(H), and with error feedback. Each row is stored by the
    method that leaves the least. The same bytes for any `threads`; ValueError as from `quantize`.
    """
    x, factor = _float_matrix(x, "x"), _float_matrix(factor, "factor")
    n, k = x.shape
    if fmt in ("f32", "f16", "bf16"):
        raise ValueError(f"{fmt} has no blocks, so that nothing can be fed back")
    if factor.shape != (k, k) or not (np.diagonal(factor) > 0).all():
        raise ValueError(f"factor must be [{k}, {k}] with a positive diagonal, not {factor.shape}")
    rows = np.empty((n, row_bytes(fmt, k)), np.uint8)
    errors = np.empty((n, 3), np.float32)
    _require_stored(_kernels.quantize_with_feedback(x, factor, fmt, rows, errors, threads), fmt)
    return rows, errors


def dequantize(
    blocks: NDArray[np.uint8], fmt: Format, k: int, threads: int = 0
) -> NDArray[np.float32]:
    """Logical rows uint8 [N, row_bytes] -> f32 [N, k]."""
    blocks = _logical_rows(blocks, fmt, k)
    x = np.empty((blocks.shape[0], k), np.float32)
    _kernels.dequantize(blocks, fmt, x, threads)
    return x


def pack(blocks: NDArray[np.uint8], fmt: Format, n: int, k: int) -> NDArray[np.uint8]:
    """Logical rows uint8 [n, row_bytes] -> packed uint8 [packed_bytes], 64-byte aligned."""
    blocks = _logical_rows(blocks, fmt, k)
    if blocks.shape[0] != n:
        raise ValueError(f"blocks has {blocks.shape[0]} rows, expected n = {n}")
    packed = _kernels.cache_lines(packed_bytes(fmt, n, k))
    _kernels.pack(blocks, fmt, n, k, packed)
    return packed


def unpack(packed: NDArray[np.uint8], fmt: Format, n: int, k: int) -> NDArray[np.uint8]:
    """Packed uint8 [packed_bytes] -> logical rows uint8 [n, row_bytes]; the inverse of `pack`."""
    packed = _packed_matrix(packed, fmt, n, k)
    rows = np.empty((n, row_bytes(fmt, k)), np.uint8)
    _kernels.unpack(packed, fmt, n, k, rows)
    return rows


def linear(
    x: NDArray[np.float32],
    packed: NDArray[np.uint8],
    fmt: Format,
    n: int,
    bias: NDArray[np.float32] | None = None,
    residual: NDArray[np.float32] | None = None,
    threads: int = 0,
) -> NDArray[np.float32]:
    """x f32 [T, K] times packed weights [n, K] -> f32 [T, n] (+ bias [n] + residual [T, n]).

    Block formats quantise x to int8 per 32 elements with an fp32 scale. A row of the result is the
    same bits for any T, `threads` and CPU tier.
    """
    x = _float_matrix(x, "x")
    t, k = x.shape
    packed = _packed_matrix(packed, fmt, n, k)
    bias = _optional(bias, (n,), "bias")
    residual = _optional(residual, (t, n), "residual")
    y = np.empty((t, n), np.float32)
    _kernels.linear(x, (packed, fmt, n, k), bias, residual, y, threads)
    return y


def gated_mlp(
    x: NDArray[np.float32],
    gate: PackedMatrix,
    up: PackedMatrix,
    down: PackedMatrix,
    activation: Activation,
    residual: NDArray[np.float32] | None = None,
    threads: int = 0,
) -> NDArray[np.float32]:
    """down(act(gate(x)) * up(x)) (+ residual): x f32 [T, K], gate and up [M, K], down [N, M]."""
    x = _float_matrix(x, "x")
    shapes = [(w.n, w.k) for w in (gate, up, down)]
    if shapes[0] != shapes[1] or shapes[2][1] != shapes[0][0] or x.shape[1] != gate.k:
        raise ValueError(f"x {x.shape} with gate, up, down {shapes} do not make a gated MLP")
    if activation not in get_args(Activation):
        raise ValueError(f"unknown activation {activation!r}: one of {get_args(Activation)}")
    y = np.empty((x.shape[0], down.n), np.float32)
    residual = _optional(residual, y.shape, "residual")
    a, b, c = ((w.data, w.format, w.n, w.k) for w in (gate, up, down))
    _kernels.gated_mlp(x, a, b, c, activation, residual, y, threads)
    return y


def moe(
    x: NDArray[np.float32],
    weights: NDArray[np.float32],
    ids: NDArray[np.int64],
    gate: PackedExperts,
    up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
    biases: ExpertBiases | None = None,
    *,
    limit: float = 0.0,
    alpha: float = 1.0,
    threads: int = 0,
) -> NDArray[np.float32]:
    """y[t] = sum_j weights[t, j] * down(act(gate(x[t])) * up(x[t])) of expert ids[t, j].

    x f32 [T, K], weights f32 and ids i64 [T, top], gate and up [E, M, K], down [E, N, M] -> f32
    [T, N]. With a `limit` the gated product is act(alpha * min(g, limit)) / alpha *
    (clamp(u, -limit, limit) + 1). Only chosen experts are read. A row of the result is the same
    bits for any T, `threads` and CPU tier.
    """
    x, weights = _float_matrix(x, "x"), _float_matrix(weights, "weights")
    shapes = [(w.experts, w.n, w.k) for w in (gate, up, down)]
    wanted = (gate.experts, down.n, gate.n)
    if shapes[0] != shapes[1] or shapes[2] != wanted or x.shape[1] != gate.k:
        raise ValueError(f"x {x.shape} with gate, up, down {shapes} do not make experts")
    if ids.dtype != np.int64 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids {ids.dtype} {ids.shape}, weights {weights.shape}, x {x.shape}")
    if ids.size and not 0 <= ids.min() <= ids.max() < gate.experts:
        raise ValueError(f"ids must be in [0, {gate.experts}), not {ids.min()}..{ids.max()}")
    if activation not in get_args(Activation) or limit < 0 or alpha <= 0:
        raise ValueError(f"activation {activation!r}, limit {limit}, alpha {alpha}")
    middle = (gate.experts, gate.n)
    given = (biases.gate, biases.up, biases.down) if biases else (None, None, None)
    a, b = (_optional(g, middle, name) for g, name in zip(given[:2], ("gate", "up"), strict=True))
    c = _optional(given[2], (down.experts, down.n), "down")
    y = np.empty((x.shape[0], down.n), np.float32)
    g, u, d = ((w.data, w.format, w.n, w.k) for w in (gate, up, down))
    ids = np.ascontiguousarray(ids)
    _kernels.moe(x, weights, ids, g, u, d, activation, limit, alpha, a, b, c, y, threads)
    return y


def dequantize_rows(
    packed: NDArray[np.uint8], fmt: Format, n: int, k: int, rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Rows of a packed [n, k] matrix in fp32 [len(rows), k]: embedding lookup."""
    packed = _packed_matrix(packed, fmt, n, k)
    rows = np.ascontiguousarray(rows, np.int64)
    if rows.ndim != 1 or (rows.size and not 0 <= rows.min() <= rows.max() < n):
        raise ValueError(f"rows must be one axis of indices in [0, {n}), not {rows}")
    out = np.empty((rows.size, k), np.float32)
    _kernels.dequantize_rows((packed, fmt, n, k), rows, out)
    return out


def stream_read(data: NDArray[np.uint8], threads: int = 0) -> int:
    """Read every byte once on all threads (benchmarks); returns the sum of the 64-bit words."""
    return _kernels.stream_read(np.ascontiguousarray(data), threads)


def vnni_run(rounds: int = 500_000, threads: int = 0) -> int:
    """Multiply int8 in registers with VNNI on all threads (benchmarks); returns the operations.

    Two per multiply-add. 0 if the tier in use has no VNNI: there is no such peak then.
    """
    if rounds < 8:
        raise ValueError(f"rounds must be at least 8, not {rounds}")
    return _kernels.vnni_run(rounds, threads)


def fma_burst(rounds: int, threads: int = 0) -> int:
    """Multiply-adds in registers on all threads (benchmarks); returns the fp32 operations done."""
    return _kernels.fma_burst(rounds, threads)


def _require_stored(bad: tuple[int, int, float] | None, fmt: Format) -> None:
    if bad is not None:
        row, column, value = bad
        limit = _kernels.largest_value(fmt)
        raise ValueError(
            f"row {row}, column {column} is {value}: {fmt} holds finite values up to {limit:.4g}"
        )


def _check_k(fmt: Format, k: int) -> None:
    if fmt not in get_args(Format):
        raise ValueError(f"unknown storage format {fmt!r}: one of {', '.join(get_args(Format))}")
    multiple = _kernels.row_multiple(fmt)
    if k <= 0 or k % multiple:
        raise ValueError(f"{fmt} needs rows that are a positive multiple of {multiple}, not {k}")


def _float_matrix(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    if x.dtype != np.float32 or x.ndim != 2:
        raise ValueError(f"{name} must be float32 with two axes, not {x.dtype} {x.shape}")
    return np.ascontiguousarray(x)


def _logical_rows(blocks: NDArray[np.uint8], fmt: Format, k: int) -> NDArray[np.uint8]:
    size = row_bytes(fmt, k)
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] != size:
        raise ValueError(
            f"blocks must be uint8 [N, {size}] for {fmt} rows of {k}, "
            f"not {blocks.dtype} {blocks.shape}"
        )
    return np.ascontiguousarray(blocks)


def _packed_matrix(packed: NDArray[np.uint8], fmt: Format, n: int, k: int) -> NDArray[np.uint8]:
    size = packed_bytes(fmt, n, k)
    if packed.dtype != np.uint8 or packed.shape != (size,):
        raise ValueError(
            f"packed must be uint8 [{size}] for {fmt} [{n}, {k}], not {packed.dtype} {packed.shape}"
        )
    return np.ascontiguousarray(packed)


def _optional(
    x: NDArray[np.float32] | None, shape: tuple[int, ...], name: str
) -> NDArray[np.float32] | None:
    if x is None:
        return None
    if x.dtype != np.float32 or x.shape != shape:
        raise ValueError(f"{name} must be float32 {shape}, not {x.dtype} {x.shape}")
    return np.ascontiguousarray(x)


def _importance(importance: NDArray[np.float32] | None, k: int) -> NDArray[np.float32] | None:
    importance = _optional(importance, (k,), "importance")
    if importance is not None and not (np.isfinite(importance) & (importance >= 0)).all():
        raise ValueError("importance must be finite and not negative")
    return importance
