"""Quantisation names as users write them, and the ones we know but don't offer yet."""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Self

from ...errors import ExitCode, SpikeError


class Quantization(StrEnum):
    """What a whole model is stored as. Each name gives every tensor its format (see policy.py)."""

    Q2_K = "q2_k"
    Q3_K_M = "q3_k_m"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q4_K_S = "q4_k_s"
    Q4_K_M = "q4_k_m"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q5_K_M = "q5_k_m"
    Q6_K = "q6_k"
    Q8_0 = "q8_0"
    INT4_SYM = "int4_sym"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @classmethod
    def parse(cls, name: str, dtype: str = "bfloat16") -> Self:
        """The quantisation a user named; `none` and `auto` keep matrices in `dtype`.

        Raises:
            SpikeError: SPK401 for an unknown name, SPK402 for one that is not in this version.
        """
        key = name.strip().lower().replace("-", "_")
        if key in ("none", "auto", ""):
            key = dtype.strip().lower().removeprefix("torch.")
        key = _ALIASES.get(key, key)
        if key in cls.__members__.values():
            return cls(key)
        if key in _LATER:
            raise SpikeError(
                "SPK402",
                "quantization",
                f"{name} is not in this version.",
                f"Use {_LATER[key]} (nearest), or one of {', '.join(cls)}.",
                ExitCode.UNSUPPORTED,
            )
        near = difflib.get_close_matches(key, [*cls, *_ALIASES, *_LATER], 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise SpikeError(
            "SPK401",
            "quantization",
            f"{name!r} is not a quantization.",
            f"{hint}Known: {', '.join(cls)}, none.",
            ExitCode.USAGE,
        )


_ALIASES = {
    "fp32": "f32", "float32": "f32", "float": "f32",
    "fp16": "f16", "float16": "f16", "half": "f16",
    "bfloat16": "bf16",
    "q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m",
}  # fmt: skip

_LATER = {
    name: nearest
    for nearest, names in (
        ("q2_k", "q2_k_s iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq2_m iq3_xxs iq3_xs tq1_0 tq2_0"),
        ("q3_k_m", "q3_k_s q3_k_l iq3_s iq3_m"),
        ("q4_k_s", "iq4_nl iq4_xs mxfp4 mxfp4_moe nvfp4 fp4 nf4"),
        ("q4_k_m", "int4 int4_awq w4a16 w4a16_awq w4a16_gptq w4a8_awq awq gptq"),
        ("q5_k_m", "q5_k_s"),
        ("q8_0", "q8_1 q8_k int8 int8_sq w8a16 w8a8 w8a8_sq_per_channel fp8 fp8_e4m3 fp8_rowwise "
         "mxfp8"),
    )
    for name in names.split()
}  # fmt: skip
"""Known elsewhere, not offered here, and the name of ours that is nearest in size."""
