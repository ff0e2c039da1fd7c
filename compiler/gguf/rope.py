"""Rotary embeddings in GGUF's words: base, scaling keys, and Llama 3's factors, which are a tensor.

llama.cpp divides each frequency by `rope_freqs.weight`; transformers computes these factors from
four numbers (`_compute_llama3_parameters` in modeling_rope_utils.py), two of which are the same for
every model. `llama3_parameters` finds the numbers and is sure of them only if they give back the
tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
LOW, HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every Llama 3 model."""
AGREE = 1e-5
"""Relative; the tensor is float32 computed in float32."""
FACTORS = "rope_freqs.weight"


def wavelengths(theta: float, dimensions: int) -> Float64:
    """Of the pairs of a rotation, float64 [dimensions / 2]."""
    exponents = np.arange(0, dimensions, 2, dtype=np.float64) / dimensions
    return 2 * math.pi * np.float64(theta) ** exponents


def llama3_factors(waves: Float64, factor: float, original: float) -> Float64:
    """What each frequency is divided by, float64 [dimensions / 2]."""
    smooth = (original / waves - LOW) / (HIGH - LOW)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < original / HIGH, 1.0, np.where(waves > original / LOW, factor, between))


def llama3_parameters(factors: Float64, theta: float) -> dict[str, Any] | None:
    """`rope_parameters` that give these factors; None if there are none."""
    waves, factor = wavelengths(theta, 2 * len(factors)), float(factors.max())
    inside = np.flatnonzero((factors > 1 + AGREE) & (factors < factor * (1 - AGREE)))
    if inside.size:  # between the two bounds a factor says where they are
        smooth = (1 / factors[inside[0]] - 1 / factor) / (1 - 1 / factor)
        originals = [round(float(waves[inside[0]] * (smooth * (HIGH - LOW) + LOW)))]
    else:
        originals = [1 << power for power in range(4, 24)]
    for original in originals:
        if np.allclose(llama3_factors(waves, factor, original), factors, rtol=AGREE, atol=0):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": round(factor, 4),
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }
    return None
