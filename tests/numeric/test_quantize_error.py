"""The error meter: the figure of the definition, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from spikeinfer.compiler.quantize import ErrorMeter, store
from spikeinfer.compiler.quantize.error import SAMPLED
from spikeinfer.kernels import dequantize, quantize

ROUNDING = 1e-3
"""Of four digits: half a unit of the last one is at most 5e-4 of the figure."""


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def metered(values: torch.Tensor, format: str, chunk: int = 1 << 22) -> float:
    meter = ErrorMeter()
    list(store(values, format, name="w", chunk_elements=chunk, meter=meter))
    return meter.relative


def expected(values: torch.Tensor, format: str) -> float:
    rows = values.reshape(-1, values.shape[-1]).numpy()
    stored = dequantize(quantize(rows, format), format, rows.shape[1])  # type: ignore[arg-type]
    return float(np.linalg.norm(rows - stored) / np.linalg.norm(rows))


@pytest.mark.parametrize("format", ["q8_0", "q5_0", "q4_k", "bf16"])
def test_the_error_is_that_of_the_definition(format: str) -> None:
    values = matrix(3, 40, 256)
    assert metered(values, format) == pytest.approx(expected(values, format), rel=ROUNDING)
    assert metered(values, format, chunk=4096) == metered(values, format)


def test_exact_formats_and_zeros_have_none() -> None:
    assert metered(matrix(8, 32), "f32") == 0.0
    assert metered(torch.zeros(8, 32), "q8_0") == 0.0


def test_a_large_matrix_is_sampled() -> None:
    """A quarter of the rows: 8,192 values each, so that the two figures differ by little."""
    values = matrix(4 * SAMPLED // 8192, 8192)
    assert metered(values, "q8_0") == pytest.approx(expected(values, "q8_0"), rel=0.01)
