"""The C++ module. Arrays are C-contiguous and already checked; outputs are written in place."""

import numpy as np
from numpy.typing import NDArray

def cpu_tier() -> str: ...
def cpu_features() -> list[tuple[str, str, bool]]: ...
def best_tier(features: list[str]) -> str: ...
def cache_lines(size: int) -> NDArray[np.uint8]: ...
def block_elements(format: str) -> int: ...
def row_multiple(format: str) -> int: ...
def row_bytes(format: str, k: int) -> int: ...
def packed_bytes(format: str, n: int, k: int) -> int: ...
def largest_value(format: str) -> float: ...
def quantize(
    x: NDArray[np.float32],
    format: str,
    rows: NDArray[np.uint8],
    importance: NDArray[np.float32] | None,
    threads: int,
) -> tuple[int, int, float] | None: ...
def quantize_with_feedback(
    x: NDArray[np.float32],
    factor: NDArray[np.float32],
    format: str,
    rows: NDArray[np.uint8],
    errors: NDArray[np.float32],
    threads: int,
) -> tuple[int, int, float] | None: ...
def dequantize(
    rows: NDArray[np.uint8], format: str, x: NDArray[np.float32], threads: int
) -> None: ...
def pack(
    rows: NDArray[np.uint8], format: str, n: int, k: int, packed: NDArray[np.uint8]
) -> None: ...
def unpack(
    packed: NDArray[np.uint8], format: str, n: int, k: int, rows: NDArray[np.uint8]
) -> None: ...

_Packed = tuple[NDArray[np.uint8], str, int, int]  # bytes, format, n, k

def linear(
    x: NDArray[np.float32],
    packed: _Packed,
    bias: NDArray[np.float32] | None,
    residual: NDArray[np.float32] | None,
    y: NDArray[np.float32],
    threads: int,
) -> None: ...
def gated_mlp(
    x: NDArray[np.float32],
    gate: _Packed,
    up: _Packed,
    down: _Packed,
    activation: str,
    residual: NDArray[np.float32] | None,
    y: NDArray[np.float32],
    threads: int,
) -> None: ...
def moe(
    x: NDArray[np.float32],
    weights: NDArray[np.float32],
    ids: NDArray[np.int64],
    gate: _Packed,
    up: _Packed,
    down: _Packed,
    activation: str,
    limit: float,
    alpha: float,
    gate_bias: NDArray[np.float32] | None,
    up_bias: NDArray[np.float32] | None,
    down_bias: NDArray[np.float32] | None,
    y: NDArray[np.float32],
    threads: int,
) -> None: ...
def dequantize_rows(packed: _Packed, rows: NDArray[np.int64], out: NDArray[np.float32]) -> None: ...
def stream_read(data: NDArray[np.uint8], threads: int) -> int: ...
def vnni_run(rounds: int, threads: int) -> int: ...
def fma_burst(rounds: int, threads: int) -> int: ...
