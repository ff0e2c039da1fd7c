"""The tensor types of GGUF: number, name, block size, and which storage format of ours each one is.

Source: `enum ggml_type` and the block structs in ggml's ggml.h and ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """One of ggml's types: `elements` values share a block of `bytes` bytes.

    `format` is the storage format of ours with the same blocks, empty for plain types that are
    no weights (integers, f64).
    """

    number: int
    name: str
    elements: int
    bytes: int
    format: str = ""


READABLE = {
    type.number: type
    for type in (
        TensorType(0, "F32", 1, 4, "f32"),
        TensorType(1, "F16", 1, 2, "f16"),
        TensorType(2, "Q4_0", 32, 18, "q4_0"),
        TensorType(3, "Q4_1", 32, 20, "q4_1"),
        TensorType(6, "Q5_0", 32, 22, "q5_0"),
        TensorType(7, "Q5_1", 32, 24, "q5_1"),
        TensorType(8, "Q8_0", 32, 34, "q8_0"),
        TensorType(10, "Q2_K", 256, 84, "q2_k"),
        TensorType(11, "Q3_K", 256, 110, "q3_k"),
        TensorType(12, "Q4_K", 256, 144, "q4_k"),
        TensorType(13, "Q5_K", 256, 176, "q5_k"),
        TensorType(14, "Q6_K", 256, 210, "q6_k"),
        TensorType(24, "I8", 1, 1),
        TensorType(25, "I16", 1, 2),
        TensorType(26, "I32", 1, 4),
        TensorType(27, "I64", 1, 8),
        TensorType(28, "F64", 1, 8),
        TensorType(30, "BF16", 1, 2, "bf16"),
    )
}
"""By number: what a file may hold."""

OF_FORMAT = {type.format: type for type in READABLE.values() if type.format}
"""By storage format: what a file of ours holds."""

REFUSED = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the types that we don't read, for the message."""
